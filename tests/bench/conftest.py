"""A table of two clouds, and the results of a small experiment on it."""

from pathlib import Path

import numpy as np
import pytest

from tests.bench.small import run, write


@pytest.fixture(scope="session")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two clouds of three numbers each, as a csv."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 300)
    x = rng.normal(size=(300, 3)) + y[:, None]
    path = tmp_path_factory.mktemp("data") / "clouds.csv"
    lines = [",".join(f"{v:.4f}" for v in row) + f",{'ab'[label]}" for row, label in zip(x, y, strict=True)]
    path.write_text("\n".join(["u,v,w,label", *lines]) + "\n")
    return path


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, table: Path) -> tuple[Path, Path]:
    """An experiment file and the folder of its results."""
    folder = tmp_path_factory.mktemp("bench")
    file = write(folder / "tiny.toml", table)
    assert not run(file, folder / "out").failed
    return file, folder / "out"
