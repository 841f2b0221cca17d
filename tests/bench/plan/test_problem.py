"""Data sets with keys of their own, and from functions."""

from pathlib import Path

import pytest
import torch

from caveat import bench
from caveat.bench.cells import task_of
from caveat.bench.conditions import conditions_of
from caveat.recipe import data_of
from tests.bench.small import complaint_of

OWN = """
from dataclasses import replace
import torch
from torch.utils.data import TensorDataset
from caveat import data

def digits(data_dir, seed):
    whole = data.load("digits", data_dir, seed=seed)
    x, y = whole.train.tensors
    return replace(whole, train=TensorDataset(x[:50], y[:50]), validation=TensorDataset(x[50:60], y[50:60]))

def brighter(rows, more, seed):
    return rows.test.tensors[0] + more + seed

def wrong(data_dir, seed):
    return 3
"""
TWO = """
models = ["mlp"]
prior_precision = 10.0
seeds = [0, 3]
[data.digits]
name = "own.py:digits"
redraw = true
shifts."own.py:brighter" = [1, 2]
[data.cancer]
name = "breast_cancer"
prior_precision = 2.0
methods.hmc.chains = 3
[methods.hmc]
length = 5
[methods.swag]
data = ["cancer"]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "two.toml").write_text(TWO)
    return tmp_path / "two.toml"


def test_keys_of_a_data_set_go_for_it_alone(file: Path) -> None:
    digits, cancer = bench.read_experiment(file).problems
    assert (digits.prior_precision, cancer.prior_precision) == (10.0, 2.0)
    assert [len(digits.shifts), len(cancer.shifts)] == [1, 0]
    assert [choices[0].prior_precision for choices in cancer.methods.values()] == [2.0] * 4
    (hmc,), (few,) = digits.methods["hmc"], cancer.methods["hmc"]
    assert (hmc.method.length, few.method.length, few.method.chains) == (5, 5, 3)  # type: ignore[attr-defined]
    assert "swag" in cancer.methods
    assert "swag" not in digits.methods


def test_rows_come_from_a_function_and_are_drawn_by_the_seed(file: Path) -> None:
    cells = [cell for cell in bench.cells_of(bench.read_experiment(file)) if cell.label == "map"]
    digits = {cell.seed: cell for cell in cells if cell.data.label == "digits"}
    cancer = {cell.seed: cell for cell in cells if cell.data.label == "cancer"}
    assert [digits[seed].data.seed for seed in (0, 3)] == [0, 3]
    assert [cancer[seed].data.seed for seed in (0, 3)] == [0, 0], "one split for all seeds"
    rows = {seed: cell.data.load(None) for seed, cell in digits.items()}
    assert not rows[0].test.tensors[0].equal(rows[3].test.tensors[0])
    recipe, task = task_of(digits[3], rows[3], digits[3].candidates[0])
    assert data_of(recipe, None, None).test.tensors[0].equal(rows[3].test.tensors[0]), "its posterior knows its rows"
    assert task.n == 50
    assert task.validation is not None
    assert len(task.validation) == 10


def test_a_shift_of_ones_own_is_called_by_its_function(file: Path) -> None:
    cell = next(cell for cell in bench.cells_of(bench.read_experiment(file)) if cell.seed == 3)
    tests = conditions_of(cell.problem, cell.data, None)
    x, _ = tests.inside["brighter"][2.0].tensors
    torch.testing.assert_close(x, tests.data.test.tensors[0] + 2 + 3)


def test_what_a_function_returns_is_checked(file: Path, tmp_path: Path) -> None:
    file.write_text('models = ["mlp"]\ndata = ["own.py:wrong"]\n')
    cell = bench.cells_of(bench.read_experiment(file))[0]
    assert cell.data.label == "wrong"
    with pytest.raises(ValueError, match=r"returned a int, not a caveat\.data\.DataSet"):
        cell.data.load(None)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[data.digits]\nsedes = [1]\nmodels = ['mlp']", "data.digits.sedes: a data set has no key 'sedes'"),
        ("[data.digits]\nname = 'no.py:digits'", "data.digits: no.py of 'no.py:digits' is not a file"),
        ("[data.digits]\n[data.cancer]\nname = 'breast_cancer'\nmodels = ['mlp']", "models: an experiment needs it"),
        ("[data.digits]\nmodels = ['mlp']\nshifts.'no.py:f' = [1]", "shifts.no.py:f: no.py of 'no.py:f' is not a file"),
    ],
)
def test_complaints_name_the_key(text: str, complaint: str, tmp_path: Path) -> None:
    assert complaint in complaint_of(tmp_path, text)
