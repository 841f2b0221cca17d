"""The registry: every data set by name or by path.

A name is one of `names()`. A path is
- a `.npz` file with `x_train`, `y_train`, `x_test`, `y_test`: inputs [N, D], [N, H, W] or [N, C, H, W]; targets of
  integers or text are classes, floating-point targets are regression;
- a `.csv` file with a header, numeric columns and the target last: at most 20 distinct values, all text or all whole
  numbers without a decimal point, are classes, any other numbers are regression;
- a folder with one folder of images for each class, or such folders below `train` and `test`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from caveat.data import embedded, uci
from caveat.data.dataset import Array, Arrays, DataSet, assemble, random_split
from caveat.data.download import locate
from caveat.data.images import IMAGE_SETS, load_images
from caveat.data.readers import read_csv, read_image_folder, read_npz, read_npz_pair

SPLIT_AT_RANDOM = {"digits": embedded.digits, "breast_cancer": embedded.breast_cancer, "diabetes": embedded.diabetes}
TOY_FILE = "toy_regression_bnn_hmc.npz"


def names() -> dict[str, str]:
    """The known data sets, with one line each."""
    return {
        "digits": "handwritten digits, 1797 grey 8 x 8, 10 classes; in scikit-learn",
        "breast_cancer": "tumours, 569 x 30, malignant or benign; in scikit-learn",
        "diabetes": "progression of the disease, 442 x 10, regression; in scikit-learn",
        "mnist1d": "MNIST-1D, 4000 + 1000 signals of length 40, 10 classes; generated",
        **{name: image_set.description for name, image_set in IMAGE_SETS.items()},
        "toy_regression": "the 1-D regression of Izmailov et al. (2021), 120 points in three clusters",
        **{f"uci/{name}": f"{table.description}, regression" for name, table in uci.TABLES.items()},
    }


def load(name: str, data_dir: str | Path | None = None, *, split: int = 0, gap: bool = False, seed: int = 0) -> DataSet:
    """A data set by name or by path; nothing is downloaded.

    Args:
        name: one of `names()`, or a path to an npz file, a csv file or a folder of class folders.
        data_dir: where to look first; then come CAVEAT_DATA, the user's cache and /usr/share/datasets.
        split: which of the published splits of a `uci/` set.
        gap: take the gap splits of a `uci/` set rather than the standard ones.
        seed: draws the test fifth of sets that come without a published test set.

    Raises:
        FileNotFoundError: with every place looked in, and what to do.
    """
    prefix, _, table = name.partition("/")
    if prefix == "uci" and table in uci.TABLES:
        _, paths = locate(name, [["uci_regression.npz"], [f"uci_{table}.npz"]], data_dir)
        (path,) = paths.values()
        return uci.read_uci(path, table, split, gap)
    if split != 0 or gap:
        raise ValueError(f"split={split} and gap={gap} choose among the splits of uci/ sets; {name!r} has none")
    if name in SPLIT_AT_RANDOM:
        return SPLIT_AT_RANDOM[name](seed)
    if name == "mnist1d":
        return embedded.mnist1d()
    if name in IMAGE_SETS:
        return load_images(name, data_dir)
    if name == "toy_regression":
        return _toy_regression(data_dir)
    return _from_path(Path(name), seed)


def _toy_regression(data_dir: str | Path | None) -> DataSet:
    """Inputs are the features (x, x^2) that its network takes; test targets are the noiseless function."""
    _, paths = locate("toy_regression", [[TOY_FILE]], data_dir)
    content = read_npz(paths[TOY_FILE], ("f_train", "y_train", "f_test", "y_test_noiseless"))
    provenance = {
        "source": str(paths[TOY_FILE]),
        "split": "published; test targets without noise",
        "features": "(x, x^2)",
        "mean": [0.0, 0.0],
        "std": [1.0, 1.0],
    }
    return assemble("toy_regression", Arrays(*content.values()), "gaussian", (), provenance, standardise=False)


def _from_path(path: Path, seed: int) -> DataSet:
    is_file = path.suffix in (".npz", ".csv")
    if not (path.is_dir() or (is_file and path.is_file())):
        if is_file:
            raise FileNotFoundError(f"{path} does not exist")
        raise ValueError(
            f"{str(path)!r} is neither a known data set nor a path to an .npz file, a .csv file or a folder of class "
            f"folders; known are {', '.join(names())}"
        )
    if path.suffix == ".npz":
        return _from_npz(path)
    if path.is_dir() and (path / "train").is_dir() and (path / "test").is_dir():
        return _from_split_folder(path)
    x, y, class_names = read_csv(path) if path.suffix == ".csv" else read_image_folder(path)
    try:
        arrays = random_split(x, y, seed, stratify=bool(class_names))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    provenance = {"source": str(path), "split": f"random, seed {seed}"}
    return assemble(path.stem, arrays, "categorical" if class_names else "gaussian", class_names, provenance)


def _from_npz(path: Path) -> DataSet:
    (x_train, y_train), (x_test, y_test) = (read_npz_pair([path], part) for part in ("train", "test"))
    provenance = {"source": str(path), "split": "published"}
    if y_train.dtype.kind == "f":
        return assemble(path.stem, Arrays(x_train, y_train, x_test, y_test), "gaussian", (), provenance)
    if y_train.size != len(y_train) or y_test.size != len(y_test):
        raise ValueError(f"{path}: y_train has shape {y_train.shape}; class labels are one a row, numbers are floats")
    values = np.unique(np.concatenate([y_train.ravel(), y_test.ravel()]))
    indices: list[Array] = [np.searchsorted(values, y.ravel()) for y in (y_train, y_test)]
    arrays = Arrays(x_train, indices[0], x_test, indices[1])
    return assemble(path.stem, arrays, "categorical", tuple(str(value) for value in values), provenance)


def _from_split_folder(path: Path) -> DataSet:
    train, test = (read_image_folder(path / part) for part in ("train", "test"))
    if train.class_names != test.class_names:
        raise ValueError(f"{path}: train has the classes {train.class_names}, test has {test.class_names}")
    arrays = Arrays(train.x, train.y, test.x, test.y)
    return assemble(path.stem, arrays, "categorical", train.class_names, {"source": str(path), "split": "published"})
