"""Columns of a table: what their cells are, and the inputs of a network that they become."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, timedelta

import numpy as np

from caveat.data.dataset import Array, listed
from caveat.data.tables.cells import Cells, dates, is_blank, numbers

__all__ = ["CYCLES", "CategoryColumn", "Column", "DateColumn", "NumberColumn", "with_one_blank"]

CYCLES = {"year": 365.2425, "week": 7.0, "day": 1.0}  # what dates go round, and its length


@dataclass(frozen=True)
class NumberColumn:
    """A column of numbers."""

    name: str
    unit: str | None = None  # that they are written in; None where any is taken
    fill: float | None = None  # what stands for a blank; None where blanks are refused
    marked: bool = False  # whether an input of its own says that the cell was blank

    @property
    def takes(self) -> str:
        """What a cell is, in words."""
        return f"a number{f' in {self.unit}' if self.unit else ''}{', or nothing' * (self.fill is not None)}"

    def typical(self, mean: float) -> str | float:
        """A cell of the mean of the training rows."""
        return f"{mean:.4g}{self.unit}" if self.unit == "%" else float(f"{mean:.4g}")

    @property
    def inputs(self) -> list[str]:
        """The names of the inputs."""
        shown = f"{self.name}, {self.unit}" if self.unit else self.name
        return [shown, f"{self.name} is blank"] if self.marked else [shown]

    def encode(self, cells: Cells) -> tuple[list[Array], list[str]]:
        """The inputs, [N] each, and notes."""
        values = numbers(cells, self.unit).values
        return _filled(self, cells, values, f"{self.fill:.6g}" if self.fill is not None else "")


@dataclass(frozen=True)
class DateColumn:
    """A column of dates."""

    name: str
    written: str  # how, such as day.month.year
    fill: float | None = None  # days since 1970 that stand for a blank
    marked: bool = False
    cycles: tuple[str, ...] = ()  # of year, week and day

    @property
    def takes(self) -> str:
        """What a cell is, in words."""
        return f"a date, {self.written}{', or nothing' * (self.fill is not None)}"

    def typical(self, mean: float) -> str:
        """A cell of the mean of the training rows."""
        return _day(mean)

    @property
    def inputs(self) -> list[str]:
        """The names of the inputs."""
        blank = [f"{self.name} is blank"] * self.marked
        return [self.name, *blank, *(f"{self.name}, {wave} of {c}" for c in self.cycles for wave in ("sine", "cosine"))]

    def encode(self, cells: Cells) -> tuple[list[Array], list[str]]:
        """The inputs, [N] each, and notes."""
        middle = "" if self.fill is None else _day(self.fill)
        columns, notes = _filled(self, cells, dates(cells, self.written), middle)
        angles = [2 * math.pi * columns[0] / CYCLES[cycle] for cycle in self.cycles]
        return [*columns, *(wave(angle) for angle in angles for wave in (np.sin, np.cos))], notes


@dataclass(frozen=True)
class CategoryColumn:
    """A column of text; a blank is a category too."""

    name: str
    categories: tuple[str, ...]
    other: bool = False  # whether one more input stands for all other texts

    @property
    def takes(self) -> str:
        """What a cell is, in words."""
        return f"text: {listed([c or 'nothing' for c in self.categories])}{' or another' * self.other}"

    def typical(self, mean: float) -> str:
        """A cell that is a category."""
        return next(filter(None, self.categories), "")

    @property
    def inputs(self) -> list[str]:
        """The names of the inputs."""
        each = [f"{self.name} is {category or 'blank'}" for category in self.categories]
        return [*each, f"{self.name} is another"] if self.other else each

    def encode(self, cells: Cells) -> tuple[list[Array], list[str]]:
        """The inputs, [N] each, and notes."""
        texts = np.array(with_one_blank(cells.texts), dtype=object)
        columns = [(texts == category).astype(float) for category in self.categories]
        rest = 1.0 - np.sum(columns, axis=0)
        unknown = Counter(str(text) or "blank" for text in texts[rest > 0])
        notes = []
        if unknown:
            shown = listed([f"{text!r}" for text, _ in unknown.most_common()])
            read = "read as one category, another" if self.other else "read as none of those that the fit had"
            notes.append(f"column {self.name}: {shown} in {unknown.total()} row{'s' * (unknown.total() > 1)}, {read}")
        return [*columns, rest] if self.other else columns, notes


Column = NumberColumn | DateColumn | CategoryColumn


def with_one_blank(texts: Sequence[str]) -> list[str]:
    """The texts, where all that says nothing is one text."""
    return ["" if is_blank(text) else text for text in texts]


def _filled(
    column: NumberColumn | DateColumn, cells: Cells, values: Array, shown: str
) -> tuple[list[Array], list[str]]:
    """The values with what stands for blanks, an input that marks these where the column has one, and a note."""
    blank = np.isnan(values)
    if not blank.any():
        return [values, *[blank.astype(float)] * column.marked], []
    if column.fill is None:
        raise ValueError(f"{cells.place(int(blank.argmax()))} is a missing or infinite value; remove that row")
    count = int(blank.sum())
    cells_read = f"{count} blank cell{'s' * (count > 1)}"
    note = f"column {column.name}: {cells_read}, read as {shown}, the median of the training rows"
    return [np.where(blank, column.fill, values), *[blank.astype(float)] * column.marked], [note]


def _day(days: float) -> str:
    """A number of days since 1970 as a date."""
    return str(date(1970, 1, 1) + timedelta(days=int(days)))
