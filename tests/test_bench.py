"""`caveat bench`: the file, the grid, what is kept and what is skipped, failures, kills, and the tables."""

import csv
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from caveat import bench
from caveat.bench.cells import Place, task_of
from caveat.bench.compare import comparisons, ranks
from caveat.bench.grid import cells_of, evaluation_key
from caveat.bench.guards import guard_text, guards
from caveat.bench.results import long_table, read_results, summary_table
from caveat.bench.workers import Died, in_processes
from caveat.cli import main
from caveat.data import crop_and_flip
from caveat.storage import read_json

TINY = """
data = ["{data}"]
models = ["mlp"]
seeds = [0, 1]
ood = ["noise"]
[map]
epochs = {epochs}
[shifts]
feature_shift = [0.5, 2]
[methods.last_layer_laplace]
n_draws = {draws}
"""


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two clouds of three numbers each, as a csv."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 300)
    x = rng.normal(size=(300, 3)) + y[:, None]
    path = tmp_path_factory.mktemp("data") / "clouds.csv"
    lines = [",".join(f"{v:.4f}" for v in row) + f",{'ab'[label]}" for row, label in zip(x, y, strict=True)]
    path.write_text("\n".join(["u,v,w,label", *lines]) + "\n")
    return path


def write(path: Path, data: Path, epochs: int = 5, draws: int = 10, more: str = "") -> Path:
    path.write_text(TINY.format(data=data, epochs=epochs, draws=draws) + more)
    return path


def run(file: Path, out: Path, **options: object) -> bench.Bench:
    return bench.run_bench(file, Place(out, torch.device("cpu")), say=lambda text: None, **options)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, table: Path) -> tuple[Path, Path]:
    """An experiment file and the folder of its results."""
    folder = tmp_path_factory.mktemp("bench")
    file = write(folder / "tiny.toml", table)
    assert not run(file, folder / "out").failed
    return file, folder / "out"


def stamps(out: Path) -> dict[str, int]:
    return {str(p.relative_to(out)): p.stat().st_mtime_ns for p in out.glob("cells/*/result.json")}


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_the_grid_has_the_two_maps_and_every_method(finished: tuple[Path, Path]) -> None:
    experiment = bench.read_experiment(finished[0])
    cells = cells_of(experiment)
    assert list(experiment.methods) == ["map", "map_tempered", "last_layer_laplace"]
    assert len(cells) == len({cell.name for cell in cells}) == 6
    points = {(cell.seed): cell.name for cell in cells if cell.label == "map"}
    assert all(cell.start == (None if cell.label == "map" else points[cell.seed]) for cell in cells)


def test_finished_cells_are_skipped_and_a_changed_knob_is_another_cell(
    finished: tuple[Path, Path], table: Path, tmp_path: Path
) -> None:
    file, out = finished
    before = stamps(out)
    assert len(before) == 6
    assert run(file, out).ran == 0
    assert stamps(out) == before
    changed = write(tmp_path / "tiny.toml", table, draws=11)
    assert run(changed, out).ran == 2, "only the cells of the method whose knob changed"
    assert {name: stamp for name, stamp in stamps(out).items() if name in before} == before
    trained = write(tmp_path / "tiny.toml", table, epochs=6)
    assert {c.name for c in cells_of(bench.read_experiment(trained))}.isdisjoint(
        c.name for c in cells_of(bench.read_experiment(file))
    ), "all of them start from the MAP"


def test_another_shift_is_scored_without_a_new_fit(finished: tuple[Path, Path], table: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "tiny.toml", table)
    out = tmp_path / "out"
    run(file, out)
    fits = {p: p.stat().st_mtime_ns for p in out.glob("cells/*/posterior/posterior.json")}
    file.write_text(file.read_text().replace("feature_shift = [0.5, 2]", "feature_shift = [1]"))
    assert run(file, out).ran == 6
    assert {p: p.stat().st_mtime_ns for p in out.glob("cells/*/posterior/posterior.json")} == fits
    cell = next(out.glob("cells/*"))
    names = {"clean.npz", "feature-shift-1.npz", "noise.npz"}
    assert {p.name for p in (cell / "scores").glob("*")} == {p.name for p in (cell / "predictions").glob("*")} == names


