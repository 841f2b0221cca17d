"""Data sets that need no download: three of scikit-learn's, one of them also with noise, and MNIST-1D."""

from __future__ import annotations

import hashlib
import random
import warnings
from typing import Any

import numpy as np
import torch

from caveat.data.dataset import Array, Arrays, DataSet, assemble, import_extra, random_split
from caveat.data.download import cache_folder, write_npz
from caveat.data.readers import read_npz

DIGITS = tuple(str(digit) for digit in range(10))
GRAIN = 6.0  # grey levels of 16: the standard deviation of the noise of grainy digits
GRAINY_TRAINING_ROWS = 1000


def digits(seed: int) -> DataSet:
    """1797 handwritten digits of 8 x 8 pixels with 17 grey levels."""
    x, y = import_extra("sklearn.datasets").load_digits(return_X_y=True)
    arrays = random_split(x.reshape(-1, 1, 8, 8), y, seed, stratify=True)
    return assemble("digits", arrays, "categorical", DIGITS, _provenance(seed), pixel_range=(0.0, 16.0))


def grainy_digits(seed: int) -> DataSet:
    """The same digits as a poor sensor sees them, so that no network can be sure of all of them: 1000 + 797 images.

    Noise of standard deviation 6 is added to the 17 grey levels, and what leaves their range is cut off.
    """
    x, y = import_extra("sklearn.datasets").load_digits(return_X_y=True)
    draws = torch.Generator().manual_seed(seed)
    grain = GRAIN * torch.randn(x.shape, generator=draws, dtype=torch.float64).numpy()
    order = torch.randperm(len(y), generator=draws).numpy()
    seen = (x + grain).clip(0, 16).reshape(-1, 1, 8, 8)
    train, test = order[:GRAINY_TRAINING_ROWS], order[GRAINY_TRAINING_ROWS:]
    arrays = Arrays(seen[train], y[train], seen[test], y[test])
    provenance = _provenance(seed) | {"noise": f"Gaussian, standard deviation {GRAIN:g} of 16 grey levels"}
    return assemble("grainy_digits", arrays, "categorical", DIGITS, provenance, pixel_range=(0.0, 16.0))


def breast_cancer(seed: int) -> DataSet:
    """569 tumours with 30 measurements: malignant (0) or benign (1), as a single logit."""
    bunch = import_extra("sklearn.datasets").load_breast_cancer()
    arrays = random_split(bunch.data, bunch.target, seed, stratify=True)
    class_names = tuple(str(name) for name in bunch.target_names)
    return assemble("breast_cancer", arrays, "bernoulli", class_names, _provenance(seed))


def diabetes(seed: int) -> DataSet:
    """442 patients with 10 measurements: progression of the disease after a year."""
    x, y = import_extra("sklearn.datasets").load_diabetes(return_X_y=True, scaled=False)
    return assemble("diabetes", random_split(x, y, seed, stratify=False), "gaussian", (), _provenance(seed))


def mnist1d() -> DataSet:
    """MNIST-1D (Greydanus and Kobak): 4000 + 1000 signals of length 40 in 10 classes, as published."""
    path = cache_folder() / "mnist1d.npz"
    try:
        content = read_npz(path, (*Arrays._fields, "sha256"))
        arrays = Arrays(*(content[field] for field in Arrays._fields))
        whole = str(content["sha256"]) == _checksum(arrays)
    except (OSError, ValueError):
        whole = False
    if not whole:
        arrays = _generate_mnist1d()
        try:
            write_npz(path, {**arrays._asdict(), "sha256": np.array(_checksum(arrays))})
        except OSError as error:
            warnings.warn(f"MNIST-1D is generated anew each time: {path} cannot be written: {error}", stacklevel=3)
    provenance = {"source": "mnist1d.make_dataset", "split": "published", "mean": [0.0], "std": [1.0]}
    return assemble("mnist1d", arrays, "categorical", DIGITS, provenance, standardise=False)


def _generate_mnist1d() -> Arrays:
    """Takes about ten seconds; the package seeds the global generators, which get their state back."""
    data = import_extra("mnist1d.data")
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        content = data.make_dataset(data.get_dataset_args())
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
    x_train, x_test = (content[key].astype(np.float32) for key in ("x", "x_test"))
    return Arrays(x_train, content["y"].astype(np.int64), x_test, content["y_test"].astype(np.int64))


def _checksum(arrays: tuple[Array, ...]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _provenance(seed: int) -> dict[str, Any]:
    return {"source": "scikit-learn", "split": f"random, seed {seed}"}
