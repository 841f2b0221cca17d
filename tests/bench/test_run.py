"""A run: failures, kills, two runs at once, and going on afterwards."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from caveat import bench
from caveat.bench.plan import cells_of
from caveat.bench.results import long_table, read_results
from caveat.cli import main
from caveat.files import FolderInUse, sole_use
from caveat.storage import read_json
from tests.bench.small import rows_of, run, stamps, write


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
    file, out = finished
    with sole_use(out, out / ".lock"), pytest.raises(FolderInUse, match=r"in use by process \d+ on "):
        run(file, out)
    assert not (out / ".lock").exists()
