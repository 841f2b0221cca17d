"""Tables: csv files with a header, their columns read in the order they have, or by name as a posterior knows them."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from torch import Tensor

from caveat.data.dataset import LARGEST, Array, listed
from caveat.files import regular_file

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
        with regular_file(path).open(newline="", encoding="utf-8-sig") as file:
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
    counts = Counter(header)
    missing = [name for name in names if name not in counts]
    if missing:
        which = f"column{'s' * (len(missing) > 1)} {listed(missing)}"
        raise ValueError(f"{path} lacks the {which}; it has {listed(header)}")
    twice = [name for name in names if counts[name] > 1]
    if twice:
        raise ValueError(f"{path} has more than one column named {twice[0]!r}: give each a name of its own")
    places = {name: place for place, name in enumerate(header)}
    return {name: [row[places[name]].strip() for row in body] for name in names}


def _csv_target(path: Path, name: str, cells: list[str], kind: Kind | None) -> tuple[Array, tuple[str, ...]]:
    distinct = set(cells)
    whole = all(whole_number(cell) is not None for cell in distinct)
    text = not any(_is_number(cell) for cell in distinct) and "" not in distinct
    spellings: dict[str | int, set[str]] = {}  # of each value: 1, 01 and +1 are one whole number
    for cell in distinct:
        spellings.setdefault(int(cell) if whole else cell, set()).add(cell)
    if kind == "classes" or (kind is None and len(spellings) <= MAX_CLASSES and (whole or text)):
        values = sorted(spellings)
        names = tuple(next(iter(spellings[v])) if len(spellings[v]) == 1 else str(v) for v in values)
        index = {cell: number for number, value in enumerate(values) for cell in spellings[value]}
        return np.array([index[cell] for cell in cells]), names
    if text and kind is None:
        raise ValueError(
            f"{path}, target column {name!r}: text with {len(distinct)} distinct values. Text targets are classes, "
            f"at most {MAX_CLASSES} of them; regression needs numbers"
        )
    return _numbers(path, name, cells), ()


def _numbers(path: Path, name: str, cells: list[str]) -> Array:
    try:
        values = np.array([float(cell) for cell in cells])
        fine = np.abs(values) <= LARGEST  # not so where missing
    except ValueError:
        values, fine = np.empty(0), np.array([_is_number(cell) for cell in cells])
    if fine.all():
        return values
    row = int(fine.argmin())
    where, cell = f"{path}, row {row + 1}, column {name!r}", cells[row]
    if not _is_number(cell):
        raise ValueError(f"{where}: {cell!r} is not a number")
    if not np.isfinite(float(cell)):
        raise ValueError(f"{where}: {cell!r} is a missing or infinite value; remove that row")
    raise ValueError(
        f"{where}: {cell!r} is beyond single precision, {LARGEST:.1e}; rescale the column or remove the row"
    )


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def whole_number(cell: str) -> int | None:
    """The whole number that a text stands for, however it is spelled; None where it stands for none."""
    try:
        return int(cell) if cell.lstrip("+-").isdecimal() else None
    except ValueError:  # two signs, or thousands of digits
        return None
