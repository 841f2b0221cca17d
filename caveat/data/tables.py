"""Tables: csv files with a header, their columns read in the order they have, or by name as a posterior knows them."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from torch import Tensor

from caveat.data.dataset import Array

MAX_CLASSES = 20  # a target with more distinct values is not read as classes
Kind = Literal["classes", "numbers"]


class Known(NamedTuple):
    """What is known of data before they are read, as a posterior knows what it was fitted to."""

    columns: tuple[str, ...] = ()  # the inputs of a csv, in this order; else all but the target
    target: str | None = None  # the target of a csv; else the last column
    kind: Kind | None = None  # of the targets; else by their values
    prepared: Callable[[Array], Tensor] | None = None  # raw inputs as the posterior takes them; else standardised anew


class CsvTable(NamedTuple):
    """Inputs, targets, the names of the classes where there are any, and those of the columns."""

    x: Array
    y: Array
    class_names: tuple[str, ...]
    columns: tuple[str, ...]
    target: str


UNKNOWN = Known()


def read_csv(path: Path, known: Known = UNKNOWN) -> CsvTable:
    """A table with a header: numeric columns, the last one the target.

    The target is read as classes where it has at most 20 distinct values, all of them text or all of them whole
    numbers written without a decimal point; any other numeric target is regression. What is `known` comes first.
    """
    header, body = _csv_rows(path)
    if len(header) < 2:
        raise ValueError(f"{path} needs a header with at least one column besides the target")
    target = header[-1] if known.target is None else known.target
    columns = known.columns or tuple(name for name in header if name != target)
    cells = _by_name(path, header, body, (*columns, target))
    x = np.stack([_numbers(path, name, cells[name]) for name in columns], axis=1)
    y, class_names = _csv_target(path, target, cells[target], known.kind)
    return CsvTable(x, y, class_names, columns, target)


def read_csv_inputs(path: Path, columns: Sequence[str], width: int) -> Array:
    """The inputs of a table: `columns` by name or, where none are given, the first `width`; a target may follow."""
    header, body = _csv_rows(path)
    if not columns and len(header) not in (width, width + 1):
        raise ValueError(f"{path} has {len(header)} columns, the posterior's data have {width} inputs")
    chosen = tuple(columns or header[:width])
    cells = _by_name(path, header, body, chosen)
    return np.stack([_numbers(path, name, cells[name]) for name in chosen], axis=1)


def _csv_rows(path: Path) -> tuple[list[str], list[list[str]]]:
    """The header's names, and the rows below it."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [row for row in csv.reader(file) if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is not a text file of comma-separated values: {error}") from error
    if len(rows) < 2:
        raise ValueError(f"{path} needs a header and at least one row")
    header, body = [name.strip() for name in rows[0]], rows[1:]
    if all(_is_number(cell) for cell in header):
        raise ValueError(f"{path} has no header: its first line is all numbers")
    for index, row in enumerate(body, start=1):
        if len(row) != len(header):
            raise ValueError(f"{path}, row {index}: {len(row)} cells, but the header has {len(header)}")
    return header, body


def _by_name(path: Path, header: list[str], body: list[list[str]], names: Sequence[str]) -> dict[str, list[str]]:
    """The cells of the named columns."""
    missing = [name for name in names if name not in header]
    if missing:
        which = f"column{'s' * (len(missing) > 1)} {', '.join(missing)}"
        raise ValueError(f"{path} lacks the {which}; it has {', '.join(header)}")
    twice = [name for name in names if header.count(name) > 1]
    if twice:
        raise ValueError(f"{path} has more than one column named {twice[0]!r}: give each a name of its own")
    places = {name: header.index(name) for name in names}
    return {name: [row[place].strip() for row in body] for name, place in places.items()}


def _csv_target(path: Path, name: str, cells: list[str], kind: Kind | None) -> tuple[Array, tuple[str, ...]]:
    distinct = set(cells)
    whole = all(cell.lstrip("+-").isdecimal() for cell in distinct)
    text = not any(_is_number(cell) for cell in distinct) and "" not in distinct
    if kind == "classes" or (kind is None and len(distinct) <= MAX_CLASSES and (whole or text)):
        class_names = tuple(sorted(distinct, key=int) if whole else sorted(distinct))
        return np.array([class_names.index(cell) for cell in cells]), class_names
    if text and kind is None:
        raise ValueError(
            f"{path}, target column {name!r}: text with {len(distinct)} distinct values. Text targets are classes, "
            f"at most {MAX_CLASSES} of them; regression needs numbers"
        )
    return _numbers(path, name, cells), ()


def _numbers(path: Path, name: str, cells: list[str]) -> Array:
    for index, cell in enumerate(cells, start=1):
        if not _is_number(cell):
            raise ValueError(f"{path}, row {index}, column {name!r}: {cell!r} is not a number")
    return np.array([float(cell) for cell in cells])


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
