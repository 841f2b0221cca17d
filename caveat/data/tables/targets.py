"""What the target of a table is: classes by name, or numbers in a unit. Rows without a target are left out."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from caveat.data.dataset import Array
from caveat.data.tables.cells import Cells, is_blank, is_number, numbers, whole_number

__all__ = ["MAX_CLASSES", "Kind", "Target", "read_target"]

MAX_CLASSES = 20  # a target with more distinct values is not read as classes
Kind = Literal["classes", "numbers"]


class Target(NamedTuple):
    """Class numbers with the names of the classes, or numbers and their unit, of the rows that have a target."""

    y: Array  # [M]
    class_names: tuple[str, ...]
    unit: str
    rows: list[int]  # which of the table's rows have a target


def read_target(cells: Cells, kind: Kind | None = None, unit: str | None = None) -> Target:
    """The target in a column; of the kind and in the unit given, else by what the cells are.

    Classes are at most 20 distinct values, all of them text or all of them whole numbers written without a decimal
    point; any other numeric target is regression.
    """
    rows = [row for row, cell in enumerate(cells.texts) if not is_blank(cell)]
    if not rows:
        raise ValueError(f"{cells.where}, target column {cells.name!r}: blank in every row")
    written = [cells.texts[row] for row in rows]
    distinct = set(written)
    whole = all(whole_number(cell) is not None for cell in distinct)
    text = not any(is_number(cell) for cell in distinct)
    spellings: dict[str | int, set[str]] = {}  # of each value: 1, 01 and +1 are one whole number
    for cell in distinct:
        spellings.setdefault(int(cell) if whole else cell, set()).add(cell)
    if kind == "classes" or (kind is None and len(spellings) <= MAX_CLASSES and (whole or text)):
        values = sorted(spellings)
        names = tuple(next(iter(spellings[v])) if len(spellings[v]) == 1 else str(v) for v in values)
        index = {cell: number for number, value in enumerate(values) for cell in spellings[value]}
        return Target(np.array([index[cell] for cell in written]), names, "", rows)
    if text and kind is None:
        raise ValueError(
            f"{cells.where}, target column {cells.name!r}: text with {len(distinct)} distinct values. Text targets "
            f"are classes, at most {MAX_CLASSES} of them; regression needs numbers"
        )
    read = numbers(cells, unit)
    return Target(read.values[rows], (), read.unit, rows)
