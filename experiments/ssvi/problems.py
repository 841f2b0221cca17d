"""The problems of this experiment: rows and networks.

    fashion_mnist  LeNet-5, 61,470 weights      55,000 rows to train on, 5,000 to choose settings on, 10,000 to test on
    digits         64-100-10, 7,400 weights      1,200                     238                           359
    mnist          LeNet-5                      55,000                   5,000                        10,000

A seed draws the initial weights and which rows are for validation; of digits also the test rows.
"""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from caveat import data, models


@dataclass(frozen=True)
class Size:
    """How large a problem is, and how long it is trained."""

    validation: int  # rows, of those that the set has for training
    epochs: int
    batch_size: int
    interval: int  # steps between exchanges of weights


PROBLEMS = {
    "fashion_mnist": Size(validation=5000, epochs=30, batch_size=512, interval=50),
    "digits": Size(validation=238, epochs=100, batch_size=64, interval=50),
    "mnist": Size(validation=5000, epochs=30, batch_size=512, interval=50),
}
QUICK = Size(validation=50, epochs=2, batch_size=32, interval=2)
QUICK_ROWS = 200


@dataclass(frozen=True)
class Source:
    """Where rows come from: a file made by `export`, or folders in which data sets lie."""

    file: Path | None = None
    folder: Path | None = None  # looked in first


@dataclass(frozen=True)
class Problem:
    """One problem and seed."""

    name: str
    seed: int
    train: TensorDataset
    validation: TensorDataset
    test: TensorDataset

    def model(self) -> nn.Module:
        """The network, at initial weights of the seed."""
        torch.manual_seed(self.seed)
        return models.mlp(64, 10, (100,)) if self.name == "digits" else models.lenet5()


def problem(name: str, seed: int, source: Source, quick: bool = False) -> Problem:
    """The rows of a problem, split by the seed; few of them when `quick`."""
    train, test = whole(_known_as(name, seed), source)
    order = torch.randperm(len(train[1]), generator=torch.Generator().manual_seed(seed))
    size = QUICK if quick else PROBLEMS[name]
    rest = order[size.validation :]
    rest = rest[:QUICK_ROWS] if quick else rest
    test = tuple(t[:QUICK_ROWS] for t in test) if quick else test
    parts = (tuple(t[rows] for t in train) for rows in (rest, order[: size.validation]))
    return Problem(name, seed, *(TensorDataset(*part) for part in (*parts, test)))


Pair = tuple[Tensor, ...]


@lru_cache(maxsize=4)
def whole(known_as: str, source: Source) -> tuple[Pair, Pair]:
    """Training and test rows, standardised; kept, since many cells of a process share them."""
    if source.file is None:
        found, _ = _loaded(known_as, source)
        return found.train.tensors, found.test.tensors
    with np.load(source.file) as content:
        if f"{known_as}/scale" not in content:
            raise ValueError(f"{source.file} has no {known_as}: make it again with --export")
        highest, mean, std = content[f"{known_as}/scale"].astype(np.float32)
        parts = []
        for part in ("train", "test"):
            x = torch.from_numpy(content[f"{known_as}/{part}/x"]).float()
            y = torch.from_numpy(content[f"{known_as}/{part}/y"]).long()
            parts.append((x.div_(highest).sub_(mean).div_(std), y))
    return parts[0], parts[1]


def export(file: Path, seeds: int, folder: Path | None) -> None:
    """All rows in one npz file, for a machine without the data sets; pixels as bytes."""
    arrays = {}
    for known_as in dict.fromkeys(_known_as(name, seed) for name in PROBLEMS for seed in range(seeds)):
        found, scale = _loaded(known_as, Source(folder=folder))
        highest, mean, std = scale
        arrays[f"{known_as}/scale"] = np.array(scale)
        for part, rows in (("train", found.train), ("test", found.test)):
            x, y = rows.tensors
            arrays[f"{known_as}/{part}/x"] = ((x * std + mean) * highest).round().to(torch.uint8).numpy()
            arrays[f"{known_as}/{part}/y"] = y.to(torch.uint8).numpy()
    file.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(file, **arrays)


def _known_as(name: str, seed: int) -> str:
    return f"{name}/{seed}" if name == "digits" else name


def _loaded(known_as: str, source: Source) -> tuple[data.DataSet, tuple[float, float, float]]:
    """A set, and what its pixels were divided by, less what, and divided by what."""
    name, _, seed = known_as.partition("/")
    found = data.load(name, source.folder, seed=int(seed or 0))
    done = found.preprocessing
    return found, (done["pixel_range"][1], done["mean"][0], done["std"][0])
