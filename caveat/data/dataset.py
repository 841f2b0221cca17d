"""What a data set is here, and the one way raw arrays become one.

Inputs are standardised with the statistics of the training rows alone,

    x -> (x - mean) / std,    per channel for images [N, C, H, W], per column for tables [N, D],

where a column that is constant over the training rows keeps std = 1. Pixels are first brought to [0, 1] by their known
range. Regression targets keep their units. Everything done is written down in `DataSet.preprocessing`, which is plain
json.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import TensorDataset

Likelihood = Literal["categorical", "bernoulli", "gaussian"]
Array = NDArray[Any]
TEST_EVERY = 5  # a random split keeps one row in five for testing
LARGEST = float(np.finfo(np.float32).max)  # of a value: networks compute in single precision
SHOWN = 12  # names of columns or classes in one line


@dataclass(frozen=True)
class DataSet:
    """A training and a test set, ready for a network.

    `train` and `test` hold `(x, y)`: x is float32; y is int64 [N] for classes, float32 [N, 1] in {0, 1} for a single
    logit, float32 [N, D] for regression. `n_outputs` is the width a network needs. For images `preprocessing` also
    holds `black`, the value of a black pixel after standardising: the fill for `rotate`.
    """

    name: str
    train: TensorDataset
    test: TensorDataset
    likelihood: Likelihood
    n_outputs: int
    class_names: tuple[str, ...]
    preprocessing: dict[str, Any]
    validation: TensorDataset | None = None  # rows of their own for tuning; else a share of the training rows is taken


class Arrays(NamedTuple):
    """A data set as it was read: raw values, labels as class indices."""

    x_train: Array
    y_train: Array
    x_test: Array
    y_test: Array


def random_split(x: Array, y: Array, seed: int, stratify: bool) -> Arrays:
    """One row in five for testing, see `rows_for_testing`."""
    is_test = rows_for_testing(y, seed, stratify)
    return Arrays(x[~is_test], y[~is_test], x[is_test], y[is_test])


def rows_for_testing(y: Array, seed: int, stratify: bool) -> Array:
    """Which rows are for testing, [N]: one in five, drawn by `seed`; with `stratify` of every class, up to rounding."""
    if len(y) < TEST_EVERY:
        raise ValueError(f"{len(y)} rows are too few to split: at least {TEST_EVERY} are needed")
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed)).numpy()
    if stratify:
        order = order[np.argsort(y[order], kind="stable")]
    is_test = np.zeros(len(y), dtype=bool)
    is_test[order[TEST_EVERY - 1 :: TEST_EVERY]] = True
    return is_test


def assemble(
    name: str,
    arrays: Arrays,
    likelihood: Likelihood,
    class_names: tuple[str, ...],
    provenance: dict[str, Any],
    *,
    pixel_range: tuple[float, float] | None = None,
    standardise: bool = True,
    prepared: Callable[[Array], Tensor] | None = None,
) -> DataSet:
    """Check, standardise and wrap `arrays`; `provenance` says where they came from (`source`) and how they were split.

    Inputs of rank 4 are images: `pixel_range` is what maps to [0, 1], by default 0..255 for bytes and otherwise the
    range of the training pixels. With `prepared` raw inputs become what it makes of them, and nothing else is done.
    """
    source = provenance["source"]
    _check(arrays, source)
    images = arrays.x_train.ndim == 4 and prepared is None
    train, test = (torch.from_numpy(x.astype(_working_dtype(x), order="C")) for x in (arrays.x_train, arrays.x_test))
    done = dict(provenance)
    if images:
        low, high = pixel_range or _pixel_range(arrays.x_train)
        for x in (train, test):
            x.sub_(low).div_(high - low)
        done["pixel_range"] = [low, high]
    if prepared is not None:
        train, test = prepared(arrays.x_train), prepared(arrays.x_test)
    elif standardise:
        done |= _standardise(train, test, over=(0, 2, 3) if images else (0,))
    if images:
        done["black"] = [-mean / std for mean, std in zip(done["mean"], done["std"], strict=True)]
    y_train, y_test = (_targets(y, likelihood, len(class_names), source) for y in (arrays.y_train, arrays.y_test))
    n_outputs = len(class_names) if likelihood == "categorical" else y_train.shape[1]
    datasets = TensorDataset(train.float(), y_train), TensorDataset(test.float(), y_test)
    return DataSet(name, *datasets, likelihood, n_outputs, class_names, done)


def prepare(x: Array, preprocessing: dict[str, Any]) -> Tensor:
    """New inputs as a data set's own were prepared: brought to [0, 1] where they are pixels, then standardised."""
    low, high = preprocessing.get("pixel_range", (0.0, 1.0))
    prepared = (torch.from_numpy(x.astype(np.float64)) - low) / (high - low)
    if "mean" in preprocessing:
        shape = [1, -1] + [1] * (x.ndim - 2)
        mean, std = (torch.tensor(preprocessing[key], dtype=torch.float64).reshape(shape) for key in ("mean", "std"))
        prepared = (prepared - mean) / std
    return prepared.float()