def test_the_shared_map_is_trained_once(finished: tuple[Path, Path]) -> None:
    _, out = finished
    experiment = bench.read_experiment(finished[0])
    for cell in cells_of(experiment):
        posterior = read_json(out / "cells" / cell.name / "posterior" / "posterior.json")
        own = posterior["info"]["gradient_evaluations"]
        cost = read_json(out / "cells" / cell.name / "result.json")["cost"]
        if cell.label == "map":
            assert (own, cost["gradient_evaluations"], cost["start_seconds"]) == (5, 5, None)
        else:
            assert cost["gradient_evaluations"] == own + 5, "the MAP counts among the costs"
            assert cost["fit_seconds"] == pytest.approx(posterior["info"]["seconds"] + cost["start_seconds"])


def test_tables_hold_what_the_cells_measured(finished: tuple[Path, Path]) -> None:
    file, out = finished
    results = read_results(bench.read_experiment(file), out)
    table = rows_of(out / "results.csv")
    columns = ["data", "model", "method", "seed", "shift", "severity", "metric", "value", "stderr", "role"]
    assert list(table[0]) == columns
    chosen = [r for r in table if (r["method"], r["shift"], r["metric"]) == ("map", "feature_shift", "nll")]
    assert [(r["seed"], r["severity"]) for r in chosen] == [("0", "0.5"), ("0", "2.0"), ("1", "0.5"), ("1", "2.0")]
    for result in results:
        for part in result.parts:
            if part["role"] == "test":
                scores = result.rows(part)
                assert part["metrics"]["nll"]["mean"] == pytest.approx(-scores["log_prob"].mean(), rel=1e-5)
                assert part["metrics"]["accuracy"]["mean"] == pytest.approx(scores["correct"].mean())
                assert part["metrics"]["brier"]["mean"] == pytest.approx(scores["brier"].mean(), rel=1e-5)
                assert scores["bin_count"].sum() == len(scores["rows"]) == 60
    wide = [r for r in rows_of(out / "summary.csv") if r["method"] == "map" and r["shift"] == "clean"]
    values = [float(r["value"]) for r in table if (r["method"], r["shift"], r["metric"]) == ("map", "clean", "nll")]
    assert len(wide) == 1
    assert wide[0]["seeds"] == "2"
    assert float(wide[0]["nll"]) == pytest.approx(np.mean(values))
    assert float(wide[0]["nll_stderr"]) == pytest.approx(np.std(values, ddof=1) / np.sqrt(2))
    assert wide[0]["start_seconds"] == "", "a MAP starts from nothing, which is not zero"
    index = read_json(out / "bench.json")
    assert [entry["status"] for entry in index["cells"]] == ["done"] * 6
    with np.load(next((out / "inputs").glob("*/clean.npz"))) as shown:
        assert shown["x"].shape == (60, 3)


def test_comparisons_are_paired_by_row_and_seed(finished: tuple[Path, Path]) -> None:
    file, out = finished
    results = read_results(bench.read_experiment(file), out)
    table = comparisons(results, "map_tempered")
    by = {(r.cell.label, r.cell.seed): r for r in results}
    row = next(
        r
        for r in table
        if (r["method"], r["shift"], r["severity"], r["metric"]) == ("map", "feature_shift", None, "nll")
    )
    assert (row["severities"], row["seeds"], row["rows"], row["over"]) == (2, 2, 60, "seeds and rows")
    gains = []
    for seed in (0, 1):
        ours, theirs = (
            np.mean([by[label, seed].rows(p)["log_prob"] for p in by[label, seed].parts[1:3]], axis=0)
            for label in ("map", "map_tempered")
        )
        gains.append(ours - theirs)
    assert row["gain"] == pytest.approx(np.mean(gains), rel=1e-4)
    outside = next(r for r in table if (r["method"], r["metric"]) == ("last_layer_laplace", "auroc_entropy"))
    auroc = {
        label: np.mean([by[label, s].parts[-1]["metrics"]["auroc_entropy"]["mean"] for s in (0, 1)])
        for label in ("last_layer_laplace", "map_tempered")
    }
    assert outside["gain"] == pytest.approx(auroc["last_layer_laplace"] - auroc["map_tempered"], abs=1e-6)
    assert not [r for r in table if r["method"] == "map_tempered"]


