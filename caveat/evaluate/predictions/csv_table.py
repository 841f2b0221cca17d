"""Predictions as a table for people: one line a row, under the names that the classes and files have."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from caveat.files import whole_file
from caveat.predictive import named_columns

__all__ = ["write_prediction_csv"]


def write_prediction_csv(
    path: Path, arrays: Mapping[str, np.ndarray], levels: Sequence[float] = (0.9,), id_name: str | None = None
) -> list[str]:
    """Write the arrays of a prediction file as a csv (row, prediction, how sure it is); returns its columns.

    `levels` are of the intervals of numbers; `id_name` heads the names of the rows where they have some.
    """
    rows = arrays["rows"]
    columns = {name: arrays[key][rows] for name, key in (("file", "files"), (id_name or "id", "ids")) if key in arrays}
    columns = columns or {"row": rows}
    columns |= named_columns(arrays, [*arrays.get("class_names", ())], levels)
    with (
        whole_file(path) as temporary,
        temporary.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file,
    ):
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(zip(*map(_written, columns.values()), strict=True))
    return list(columns)


def _written(column: np.ndarray) -> list[object]:
    """The cells of a column; large numbers have all their digits, as people and spreadsheets write them."""
    return [np.format_float_positional(cell, trim="0") if _is_large(cell) else cell for cell in column]


def _is_large(cell: object) -> bool:
    return isinstance(cell, np.floating) and 1e5 <= abs(cell) < 1e15