def unprepare(x: Tensor, preprocessing: dict[str, Any]) -> Array:
    """The raw inputs that `prepare` made these of."""
    raw = x.double()
    if "mean" in preprocessing:
        shape = [1, -1] + [1] * (x.ndim - 2)
        mean, std = (torch.tensor(preprocessing[key], dtype=torch.float64).reshape(shape) for key in ("mean", "std"))
        raw = raw * std + mean
    low, high = preprocessing.get("pixel_range", (0.0, 1.0))
    restored: Array = (raw * (high - low) + low).numpy()
    return restored


def _working_dtype(x: Array) -> type[np.floating]:
    return np.float32 if x.dtype == np.uint8 else np.float64


def _pixel_range(x: Array) -> tuple[float, float]:
    if x.dtype == np.uint8:
        return 0.0, 255.0
    low, high = float(x.min()), float(x.max())
    return low, high if high > low else low + 1.0


def _standardise(train: Tensor, test: Tensor, over: tuple[int, ...]) -> dict[str, Any]:
    """Standardise both in place with the statistics of `train`; returns what was subtracted and divided by."""
    mean = train.mean(over, keepdim=True)
    constant = train.amax(over, keepdim=True) == train.amin(over, keepdim=True)
    std = train.std(over, correction=0, keepdim=True).masked_fill(constant, 1.0)
    for x in (train, test):
        x.sub_(mean).div_(std)
    return {
        "mean": mean.flatten().tolist(),
        "std": std.flatten().tolist(),
        "constant_features": constant.flatten().nonzero().flatten().tolist(),
    }


def _check(arrays: Arrays, source: str) -> None:
    for part, x, y in (("train", *arrays[:2]), ("test", *arrays[2:])):
        if len(x) != len(y) or len(y) == 0:
            raise ValueError(f"{source}: the {part} part has {len(x)} inputs and {len(y)} targets")
        for kind, values in (("inputs", x), ("targets", y)):
            if values.dtype.kind not in "buif":
                raise ValueError(f"{source}: the {part} {kind} are of type {values.dtype}, not numbers")
            if values.dtype.kind == "f":
                _check_range(f"{source}: the {part} {kind}", values)
    if arrays.x_train.shape[1:] != arrays.x_test.shape[1:]:
        shapes = f"{arrays.x_train.shape[1:]} and {arrays.x_test.shape[1:]}"
        raise ValueError(f"{source}: train and test inputs differ in shape: {shapes}")


def _check_range(which: str, values: Array) -> None:
    # The ends say it without another array of that size: they are missing where any value is.
    if not values.size or max(-float(values.min()), float(values.max())) <= LARGEST:
        return
    for fine, what in (
        (np.isfinite(values), "missing or infinite values; remove those rows"),
        (np.abs(values) <= LARGEST, f"values beyond single precision, {LARGEST:.1e}; rescale or remove them"),
    ):
        if not fine.all():
            raise ValueError(f"{which} have {what} (the first is in row {np.argwhere(~fine)[0, 0] + 1})")


def _targets(y: Array, likelihood: Likelihood, n_classes: int, source: str) -> Tensor:
    if likelihood == "gaussian":
        return torch.from_numpy(y.astype(np.float32).reshape(len(y), -1))  # [N, D]
    if y.min() < 0 or y.max() >= n_classes:
        raise ValueError(f"{source}: labels run from {y.min()} to {y.max()}, but there are {n_classes} classes")
    labels = torch.from_numpy(y.astype(np.int64))
    return labels if likelihood == "categorical" else labels.float().unsqueeze(1)


def listed(names: Sequence[str]) -> str:
    """Names in a row, not more than fit into a line."""
    return ", ".join(names[:SHOWN]) + f", ... ({len(names)})" * (len(names) > SHOWN)


def import_extra(module: str) -> ModuleType:
    """Import a module of the optional `data` extra."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f'{module} is needed for this data set: pip install "caveat[data]"') from error
