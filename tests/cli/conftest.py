"""Posteriors of data of one's own."""

from pathlib import Path

import pytest

from caveat.cli import main
from tests.cli.own_data import TRAINED, clusters, images, table


@pytest.fixture(scope="session")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A posterior of three classes of images."""
    folder = tmp_path_factory.mktemp("shapes")
    data = images(folder / "shapes", ("circle", "square", "triangle"))
    assert main(["fit", "map", "--data", str(data), "--out", str(folder / "map"), *TRAINED]) == 0
    return folder / "map"


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A posterior of three classes of csv rows."""
    folder = tmp_path_factory.mktemp("plane")
    data = table(folder / "ok.csv", clusters(), "a,b,y")
    assert main(["fit", "map", "--data", str(data), "--out", str(folder / "map"), *TRAINED]) == 0
    return folder / "map"


@pytest.fixture(scope="session")
def line(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A posterior of a regression."""
    folder = tmp_path_factory.mktemp("line")
    rows = [{"a": i / 10, "b": -(i % 7), "y": 3 * i / 10 + 0.25} for i in range(60)]
    data = table(folder / "line.csv", rows, "a,b,y")
    assert main(["fit", "map", "--data", str(data), "--out", str(folder / "map"), *TRAINED]) == 0
    return folder / "map"
