"""Data of one's own: npz, tables and folders of images, with targets to fit and score, or without to predict."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from caveat.data.dataset import Array, Arrays, DataSet, assemble, listed, random_split
from caveat.data.own_tables import UNKNOWN, Known, is_table, known_of, table_data, table_inputs
from caveat.data.readers import read_image_folder, read_images, read_npz_inputs, read_npz_pair
from caveat.data.tables import MAX_CLASSES, read_table


class RawInputs(NamedTuple):
    """Raw inputs; the files they were read from, or the names of the rows, where they have some; and notes."""

    x: Array
    files: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def read_own(path: Path, seed: int, known: Known = UNKNOWN) -> DataSet:
    """The training and test rows at a path that exists; those without a test part are split at random by `seed`."""
    if path.suffix == ".npz":
        data = _from_npz(path, known)
    elif is_table(path):
        data = table_data(read_table(path), path.stem, str(path), seed, known)
    elif _is_split(path):
        data = _from_split_folder(path, known)
    else:
        data = _from_folder(path, seed, known)
    if known.kind is None:
        _check_varied(path, data)
    return data


def read_own_inputs(path: Path, known: Known, width: int) -> RawInputs:
    """Inputs to predict, targets or not: the test rows where there is a test part, otherwise every row.

    A table's inputs are the columns that are known by name; without names they are the first `width`.
    """
    if path.suffix == ".npz":
        return RawInputs(read_npz_inputs(path))
    if is_table(path):
        x, ids, notes = table_inputs(path, known, width)
        return RawInputs(x, (), ids, notes)
    x, files = read_images(path / "test" if _is_split(path) else path)
    return RawInputs(x, tuple(file.relative_to(path).as_posix() for file in files))


def what_was_read(data: DataSet) -> str:
    """One line on what was read, so that a column or a target that was taken for something else is seen."""
    shape, y = list(data.train.tensors[0].shape[1:]), _all_targets(data)
    rows = f"{Path(data.preprocessing['source']).resolve().name}: {len(data.train)} + {len(data.test)}"
    if "columns" in data.preprocessing:
        rows += f" rows, {_columns_read(data.preprocessing)}"
    elif len(shape) == 1:
        rows += f" rows of {shape[0]} input{'s' * (shape[0] > 1)}"
    else:
        rows += f" images of shape {shape}"
    if data.class_names:
        present = [data.class_names[int(label)] for label in np.unique(y)]
        return f"{rows}, {len(present)} class{'es' * (len(present) > 1)}: {listed(present)}"
    values = np.unique(y)
    if y.size == len(y) and len(values) <= MAX_CLASSES and (values == values.round()).all():
        whole = listed([f"{value:.0f}" for value in values])
        return f"{rows}, regression ({len(values)} whole numbers; classes are written as {whole})"
    return f"{rows}, regression"


def target_title(data: DataSet) -> str:
    """What the target of a table is called, with its unit; nothing for other data."""
    name, unit = data.preprocessing.get("target", ""), data.preprocessing.get("target_unit")
    return f"{name}, {unit}" if unit else str(name)


def _columns_read(preprocessing: dict[str, Any]) -> str:
    """The columns of a table: what those are that are not plain numbers, the target, and what is left out."""
    encoding = known_of(preprocessing).encoding
    assert encoding is not None
    kinds = {column.name: f" ({column.unit})" for column in encoding.numbers if column.unit}
    kinds |= {column.name: f" (date, {column.written})" for column in encoding.dates}
    kinds |= {c.name: f" (text, {len(c.categories)} values{' and others' * c.other})" for c in encoding.categories}
    inputs = listed([f"{name}{kinds.get(name, '')}" for name in encoding.columns])
    unit = preprocessing.get("target_unit")
    said = f"inputs {inputs}, target {preprocessing['target']}{f' in {unit}' if unit else ''}"
    out = [f"{name} ({why})" if name else why for name, why in encoding.left_out.items()]
    return f"{said}, left out {listed(out)}" if out else said


def _all_targets(data: DataSet) -> Array:
    return np.concatenate([part.tensors[1].numpy() for part in (data.train, data.test)])


def _check_varied(path: Path, data: DataSet) -> None:
    y = _all_targets(data)
    if (y == y[0]).all():
        value = data.class_names[0] if data.class_names else ", ".join(f"{number:g}" for number in np.ravel(y[0]))
        raise ValueError(f"{path}: the target is {value} in every row, so there is nothing to learn")


def _is_split(path: Path) -> bool:
    return (path / "train").is_dir() and (path / "test").is_dir()


def _from_folder(path: Path, seed: int, known: Known) -> DataSet:
    provenance: dict[str, Any] = {"source": str(path), "split": f"random, seed {seed}"}
    x, y, class_names = read_image_folder(path)
    try:
        arrays = random_split(x, y, seed, stratify=True)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return assemble(path.stem, arrays, "categorical", class_names, provenance, prepared=known.prepared)


def _from_npz(path: Path, known: Known) -> DataSet:
    (x_train, y_train), (x_test, y_test) = (read_npz_pair([path], part) for part in ("train", "test"))
    provenance = {"source": str(path), "split": "published"}
    numbers = y_train.dtype.kind == "f" if known.kind is None else known.kind == "numbers"
    if numbers:
        return assemble(
            path.stem, Arrays(x_train, y_train, x_test, y_test), "gaussian", (), provenance, prepared=known.prepared
        )
    if y_train.size != len(y_train) or y_test.size != len(y_test):
        raise ValueError(f"{path}: y_train has shape {y_train.shape}; class labels are one a row, numbers are floats")
    values = np.unique(np.concatenate([y_train.ravel(), y_test.ravel()]))
    indices: list[Array] = [np.searchsorted(values, y.ravel()) for y in (y_train, y_test)]
    arrays = Arrays(x_train, indices[0], x_test, indices[1])
    names = tuple(str(value) for value in values)
    return assemble(path.stem, arrays, "categorical", names, provenance, prepared=known.prepared)


def _from_split_folder(path: Path, known: Known) -> DataSet:
    train, test = (read_image_folder(path / part) for part in ("train", "test"))
    if train.class_names != test.class_names and known.kind is None:
        raise ValueError(f"{path}: train has the classes {train.class_names}, test has {test.class_names}")
    class_names = tuple(sorted({*train.class_names, *test.class_names}))
    y_train, y_test = (
        np.array([class_names.index(name) for name in part.class_names])[part.y] for part in (train, test)
    )
    arrays = Arrays(train.x, y_train, test.x, y_test)
    provenance = {"source": str(path), "split": "published"}
    return assemble(path.stem, arrays, "categorical", class_names, provenance, prepared=known.prepared)
