"""The experiments are whole: files plan, grids build, one cell of a kind runs, and what the READMEs name is there."""

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from torch.utils.data import TensorDataset

from caveat.bench import cells_of, read_experiment
from caveat.bench.cells import task_of
from caveat.data import DataSet
from caveat.methods import discover

ROOT = Path(__file__).parents[1]
EXPERIMENTS = ROOT / "experiments"
FOLDER = EXPERIMENTS / "ssvi"
FILES = sorted(EXPERIMENTS.rglob("*.toml"))
READMES = sorted(EXPERIMENTS.rglob("README.md"))
NAMED = re.compile(r"[\w./-]+\.(?:py|toml|csv|png|md)\b")
BY_BENCH = {"summary.csv"}  # that `caveat bench` writes into its folder of results
OWN = ("problems", "cells", "tables", "run")


@pytest.fixture
def ssvi(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The experiment's modules, which other experiments have by the same names."""
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield {name: import_module(name) for name in OWN}
    for name in OWN:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(EXPERIMENTS)))
def test_every_experiment_file_plans(file: Path) -> None:
    cells = cells_of(read_experiment(file))
    assert len({cell.name for cell in cells}) == len(cells) > 2
    assert file.stem in (EXPERIMENTS / "README.md").read_text(), "experiments/README.md says what it is for"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(EXPERIMENTS)))
def test_the_networks_of_an_experiment_file_take_its_data(file: Path) -> None:
    """Where the data are at hand; a few rows of them."""
    experiment = read_experiment(file)
    absent = []
    for cell in cells_of(experiment):
        if cell.label != "map" or cell.seed != experiment.seeds[0]:
            continue
        try:
            found = few(cell.data.load(None))
        except FileNotFoundError:
            absent.append(cell.data.name)
            continue
        _, task = task_of(experiment, cell, found)
        x, y = (tensor[:2] for tensor in found.train.tensors)
        assert task.network(task.network.params(), x).shape[0] == len(y)
    if absent:
        pytest.skip(f"not at hand: {', '.join(dict.fromkeys(absent))}")


def few(data: DataSet) -> DataSet:
    """With 100 training rows."""
    return replace(data, train=TensorDataset(*(tensor[:100] for tensor in data.train.tensors)))


@pytest.mark.parametrize("readme", READMES, ids=lambda file: str(file.relative_to(ROOT)))
def test_what_a_readme_of_the_experiments_names_is_there(readme: Path) -> None:
    named = set(NAMED.findall(readme.read_text())) - BY_BENCH
    places = (readme.parent, EXPERIMENTS, ROOT)
    assert not {name for name in named if not any((place / name).exists() for place in places)}


def test_every_script_and_result_of_the_experiments_is_named() -> None:
    """A result that no README speaks of is no result: by its own name, or by the script or file that it is named as."""
    for folder in (path for path in EXPERIMENTS.iterdir() if (path / "README.md").exists()):
        text = (folder / "README.md").read_text() + (EXPERIMENTS / "README.md").read_text()
        for file in (file for kind in ("csv", "png", "toml") for file in folder.glob(f"*.{kind}")):
            names = (file.name, f"{file.stem}.py", f"{file.stem}.toml")
            assert any(name in text for name in names), f"{file.relative_to(ROOT)} is in no README"


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
