"""Small data sets of one's own, and posteriors fitted to them."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.cli.command import run

TRAINED = ["--training.epochs", "60", "--training.learning-rate", "0.01", "--quiet"]


LEVELS = {"circle": 40, "square": 120, "triangle": 200}


def images(folder: Path, classes: tuple[str, ...], each: int = 20, plain: bool = False) -> Path:
    """Grey images whose brightness tells the class."""
    rng = np.random.default_rng(len(classes))
    for name in classes:
        where = folder if plain else folder / name
        where.mkdir(parents=True, exist_ok=True)
        for index in range(each):
            pixels = rng.normal(LEVELS[name], 10, (6, 6)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(where / f"{name}{index:02}.png")
    return folder


def table(path: Path, rows: list[dict[str, Any]], columns: str) -> Path:
    """A csv with these columns."""
    lines = [",".join(str(row[name]) for name in columns.split(",")) for row in rows]
    path.write_text("\n".join([columns, *lines]) + "\n")
    return path


def lines(path: Path) -> list[dict[str, str]]:
    """The rows of a csv by the names of its columns."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def clusters(each: int = 20, names: tuple[str, ...] = ("0", "1", "2"), seed: int = 0) -> list[dict[str, Any]]:
    """Three clusters in the plane, far apart, of unequal scale so that swapped columns are noticed."""
    rng = np.random.default_rng(seed)
    centres = [(-3.0, 100.0), (3.0, 100.0), (0.0, 400.0)]
    return [
        {"a": round(a + rng.normal() / 4, 3), "b": round(b + 10 * rng.normal(), 3), "y": name, "id": f"row{i}"}
        for (a, b), name in zip(centres, names, strict=True)
        for i in range(each)
    ]


def accuracy(capsys: pytest.CaptureFixture[str], posterior: Path, data: Path) -> float:
    """The clean accuracy that `caveat evaluate` prints."""
    out = posterior.parent / f"results-{data.stem}"
    code, printed, err = run(
        capsys, "evaluate", "--posteriors", posterior, "--data", data, "--out", out, "--quiet", "--json"
    )
    assert code == 0, err
    return float(json.loads(printed)[posterior.name]["clean"]["accuracy"])


def without_columns(posterior: Path, target: Path) -> Path:
    """The posterior as it was stored before columns were."""
    from caveat.storage import write_json

    content = json.loads((posterior / "posterior.json").read_text())
    del content["checksum"]
    for key in ("columns", "target", "encoding", "inputs", "target_unit", "id"):
        content["note"]["recipe"]["preprocessing"].pop(key, None)
    target.mkdir()
    (target / "state.safetensors").write_bytes((posterior / "state.safetensors").read_bytes())
    write_json(target / "posterior.json", content)
    return target
