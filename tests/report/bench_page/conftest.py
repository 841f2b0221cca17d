"""Two small benches, run once for all tests of the page."""

import csv
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from caveat import bench
from caveat.storage import read_json, write_json

DIGITS = """
title = "Digits & more"
data = ["digits"]
models = ["networks.py:digits_mlp"]
seeds = [0, 1]
prior_precision = 10.0
ood = ["permuted"]
[reference]
digits = "digits"
[map]
epochs = 4
[shifts]
rotation = [15, 60]
[methods.swag]
rank = 0
training.epochs = 2
[methods.last_layer_laplace]
default_draws = 10
"""
TOYS = """
data = ["line.npz", "plane.npz"]
models = ["mlp"]
seeds = [0, 1]
ood = ["noise"]
kept_rows = 40
[map]
epochs = 5
[shifts]
feature_shift = [1]
[methods.laplace]
"""


def run(folder: Path, text: str) -> Path:
    (folder / "tiny.toml").write_text(text)
    place = bench.Place(folder / "results" / "tiny", torch.device("cpu"))
    assert not bench.run_bench(folder / "tiny.toml", place, say=lambda text: None).failed
    return place.out


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images, with a shift, out-of-distribution data and a reference."""
    folder = tmp_path_factory.mktemp("digits")
    shutil.copy(Path(__file__).parents[3] / "experiments" / "networks.py", folder)
    return run(folder, DIGITS)


@pytest.fixture(scope="session")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A regression of one input and two classes in a plane; of 60 test rows 40 are kept."""
    folder, rng = tmp_path_factory.mktemp("toys"), np.random.default_rng(0)
    x = rng.uniform(-2, 2, (200, 1))
    y = np.sin(2 * x) + 0.1 * rng.normal(size=x.shape)
    np.savez(folder / "line.npz", x_train=x[:140], y_train=y[:140], x_test=x[140:], y_test=y[140:])
    labels = rng.integers(0, 2, 200)
    x = rng.normal(size=(200, 2)) + labels[:, None]
    np.savez(folder / "plane.npz", x_train=x[:140], y_train=labels[:140], x_test=x[140:], y_test=labels[140:])
    return run(folder, TOYS)


def change(out: Path, target: Path, edit: Callable[[dict[str, object]], None]) -> Path:
    """A copy of a folder with another bench.json."""
    shutil.copytree(out, target, ignore=shutil.ignore_patterns("posterior"))
    content = read_json(target / "bench.json")
    edit(content)
    write_json(target / "bench.json", content)
    return target


@pytest.fixture
def changed_copy() -> Callable[[Path, Path, Callable[[dict[str, object]], None]], Path]:
    return change


def table_of(text: str) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """The keys of the columns; for each row its text and what it is sorted by."""
    body = re.search(r'<table class="results".*?</table>', text, re.S)[0]
    rows = re.findall(r"<tr data-run.*?</tr>", body, re.S)
    return re.findall(r'data-key="(.*?)"', body), [
        (re.sub(r"<i.*?</i>|<.*?>", " ", row).strip(), re.findall(r'data-loss="(.*?)"', row)) for row in rows
    ]


@pytest.fixture
def results_table_of() -> Callable[[str], tuple[list[str], list[tuple[str, list[str]]]]]:
    return table_of


def lines_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.fixture
def csv_lines() -> Callable[[Path], list[dict[str, str]]]:
    return lines_of
