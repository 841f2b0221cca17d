"""Data sets, models and shifts whose short names are the same: each keeps a label of its own, or is refused."""

from pathlib import Path

import pytest

from caveat import bench
from caveat.bench.plan import cells_of
from tests.bench.small import complaint_of, rows_of, run

TABLE = "u,v,label\n" + "".join(f"{i % 7},{i % 5},{'ab'[i % 2]}\n" for i in range(60))
NETWORK = "from torch import nn\ndef make():\n    return nn.Linear(2, 2)\n"
SHIFT = "def warp(data, severity, seed):\n    return data.test.tensors[0] + severity\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "t.csv").write_text(TABLE if name == "a" else TABLE.replace("6,", "9,"))
        (tmp_path / f"{name}.py").write_text(NETWORK)
        (tmp_path / f"{name}_shift.py").write_text(SHIFT)
    return tmp_path


def experiment_of(folder: Path, text: str) -> bench.Experiment:
    (folder / "same.toml").write_text(text)
    return bench.read_experiment(folder / "same.toml")


def test_every_entry_is_run_and_is_in_the_tables(folder: Path) -> None:
    text = 'data = ["a/t.csv", "b/t.csv"]\nmodels = ["a.py:make", "b.py:make"]\n[map]\nepochs = 2\n'
    cells = cells_of(experiment_of(folder, text))
    assert {(cell.data.label, cell.model) for cell in cells} == {
        (data, model) for data in ("a/t.csv", "b/t.csv") for model in ("a.py:make", "b.py:make")
    }
    assert len({cell.name for cell in cells}) == len(cells) == 8
    assert {cell.problem.models[cell.model] for cell in cells} == {f"{folder / f}.py:make" for f in "ab"}
    assert not run(folder / "same.toml", folder / "out").failed
    table = {(row["data"], row["model"], row["method"]) for row in rows_of(folder / "out" / "summary.csv")}
    assert table == {(cell.data.label, cell.model, cell.label) for cell in cells}
    assert len(list((folder / "out" / "inputs").iterdir())) == 2


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (["a/t.csv", "digits"], ["t", "digits"]),
        (["a/t.csv", "b/t.csv", "digits"], ["a/t.csv", "b/t.csv", "digits"]),
        (["digits", "a/digits.csv"], ["digits", "a/digits.csv"]),
        (["t.csv", "a/t.csv", "b/t.csv.csv"], ["t.csv", "a/t.csv", "b/t.csv.csv"]),
    ],
)
def test_labels_are_short_where_they_differ(folder: Path, names: list[str], labels: list[str]) -> None:
    for name in names:
        if name != "digits":
            (folder / name).write_text(TABLE)
    listed = ", ".join(f'"{name}"' for name in names)
    experiment = experiment_of(folder, f'data = [{listed}]\nmodels = ["mlp"]\n')
    assert [problem.source.label for problem in experiment.problems] == labels
    assert [Path(problem.source.name).name for problem in experiment.problems] == [Path(name).name for name in names]


def test_shifts_of_one_name_are_refused(folder: Path) -> None:
    start = 'data = ["a/t.csv"]\nmodels = ["mlp"]\n[shifts]\n'
    told = complaint_of(folder, start + '"a_shift.py:warp" = [1]\n"b_shift.py:warp" = [1]\n')
    assert "would both be called 'warp': give the function another name" in told
    (folder / "a_shift.py").write_text(SHIFT.replace("warp", "clean"))
    assert "and the clean rows would both be called 'clean'" in complaint_of(
        folder, start + '"a_shift.py:clean" = [1]\n'
    )


def test_labels_that_would_share_a_folder_are_refused(folder: Path) -> None:
    text = 'models = ["mlp"]\n[data.T]\nname = "a/t.csv"\n[data.t]\nname = "b/t.csv"\n'
    assert "data: 'T' and 't' must differ in letters or digits" in complaint_of(folder, text)
