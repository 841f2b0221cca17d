"""The grids of `experiments/` are whole: their cells build, and one of each kind runs in its quick form."""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from caveat.methods import discover

FOLDER = Path(__file__).parents[1] / "experiments" / "ssvi"
OWN = ("problems", "cells", "tables", "run")


@pytest.fixture
def ssvi(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The experiment's modules, which other experiments have by the same names."""
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield {name: import_module(name) for name in OWN}
    for name in OWN:
        sys.modules.pop(name, None)


def test_every_cell_of_ssvi_is_a_method_and_its_settings_are_chosen_by_cells(ssvi: dict[str, ModuleType]) -> None:
    grid = ssvi["cells"]
    every = list(grid.cells(3))
    names = [cell.name for cell in every]
    assert len(set(names)) == len(names)
    known = {type(method.quick).__name__ for method in discover().values()}
    for cell in every:
        assert {need.name for need in cell.needs} <= set(names)
        assert grid.chosen(cell, {}) is None or cell.question == "choose"
        settings = grid.chosen(cell, {need.name: place for place, need in enumerate(cell.needs)})
        assert type(grid.method_of(cell, settings)).__name__ in known
    assert {cell.setting for cell in every if cell.question == "sweep"} == {"0", "50", "80", "90", "95", "98", "99"}


def test_settings_are_those_of_lowest_validation_nll(ssvi: dict[str, ModuleType]) -> None:
    grid = ssvi["cells"]
    cell = grid.Cell("sweep", "mnist", "channel", "90", 1)
    scored = {need.name: 1.0 for need in cell.needs}
    best = cell.needs[5]
    assert best.name.startswith("choose/fashion_mnist/ssvi/")
    assert str(grid.chosen(cell, scored | {best.name: 0.5})) == best.setting


def test_a_quick_cell_of_ssvi_is_measured_and_in_the_tables(
    ssvi: dict[str, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid, run = ssvi["cells"], ssvi["run"]
    place = grid.Place(ssvi["problems"].Source(), "cpu", quick=True)
    settings = grid.candidates("digits", "ssvi")[0]
    path = tmp_path / "results.csv"
    for question, setting in (("sweep", "95"), ("criterion", "magnitude")):
        run.write(path, grid.run_cell(grid.Cell(question, "digits", "ssvi", setting, 0), settings, place))
    sweep, _ = run.read(path)
    assert 0.94 < float(sweep["sparsity"]) < 0.96
    assert float(sweep["training_flops"]) > 0
    assert float(sweep["inference_flops"]) > 0
    assert run.main(["--summary", "--csv", str(path)]) == 0
    assert "| SSVI 95% |" in capsys.readouterr().out


def test_rows_come_back_from_an_exported_file(
    ssvi: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = ssvi["problems"]
    monkeypatch.setattr(problems, "PROBLEMS", {"digits": problems.PROBLEMS["digits"]})
    problems.export(tmp_path / "rows.npz", 1, None)
    own, copied = (problems.problem("digits", 0, problems.Source(f)) for f in (None, tmp_path / "rows.npz"))
    for part in ("train", "validation", "test"):
        (x, y), (again, labels) = getattr(own, part).tensors, getattr(copied, part).tensors
        assert y.equal(labels)
        assert (x - again).abs().max() < 1e-5


def test_the_second_table_has_all_eight_methods_and_goes_on_where_it_stopped(
    ssvi: dict[str, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    second = import_module("second_table")
    try:
        for name, scale in second.SCALES.items():
            assert len(second.methods(scale, second.training_of(name, scale, "cpu"))) == 8
        words = ["--quick", "--seeds", "1", "--csv", str(tmp_path / "table.csv")]
        words += ["--methods", "RigL", "StructuredBayesianPruning"]
        assert second.main(words) == 0
        rows = second.read(tmp_path / "table.csv")
        assert [row["method"] for row in rows] == ["RigL", "StructuredBayesianPruning"]
        assert rows[1]["left"].startswith("1: ")
        for column in ("accuracy", "nll", "bytes", "training_flops", "seconds", "predict", "pass"):
            assert all(float(row[column]) > 0 for row in rows)
        assert second.main(words) == 0
        assert len(second.read(tmp_path / "table.csv")) == 2
        assert "| RigL |" in capsys.readouterr().out
    finally:
        sys.modules.pop("second_table", None)
