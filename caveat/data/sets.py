"""The registry: every data set by name or by path.

A name is one of `names()`. A path is
- a `.npz` file with `x_train`, `y_train`, `x_test`, `y_test`: inputs [N, D], [N, H, W] or [N, C, H, W]; targets of
  integers or text are classes, floating-point targets are regression;
- a `.csv` file with a header or a `.parquet` file, whose columns are numbers, dates or text, with blanks, see
  `caveat.data.tables`; the target is the last one unless named: at most 20 distinct values, all text or all whole
  numbers without a decimal point, are classes, any other numbers are regression;
- a folder with one folder of images for each class, or such folders below `train` and `test`;
- `file.py:function`, where `function(data_dir, seed)` returns a `DataSet`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from caveat.data import embedded, uci
from caveat.data.dataset import Arrays, DataSet, assemble
from caveat.data.download import locate
from caveat.data.images import IMAGE_SETS, load_images
from caveat.data.own import read_own
from caveat.data.own_tables import Known, is_table
from caveat.data.readers import read_npz
from caveat.files import named_function, names_function, regular_file

SPLIT_AT_RANDOM = {
    "digits": embedded.digits,
    "grainy_digits": embedded.grainy_digits,
    "breast_cancer": embedded.breast_cancer,
    "diabetes": embedded.diabetes,
}
TOY_FILE = "toy_regression_bnn_hmc.npz"


def names() -> dict[str, str]:
    """The known data sets, with one line each."""
    return {
        "digits": "handwritten digits, 1797 grey 8 x 8, 10 classes; in scikit-learn",
        "grainy_digits": "the same as a poor sensor sees them: 1000 + 797, with noise",
        "breast_cancer": "tumours, 569 x 30, malignant or benign; in scikit-learn",
        "diabetes": "progression of the disease, 442 x 10, regression; in scikit-learn",
        "mnist1d": "MNIST-1D, 4000 + 1000 signals of length 40, 10 classes; generated",
        **{name: image_set.description for name, image_set in IMAGE_SETS.items()},
        "toy_regression": "the 1-D regression of Izmailov et al. (2021), 120 points in three clusters",
        **{f"uci/{name}": f"{table.description}, regression" for name, table in uci.TABLES.items()},
    }


def load(
    name: str,
    data_dir: str | Path | None = None,
    *,
    split: int = 0,
    gap: bool = False,
    seed: int = 0,
    target: str | None = None,
    id: str | None = None,
    text: Sequence[str] = (),
) -> DataSet:
    """A data set by name or by path; nothing is downloaded.

    Args:
        name: one of `names()`, a path to an npz, csv or parquet file or to a folder of class folders, or
            `file.py:function`.
        data_dir: where to look first; then come CAVEAT_DATA, the user's cache and /usr/share/datasets.
        split: which of the published splits of a `uci/` set.
        gap: take the gap splits of a `uci/` set rather than the standard ones.
        seed: draws the test fifth of sets that come without a published test set; given to `file.py:function`.
        target: the column of a table that is the target; the last one unless given.
        id: the column of a table that names its rows, which is no input.
        text: columns of a table that are categories although they hold numbers, such as postcodes.

    Raises:
        FileNotFoundError: with every place looked in, and what to do.
    """
    path = own_path(name)
    for option, column in {"target": target, "id": id, "text": tuple(text) or None}.items():
        if column is not None and (path is None or not is_table(path)):
            raise ValueError(f"{option}={column!r} is to be of a csv or parquet file, which {name!r} is not")
    prefix, _, table = name.partition("/")
    if prefix == "uci" and table in uci.TABLES:
        _, paths = locate(name, [["uci_regression.npz"], [f"uci_{table}.npz"]], data_dir)
        (file,) = paths.values()
        return uci.read_uci(file, table, split, gap)
    if split != 0 or gap:
        raise ValueError(f"split={split} and gap={gap} choose among the splits of uci/ sets; {name!r} has none")
    if names_function(name):
        return _from_function(name, data_dir, seed)
    if path is not None:
        return read_own(path, seed, Known(target=target, id=id, text=tuple(text)))
    if name in SPLIT_AT_RANDOM:
        return SPLIT_AT_RANDOM[name](seed)
    if name == "mnist1d":
        return embedded.mnist1d()
    if name in IMAGE_SETS:
        return load_images(name, data_dir)
    return _toy_regression(data_dir)


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


def _from_function(reference: str, data_dir: str | Path | None, seed: int) -> DataSet:
    data = named_function(reference)(None if data_dir is None else Path(data_dir), seed)
    if not isinstance(data, DataSet):
        raise ValueError(f"{reference} returned a {type(data).__name__}, not a caveat.data.DataSet")
    return data


def own_path(name: str) -> Path | None:
    """Where data of one's own lie; None for a function, and for a known name, which comes before a path."""
    if name in names() or names_function(name):
        return None
    path = Path(name)
    is_file = path.suffix == ".npz" or is_table(path)
    if not (path.is_dir() or (is_file and path.is_file())):
        if is_file:
            raise FileNotFoundError(f"{regular_file(path)} does not exist")
        raise ValueError(
            f"{str(path)!r} is neither a known data set nor a path to an .npz, .csv or .parquet file or a folder of "
            f"class folders; known are {', '.join(names())}"
        )
    return path
