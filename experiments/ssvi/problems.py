"""The rows of this experiment, which the experiment files name.

    digits           1,200 rows to train on,   238 to choose settings on,    359 to test on
    fashion_mnist   55,000                   5,000                        10,000
    mnist           55,000                   5,000                        10,000

A seed draws which rows are for validation; of digits also the test rows.
"""

from dataclasses import replace
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from caveat import data
from caveat.data import DataSet


def digits(data_dir: Path | None, seed: int) -> DataSet:
    return with_validation(data.load("digits", data_dir, seed=seed), 238, seed)


def fashion_mnist(data_dir: Path | None, seed: int) -> DataSet:
    return with_validation(data.load("fashion_mnist", data_dir), 5000, seed)


def mnist(data_dir: Path | None, seed: int) -> DataSet:
    return with_validation(data.load("mnist", data_dir), 5000, seed)


def with_validation(whole: DataSet, count: int, seed: int) -> DataSet:
    """A data set with so many of its training rows, drawn by a seed, for validation."""
    tensors = whole.train.tensors
    order = torch.randperm(len(whole.train), generator=torch.Generator().manual_seed(seed))
    train, validation = (TensorDataset(*(t[rows] for t in tensors)) for rows in (order[count:], order[:count]))
    return replace(whole, train=train, validation=validation)