def test_ranks() -> None:
    def row(method: str, shift: str, severity: float, value: float, metric: str = "nll") -> dict[str, object]:
        role = "clean" if shift == "clean" else "shift"
        who = {"data": "d", "model": "m", "method": method, "seed": 0, "shift": shift, "severity": severity}
        return who | {"metric": metric, "value": value, "stderr": None, "role": role}

    table = [row("a", "s", 1, 0.2), row("a", "s", 2, 0.4), row("b", "s", 1, 0.3), row("b", "s", 2, 0.5)]
    table += [
        row("c", "s", 1, 0.3),
        row("c", "s", 2, 0.5),
        row("a", "t", 1, 0.9),
        row("b", "t", 1, 0.1),
        row("c", "t", 1, 0.5),
    ]
    table += [row("a", "s", 1, 0.9, "accuracy"), row("b", "s", 1, 0.8, "accuracy")]
    found = {(r["method"], r["metric"], r["shift"]): r["rank"] for r in ranks(table)}
    assert [found[m, "nll", "s"] for m in "abc"] == [1, 2.5, 2.5], "b and c tie"
    assert [found[m, "nll", "all shifts"] for m in "abc"] == [2, 1.75, 2.25]
    assert (found["a", "accuracy", "s"], found["b", "accuracy", "s"]) == (1, 2), "higher is better"


def test_guard_rails_say_where_a_method_is_not_better() -> None:
    def row(
        method: str, shift: str, gain: float, reach: float, verdict: str, severity: object = None
    ) -> dict[str, object]:
        who = {"data": "digits", "model": "mlp", "method": method, "baseline": "map_tempered"}
        where = {"shift": shift, "severity": severity, "role": "clean" if shift == "clean" else "shift"}
        interval = {"gain": gain, "low": gain - reach, "high": gain + reach, "over": "seeds and rows"}
        return who | where | interval | {"metric": "nll", "verdict": verdict}

    table = [
        row("map", "clean", -0.5, 0.1, "worse"),
        row("swag", "clean", -0.2, 0.1, "worse"),
        row("swag", "rotation", 0.01, 0.1, "not distinguishable"),
        row("swag", "rotation", 0.9, 0.1, "better", severity=15.0),
        row("ensemble", "clean", 0.2, 0.1, "better"),
        row("ensemble", "rotation", 0.3, 0.1, "better"),
    ]
    with_map = [
        row("swag", "clean", -0.3, 0.1, "worse"),
        row("ensemble", "clean", 0.7, 0.1, "better"),
        row("ensemble", "rotation", 0.05, 0.1, "not distinguishable"),
    ]
    found = guards(table, with_map)
    assert [(g.shift, g.verdicts, g.marked) for g in found] == [
        ("clean", {"map": "worse", "swag": "worse", "ensemble": "better"}, ()),
        ("rotation", {"swag": "not distinguishable", "ensemble": "better"}, ("ensemble",)),
    ]
    text = guard_text(found)
    assert "worse                map -0.500 [-0.600, -0.400], swag -0.200 [-0.300, -0.100]" in text
    assert "better               ensemble* +0.300" in text
    assert "* not shown to be better than map there" in text
    assert "Nowhere shown to be better than map_tempered and map: swag." in text
    assert "digits, mlp, clean, NLL: worse: map" in found[0].sentence()
    only_there = guard_text(guards([r for r in table if r["shift"] == "rotation"], with_map))
    assert "Nowhere shown to be better than map_tempered and map: swag, ensemble." in only_there


