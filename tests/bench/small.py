"""A small experiment, and how the tests here run it and look at its results."""

import csv
from pathlib import Path

import pytest
import torch

from caveat import bench
from caveat.bench.cells import Place

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
default_draws = {draws}
"""


GOOD = 'data = ["digits"]\nmodels = ["mlp"]\n'


def complaint_of(folder: Path, text: str) -> str:
    """What an experiment file is refused for."""
    (folder / "bad.toml").write_text(text)
    with pytest.raises(ValueError, match=r"bad\.toml") as raised:
        bench.read_experiment(folder / "bad.toml")
    return str(raised.value)


def write(path: Path, data: Path, epochs: int = 5, draws: int = 10, more: str = "") -> Path:
    path.write_text(TINY.format(data=data, epochs=epochs, draws=draws) + more)
    return path


def run(file: Path, out: Path, **options: object) -> bench.Bench:
    return bench.run_bench(file, Place(out, torch.device("cpu")), say=lambda text: None, **options)


def stamps(out: Path) -> dict[str, int]:
    return {str(p.relative_to(out)): p.stat().st_mtime_ns for p in out.glob("cells/*/result.json")}


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))
