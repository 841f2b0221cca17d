"""Where tables come from: csv and parquet files, and frames of pandas, polars or pyarrow, all as columns of text.

One way of reading for all of them: a number, a date or a blank of a frame is what it would be in a csv.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

from caveat.data.dataset import import_extra, listed
from caveat.data.tables.cells import Cells, is_number
from caveat.data.tables.separators import split_cells, with_decimal_points
from caveat.files import regular_file

__all__ = ["TABLES", "Table", "read_frame", "read_records", "read_table"]

TABLES = frozenset({".csv", ".parquet"})  # endings of files that hold tables


@dataclass(frozen=True)
class Table:
    """The columns of a table as text, in the order of the file; `where` is what errors call it."""

    where: str
    header: tuple[str, ...]
    columns: tuple[list[str], ...]
    numbers: Sequence[int]  # of the rows in the file, from 1
    notes: tuple[str, ...] = ()  # what is worth saying of how the file is written

    def __len__(self) -> int:
        return len(self.numbers)

    def cells(self, names: Sequence[str]) -> dict[str, Cells]:
        """The cells of the named columns, by the names as they are given; spaces count as in `one_line`."""
        counts = Counter(self.header)
        missing = [name for name in names if one_line(name) not in counts]
        if missing:
            which = f"column{'s' * (len(missing) > 1)} {listed(missing)}"
            raise ValueError(f"{self.where} lacks the {which}; it has {listed(self.header)}")
        twice = [name for name in names if counts[one_line(name)] > 1]
        if twice:
            raise ValueError(f"{self.where} has more than one column named {twice[0]!r}: give each a name of its own")
        places = {name: place for place, name in enumerate(self.header)}
        return {name: Cells(self.where, name, self.columns[places[one_line(name)]], self.numbers) for name in names}

    def rows(self, chosen: Sequence[int]) -> Table:
        """Some of the rows, in this order."""
        columns = tuple([column[row] for row in chosen] for column in self.columns)
        return Table(self.where, self.header, columns, [self.numbers[row] for row in chosen], self.notes)


def one_line(name: str) -> str:
    """The name of a column in one line, as messages and axes show it."""
    return " ".join(name.split())


def read_table(path: Path) -> Table:
    """A csv or a parquet file."""
    return _read_parquet(path) if path.suffix == ".parquet" else _read_csv(path)


def read_frame(frame: Any, where: str = "the frame") -> Table:
    """A frame of pandas or polars, or a table of pyarrow; the index of a pandas frame is not read."""
    names = getattr(frame, "column_names", None) or getattr(frame, "columns", None)
    if names is None or not hasattr(frame, "__getitem__"):
        raise TypeError(f"{where} is a {type(frame).__name__}, not a frame of pandas or polars nor a pyarrow table")
    columns = tuple(_texts(frame[name]) for name in names)
    if not columns or not columns[0]:
        raise ValueError(f"{where} has {len(columns)} columns and {len(columns[0]) if columns else 0} rows")
    header = tuple(one_line(str(name)) for name in names)
    return Table(where, header, columns, range(1, len(columns[0]) + 1))


def read_records(rows: Sequence[Mapping[str, Any] | Sequence[Any]], columns: Sequence[str], where: str) -> Table:
    """Rows of json: an object with a cell for each of these columns, or the cells in this order; numbered from 0."""
    cells: list[list[str]] = []
    for number, row in enumerate(rows):
        if isinstance(row, Mapping):
            given = {one_line(name): cell for name, cell in row.items()}
            missing = [name for name in columns if one_line(name) not in given]
            if missing:
                which = f"column{'s' * (len(missing) > 1)} {listed(missing)}"
                raise ValueError(f"{where}, row {number} lacks the {which}; it has {listed(list(row)) or 'none'}")
            row = [given[one_line(name)] for name in columns]
        if len(row) != len(columns):
            raise ValueError(f"{where}, row {number}: {len(row)} cells for {len(columns)} columns, {listed(columns)}")
        nested = [name for name, cell in zip(columns, row, strict=True) if isinstance(cell, list | dict)]
        if nested:
            raise ValueError(f"{where}, row {number}, column {nested[0]!r}: a list or an object is no cell")
        cells.append([_text(cell) for cell in row])
    return Table(where, tuple(map(one_line, columns)), tuple(map(list, zip(*cells, strict=True))), range(len(cells)))


def _read_parquet(path: Path) -> Table:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ImportError(f'{path}: parquet files are read by pyarrow: pip install "caveat[frames]"') from error
    arrow = import_extra("pyarrow")
    try:
        frame = parquet.read_table(regular_file(path))
    except (arrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read as a parquet file: {error}") from error
    return read_frame(frame, str(path))


def _texts(column: Any) -> list[str]:
    values = column.to_pylist() if hasattr(column, "to_pylist") else column.to_list()
    return [_text(value) for value in values]


def _text(value: Any) -> str:
    """A value as a csv would have it; nothing where it is missing."""
    if isinstance(value, str):
        return value.strip()
    if value is None or (isinstance(value, float | Decimal) and math.isnan(value)):
        return ""
    if isinstance(value, datetime | date):
        return "" if value != value else value.isoformat()  # pandas' NaT is a datetime unlike itself
    return repr(value) if type(value) is float else str(value)


def _read_csv(path: Path) -> Table:
    """The header's names, and the columns below it."""
    try:
        with regular_file(path).open(newline="", encoding="utf-8-sig") as file:
            rows, between = split_cells(file)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is not a text file of comma-separated values: {error}") from error
    if len(rows) < 2:
        raise ValueError(f"{path} needs a header and at least one row")
    header, body = tuple(map(one_line, rows[0])), rows[1:]
    if all(is_number(cell) for cell in header):
        raise ValueError(f"{path} has no header: its first line is all numbers")
    for index, row in enumerate(body, start=1):
        if len(row) != len(header):
            raise ValueError(f"{path}, row {index}: {len(row)} cells, but the header has {len(header)}")
    body = [[cell.strip() for cell in row] for row in body]
    pointed = with_decimal_points(body) if between != "," else None
    notes = ("a comma stands before decimals",) if pointed is not None else ()
    columns = tuple(list(column) for column in zip(*(pointed or body), strict=True))
    return Table(str(path), header, columns, range(1, len(body) + 1), notes)