def test_a_gain_that_does_not_show_is_level() -> None:
    who = {"data": "d", "model": "m", "shift": "clean", "severity": None, "role": "clean", "metric": "nll"}
    rows = [
        who | {"method": m, "baseline": "map_tempered", "gain": gain, "low": gain - 1e-5, "high": gain + 1e-5}
        for m, gain in (("a", 0.0004), ("b", -0.0004), ("c", 0.0006))
    ]
    rows = [row | {"over": "rows", "verdict": "worse" if row["gain"] < 0 else "better"} for row in rows]
    (found,) = guards(rows)
    assert found.verdicts == {"a": "level", "b": "level", "c": "better"}
    assert "level                a +0.000 [+0.000, +0.000], b -0.000" in guard_text([found])
    (found,) = guards([row | {"gain": 0.3} for row in rows[:1]], [row | {"baseline": "map"} for row in rows[:1]])
    assert (found.verdicts, found.marked) == ({"a": "better"}, ("a",)), "level with the plain MAP"


def test_warnings_and_notes_stand_beside_the_verdicts(finished: tuple[Path, Path], table: Path) -> None:
    file, out = finished
    experiment = bench.read_experiment(file)
    words = "the temperature ran to the end of its range"
    results = [
        dataclasses.replace(r, warnings=(words,) if r.cell.label == "map_tempered" else (), notes=("another prior",))
        for r in read_results(experiment, out)
    ]
    found = guards(comparisons(results, "map_tempered"), (), results)
    assert all(guard.warned == {"map_tempered": (words,)} and guard.notes == ("another prior",) for guard in found)
    text = " ".join(guard_text(found).split())
    assert text.count("clouds, mlp: fits with warnings: map_tempered (1)") == 1
    assert f"all verdicts are against map_tempered, which says: {words}" in text
    assert text.count("closeness to the reference is not of methods alone: another prior.") == 1


def test_summary_has_no_number_that_was_not_measured() -> None:
    who = {
        "data": "d",
        "model": "m",
        "method": "a",
        "shift": "clean",
        "severity": None,
        "stderr": None,
        "role": "clean",
    }
    cost = {"shift": None, "role": "cost", "metric": "flops"}
    table = [who | {"seed": s, "metric": "nll", "value": v} for s, v in ((0, 0.5), (1, None))]
    table += [who | cost | {"seed": s, "value": v} for s, v in ((0, 7.0), (1, 7.0))]
    (line,) = summary_table(table)
    assert (line["nll"], line["nll_stderr"], line["flops"], line["flops_stderr"]) == (None, None, 7.0, 0.0)


