"""How columns become the inputs of a network, learned from the training rows alone and kept as plain json.

    a number      itself; where it was blank the median, and an input of its own that says so
    a date        days since 1970, and its place in the year, the week and the day where the training rows go round it
    a category    one input a category that comes twice or more, the twenty most frequent, and one for all others

scikit-learn's `SimpleImputer` and `OneHotEncoder` say what stands for blanks and which categories count. What they
found is a few numbers and names, so that new rows are encoded without scikit-learn, and nothing is pickled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from caveat.data.dataset import Array, import_extra, listed
from caveat.data.tables.cells import Cells, Numbers, date_format, dates, is_blank, is_number, numbers
from caveat.data.tables.columns import CYCLES, CategoryColumn, Column, DateColumn, NumberColumn, with_one_blank
from caveat.data.tables.sources import Table

__all__ = ["Encoded", "Encoding", "learn_encoding", "plain_numbers", "stored_encoding"]

MOST_CATEGORIES = 20  # inputs of one column of text


class Encoded(NamedTuple):
    """The inputs that rows of a table are, and what is worth saying of how they were read."""

    x: Array  # [N, K] float64
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Encoding:
    """How the columns of a table become inputs, in this order; those left out, and why."""

    columns: tuple[str, ...]
    numbers: tuple[NumberColumn, ...] = ()
    dates: tuple[DateColumn, ...] = ()
    categories: tuple[CategoryColumn, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        described = [name for name, _ in self._named()]
        if sorted(described) != sorted(self.columns):
            raise ValueError(f"an encoding of the columns {listed(self.columns)} describes {listed(described)}")

    def in_order(self) -> list[Column]:
        """What becomes of each column, in the order of their inputs."""
        columns = dict(self._named())
        return [columns[name] for name in self.columns]

    def _named(self) -> list[tuple[str, Column]]:
        kinds: tuple[tuple[Column, ...], ...] = (self.numbers, self.dates, self.categories)
        return [(column.name, column) for columns in kinds for column in columns]

    @staticmethod
    def of(content: dict[str, Any]) -> Encoding:
        """An encoding from the json that `dataclasses.asdict` made of it."""
        return Encoding(
            tuple(content["columns"]),
            tuple(NumberColumn(**column) for column in content["numbers"]),
            tuple(DateColumn(**column | {"cycles": tuple(column["cycles"])}) for column in content["dates"]),
            tuple(
                CategoryColumn(**column | {"categories": tuple(column["categories"])})
                for column in content["categories"]
            ),
            dict(content["left_out"]),
        )

    @property
    def inputs(self) -> list[str]:
        """The names of the inputs, one for each column of `encode(...).x`."""
        return [name for column in self.in_order() for name in column.inputs]

    def encode(self, table: Table) -> Encoded:
        """The inputs that the rows of a table are."""
        cells = table.cells(self.columns)
        x: list[Array] = []
        notes: list[str] = []
        for column in self.in_order():
            inputs, said = column.encode(cells[column.name])
            x += inputs
            notes += said
        return Encoded(np.stack(x, axis=1), tuple(notes))


def plain_numbers(columns: Sequence[str]) -> Encoding:
    """Columns that are numbers without blanks, as they are."""
    return Encoding(tuple(columns), tuple(NumberColumn(name) for name in columns))


def stored_encoding(preprocessing: dict[str, Any]) -> Encoding | None:
    """The encoding that the preprocessing of a table's data set keeps; columns alone are of numbers without blanks."""
    if encoding := preprocessing.get("encoding"):
        return Encoding.of(encoding)
    columns = preprocessing.get("columns")
    return plain_numbers(columns) if columns else None


def learn_encoding(table: Table, columns: Sequence[str], text: Collection[str] = ()) -> Encoding:
    """The encoding of these columns from the training rows; those named in `text` are categories whatever they hold."""
    numbers_read: dict[str, tuple[NumberColumn, Array]] = {}
    dates_read: dict[str, tuple[DateColumn, Array]] = {}
    categories: dict[str, CategoryColumn] = {}
    left_out: dict[str, str] = {}
    for name, cells in table.cells(columns).items():
        written = [text for text in cells.texts if not is_blank(text)]
        is_text = name in text
        if not written:
            left_out[name] = "blank in every training row"
        elif not is_text and sum(map(is_number, written)) * 2 >= len(written):
            values, unit = _as_numbers(cells)
            numbers_read[name] = NumberColumn(name, unit), values
        elif not is_text and (how := date_format(cells)) is not None:
            values = dates(cells, how)
            dates_read[name] = DateColumn(name, how, cycles=_cycles(values)), values
        elif len(set(cells.texts)) == 1:
            left_out[name] = "the same text in every training row"
        else:
            column = _category(name, cells.texts)
            if column is None:
                left_out[name] = "text that hardly ever comes twice"
            else:
                categories[name] = column
    read = {**numbers_read, **dates_read}
    fills = _medians([values for _, values in read.values()])
    filled = {
        name: (fill, bool(np.isnan(values).any()))
        for (name, (_, values)), fill in zip(read.items(), fills, strict=True)
    }
    return Encoding(
        tuple(name for name in columns if name not in left_out),
        tuple(NumberColumn(name, c.unit, *filled[name]) for name, (c, _) in numbers_read.items()),
        tuple(DateColumn(name, c.written, *filled[name], c.cycles) for name, (c, _) in dates_read.items()),
        tuple(categories.values()),
        left_out,
    )


def _as_numbers(cells: Cells) -> Numbers:
    try:
        return numbers(cells)
    except ValueError as error:
        if "is not a number" in str(error):
            raise ValueError(f"{error}, or have the column read as text, --text {cells.name}") from error
        raise


def _medians(columns: Sequence[Array]) -> list[float]:
    """What stands for blanks: the median of each column without them."""
    if not columns:
        return []
    imputer = import_extra("sklearn.impute").SimpleImputer(strategy="median")
    medians: list[float] = imputer.fit(np.stack(columns, axis=1)).statistics_.tolist()
    return medians


def _category(name: str, texts: Sequence[str]) -> CategoryColumn | None:
    """The categories that count; None where hardly any text comes twice, as in names and notes."""
    counts = Counter(with_one_blank(texts))
    if len(counts) > max(MOST_CATEGORIES, len(texts) / 2) or max(counts.values()) < 2:
        return None
    encoder = import_extra("sklearn.preprocessing").OneHotEncoder(
        max_categories=MOST_CATEGORIES, min_frequency=2, handle_unknown="infrequent_if_exist", sparse_output=False
    )
    encoder.fit(np.array(with_one_blank(texts), dtype=object)[:, None])
    rare = encoder.infrequent_categories_[0]
    others = set() if rare is None else set(rare.tolist())
    every = encoder.categories_[0].tolist()
    return CategoryColumn(name, tuple(category for category in every if category not in others), bool(others))


def _cycles(days: Array) -> tuple[str, ...]:
    """What the dates go round at least once; a day only where they have times."""
    known = days[~np.isnan(days)]
    has_times = bool((known % 1).any())
    span = float(known.max() - known.min())
    return tuple(name for name, length in CYCLES.items() if span >= length and (name != "day" or has_times))
