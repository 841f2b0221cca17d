"""A cell: fitted once, scored on what is asked, its files cut to what is needed."""

from pathlib import Path

import numpy as np
import pytest

from caveat import bench
from caveat.bench.cells import task_of
from caveat.bench.plan import cells_of
from caveat.data import crop_and_flip
from caveat.storage import read_json
from tests.bench.small import run, write


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
        _, task = task_of(cell, cell.data.load(None), cell.candidates[0])
        assert task.n == (90 if "train_rows" in more else 1294), "a tenth is held out"
        assert (task.augment is crop_and_flip) == ("augment" in more)
    assert len(set(names)) == 3