def test_failures_are_recorded_and_the_rest_go_on(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = '[methods.broken]\nmethod = "last_layer_laplace"\nlayer = "nowhere"\n'
    file = write(tmp_path / "tiny.toml", table, epochs=2, more=more)
    code = main(["bench", str(file), "--out", str(tmp_path / "out"), "--quiet"])
    printed = capsys.readouterr()
    assert code == 1
    assert "2 of 8 cells failed" in printed.err
    assert "layer='nowhere'" in printed.err
    failures = [read_json(path) for path in (tmp_path / "out").glob("cells/*/failure.json")]
    assert len(failures) == 2
    assert "layer='nowhere'" in failures[0]["error"]
    assert "Traceback" in failures[0]["traceback"]
    assert len(stamps(tmp_path / "out")) == 6
    statuses = [entry["status"] for entry in read_json(tmp_path / "out" / "bench.json")["cells"]]
    assert sorted(statuses) == ["done"] * 6 + ["failed"] * 2


def test_side_by_side_is_the_same(finished: tuple[Path, Path], tmp_path: Path) -> None:
    file, out = finished
    assert not run(file, tmp_path / "out", jobs=2).failed
    experiment = bench.read_experiment(file)
    alone, together = (long_table(read_results(experiment, place)) for place in (out, tmp_path / "out"))
    measured = [[r["value"] for r in found if r["role"] != "cost"] for found in (alone, together)]
    np.testing.assert_allclose(*measured, rtol=1e-4, atol=1e-5)  # the threads differ


def die(job: int) -> int:
    if job == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return 10 * job


def test_a_worker_that_dies_costs_one_job() -> None:
    found = dict(in_processes(die, [0, 1, 2, 3], lambda job: True, 2))
    assert {job: answer for job, answer in found.items() if job != 1} == {0: 0, 2: 20, 3: 30}
    assert isinstance(found[1], Died)
    assert "SIGKILL" in found[1].reason


@pytest.mark.parametrize(("jobs", "how"), [(1, signal.SIGINT), (2, signal.SIGKILL)])
def test_stopped_half_way_and_started_again(jobs: int, how: signal.Signals, table: Path, tmp_path: Path) -> None:
    """Stopped after the second finished cell; the second call repeats none of them and finishes the rest."""
    more = "[methods.deep_ensemble]\nmembers = 3\ntraining.epochs = 200\n"
    file, out = write(tmp_path / "tiny.toml", table, epochs=200, more=more), tmp_path / "out"
    command = [sys.executable, "-m", "caveat.cli", "bench", str(file), "--out", str(out), "--jobs", str(jobs)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a test run in the background ignores it
    )
    deadline = time.monotonic() + 300
    while len(stamps(out)) < 2 and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(how)
    assert process.wait() == (130 if how == signal.SIGINT else -signal.SIGKILL)
    time.sleep(0.3)  # workers notice that nobody is there, and end
    before = stamps(out)
    assert 2 <= len(before) < 8
    if how == signal.SIGINT:
        assert len({(r["method"], r["seed"]) for r in rows_of(out / "results.csv")}) == len(before), (
            "tables of what is done"
        )
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    after = stamps(out)
    assert json.loads(done.stdout)["ran"] == 8 - len(before)
    assert len(after) == 8
    assert {name: after[name] for name in before} == before, "no finished cell was run again"
    assert not list(out.glob("cells/*/posterior.partial"))


def test_two_runs_in_one_folder_are_refused(finished: tuple[Path, Path]) -> None:
    from caveat.bench.run import _locked

    file, out = finished
    with _locked(out), pytest.raises(RuntimeError, match="in use by another"):
        run(file, out)


def test_rows_are_cut_evenly(table: Path, tmp_path: Path) -> None:
    text = write(tmp_path / "tiny.toml", table, epochs=2).read_text()
    (tmp_path / "tiny.toml").write_text("kept_rows = 7\ntest_rows = 30\n" + text)
    run(tmp_path / "tiny.toml", tmp_path / "out")
    cell = next((tmp_path / "out").glob("cells/*"))
    with np.load(cell / "predictions" / "clean.npz") as kept, np.load(cell / "scores" / "clean.npz") as scores:
        assert kept["rows"].tolist() == [0, 5, 10, 14, 19, 24, 29]
        assert len(scores["rows"]) == 30
        np.testing.assert_allclose(scores["log_prob"][kept["rows"]], kept["log_prob"])


def test_training_rows_are_cut_and_augmented(tmp_path: Path) -> None:
    text = 'data = ["digits"]\nmodels = ["mlp"]\n'
    names = []
    for more in ("", "train_rows = 100\n", 'augment = "crop_and_flip"\n'):
        file = tmp_path / "digits.toml"
        file.write_text(more + text)
        experiment = bench.read_experiment(file)
        cell = cells_of(experiment)[0]
        names.append(cell.name)
        _, task = task_of(experiment, cell, cell.data.load(None))
        assert task.n == (90 if "train_rows" in more else 1294), "a tenth is held out"
        assert (task.augment is crop_and_flip) == ("augment" in more)
    assert len(set(names)) == 3


def test_inputs_of_one_or_two_numbers_have_a_plane(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for columns in (1, 2):
        x = rng.uniform(-1, 1, (60, columns))
        lines = [",".join(f"{v:.4f}" for v in (*row, np.sin(row.sum()))) for row in x]
        (tmp_path / f"toy{columns}.csv").write_text("\n".join([",".join("abc"[: columns + 1]), *lines]) + "\n")
    (tmp_path / "toy.toml").write_text('data = ["toy1.csv", "toy2.csv"]\nmodels = ["mlp"]\n[map]\nepochs = 2\n')
    done = run(tmp_path / "toy.toml", tmp_path / "out")
    assert not done.failed
    for name, shape in (("toy1", (200, 1)), ("toy2", (3600, 2))):
        with np.load(next((tmp_path / "out").glob(f"cells/{name}-*/plane.npz"))) as plane:
            assert plane["x"].shape == shape
            assert plane["mean"].shape == (shape[0], 1)
            assert plane["x"].min() < -2.5, (
                "standardised inputs end near -1.7, and the line goes on for half their range"
            )


def test_dry_run_shows_the_grid(
    finished: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = finished
    assert main(["bench", str(file), "--dry-run", "--out", str(tmp_path / "none"), "--json"]) == 0
    grid = json.loads(capsys.readouterr().out)["grid"]
    assert [(e["method"], e["cells"], e["done"]) for e in grid] == [
        ("map", 2, 0),
        ("map_tempered", 2, 0),
        ("last_layer_laplace", 2, 0),
    ]
    assert 0 < grid[0]["seconds"] < 60
    assert grid[2]["seconds"] is None
    assert all(e["memory"] > 0 for e in grid)
    assert not (tmp_path / "none").exists()
    assert main(["bench", str(file), "--dry-run", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "finished cells" in printed
    assert "6 cells, 6 done" in printed


def test_parquet(finished: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    file, out = finished
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pyarrow", None)
        with pytest.raises(ImportError, match="pip install pyarrow"):
            run(file, out, parquet=True)
    pytest.importorskip("pyarrow")
    import pyarrow.parquet

    run(file, out, parquet=True)
    table = pyarrow.parquet.read_table(out / "results.parquet")
    assert table.num_rows == len(rows_of(out / "results.csv"))


GOOD = 'data = ["digits"]\nmodels = ["mlp"]\n'


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('data = ["digitz"]\nmodels = ["mlp"]', "data: no data set 'digitz', by name or path (did you mean 'digits'"),
        ('models = ["mlp"]', "data: an experiment needs it"),
        ('data = "digits"\nmodels = ["mlp"]', "data: must be a list of names"),
        ('data = ["digits"]\nmodels = ["mpl"]', "models: there is no 'mpl' (did you mean 'mlp'"),
        ('data = ["digits"]\nmodels = ["mine.py:net"]', "mine.py of 'mine.py:net' is not a file"),
        (GOOD + "sedes = [1]", "sedes: an experiment has no key 'sedes' (did you mean 'seeds'"),
        (GOOD + "seeds = [1, 1]", "seeds: must be different whole numbers"),
        (GOOD + "validation = 0", "validation=0"),
        ('augment = "crop_flip"\n' + GOOD, "augment: there is no 'crop_flip' (did you mean 'crop_and_flip'"),
        (
            "train_rows = 9\n" + GOOD + '\n[reference]\ndigits = "digits"\n',
            "train_rows: a reference is the posterior of its own training rows",
        ),
        (GOOD + "[methods.swagg]", "methods.swagg: there is no 'swagg' (did you mean 'swag'"),
        (GOOD + "[methods.swag]\nrnak = 3", "methods.swag.rnak: SWAG has no knob 'rnak' (did you mean 'rank'"),
        (GOOD + "[methods.swag]\ntraining.epoch = 3", "methods.swag.training.epoch: Training has no knob"),
        (GOOD + "[methods.swag]\nrank = -3", "methods.swag: SWAG(rank=-3): must be"),
        (GOOD + "[methods.a]\nmethod = 'swag'\n[methods.b]\nmethod = 'swag'", "methods: a and b are the same"),
        (GOOD + "[methods.map]\ntemperature = true", "methods.map: is always there"),
        (GOOD + "[map]\nepochs = -1", "map: Training(epochs=-1)"),
        (GOOD + "[shifts]\nrotatoin = [15]", "shifts.rotatoin: there is no shift 'rotatoin': did you mean 'rotation'"),
        (GOOD + "[shifts]\nfog = [6]", "shifts.fog: fog has no severity 6"),
        (GOOD + "[shifts]\nfog = ['hard']", "shifts.fog: severities are numbers"),
        ('ood = ["photos"]\n' + GOOD, "ood: 'photos': there is no 'photos' (did you mean 'photographs'"),
        (GOOD + "[reference]\ndigitz = 'digits'", "reference.digitz: there is no 'digitz'"),
        (GOOD + "[reference]\ndigits = 'digit'", "reference.digits: there is no reference 'digit'"),
        ('baseline = "swag"\n' + GOOD, "baseline: there is no 'swag'"),
        (GOOD + "seeds = [[0]]", "seeds: must be"),
        ("data = [", "is not a TOML file"),
    ],
)
def test_bad_files_are_refused_with_the_key(text: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(ValueError, match=r"bad\.toml") as raised:
        bench.read_experiment(tmp_path / "bad.toml")
    assert complaint in str(raised.value)


@pytest.mark.parametrize(
    ("head", "shifts", "complaint"),
    [
        ('models = ["mlp"]', "rotation = [30]", "shifts.rotation on 'clouds': rotation is no shift for clouds"),
        ('models = ["mlp"]\nood = ["photographs"]', "", "ood: 'photographs' for 'clouds': 'photographs' is no out-of-"),
        ('models = ["lenet5"]', "", "models: 'lenet5' on 'clouds': lenet5 takes images"),
        ('models = ["own.py:narrow"]', "", "models: 'narrow' on 'clouds': the network could not take"),
        ('models = ["own.py:broken"]', "", "models: 'broken' on 'clouds': ZeroDivisionError"),
    ],
)
def test_what_the_data_cannot_have_is_refused_before_a_fit(
    head: str, shifts: str, complaint: str, table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = "from torch import nn\ndef {}():\n    return nn.Linear({}, 2)\n"
    (tmp_path / "own.py").write_text(made.format("narrow", "2") + made.format("broken", "1 // 0"))
    (tmp_path / "bad.toml").write_text(f'data = ["{table}"]\n{head}\n[shifts]\n{shifts}\n[map]\nepochs = 1\n')
    for way in ([], ["--dry-run"]):
        assert main(["bench", str(tmp_path / "bad.toml"), "--out", str(tmp_path / "out"), *way]) != 0
        assert f"bad.toml: {complaint}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_one_severity_needs_no_list(tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text(GOOD + "[shifts]\nfog = 3")
    assert bench.read_experiment(tmp_path / "one.toml").shifts == (("fog", (3.0,)),)


def test_digits_can_be_what_is_outside(tmp_path: Path) -> None:
    (tmp_path / "mnist.toml").write_text('data = ["mnist"]\nmodels = ["mlp"]\nood = ["digits", "fashion_mnist"]')
    assert bench.read_experiment(tmp_path / "mnist.toml").ood == ("digits", "fashion_mnist")


def test_the_experiments_of_this_project_can_be_read() -> None:
    files = sorted((Path(__file__).parents[1] / "experiments").glob("*.toml"))
    assert files
    for file in files:
        cells = cells_of(bench.read_experiment(file))
        assert len({cell.name for cell in cells}) == len(cells)


def test_a_model_file_is_known_by_its_content(tmp_path: Path) -> None:
    keys = []
    for folder, width in (("a", 4), ("b", 4), ("c", 5)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "nets.py").write_text(
            f"from torch import nn\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, {width}))\n"
        )
        file = tmp_path / folder / "x.toml"
        file.write_text('data = ["digits"]\nmodels = ["nets.py:net"]\n')
        experiment = bench.read_experiment(file)
        cell = cells_of(experiment)[0]
        keys.append((cell.name, evaluation_key(experiment, cell)))
    assert keys[0] == keys[1]
    assert keys[0][0] != keys[2][0]
