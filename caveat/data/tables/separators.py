"""What stands between the cells of a csv file, and what before the decimals of its numbers.

a,b        1,200.50                    a comma between cells, a point before decimals
a;b        1.200,50   12,5 €   3,25%   a semicolon or a tab; then a comma may stand before decimals
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from typing import TextIO

from caveat.data.tables.cells import is_number

__all__ = ["split_cells", "with_decimal_points"]

LONGEST = 2**24  # characters of a line: a file without line ends is no table, and would be held several times over
_BETWEEN = (",", ";", "\t")
_WITH_COMMA = re.compile(
    r"(?P<before>\(?[-+]?\s*(?:[$€£¥₹]|[A-Z]{3}\b)?\s*[-+]?)(?P<whole>\d{1,3}(?:\.\d{3})+|\d+)(?:,(?P<decimals>\d+))?"
    r"(?P<after>\s*(?:%|[$€£¥₹]|[A-Z]{3})?\)?)"
)


def split_cells(file: TextIO) -> tuple[list[list[str]], str]:
    """The rows of a csv file, and what stands between cells: the first that gives all rows as many, more than one."""
    for between in _BETWEEN:
        rows = _rows(file, between)
        if rows and len(rows[0]) > 1 and all(len(row) == len(rows[0]) for row in rows):
            return rows, between
    return _rows(file, _BETWEEN[0]), _BETWEEN[0]


def _rows(file: TextIO, between: str) -> list[list[str]]:
    file.seek(0)
    return [row for row in csv.reader(_lines(file), delimiter=between) if row]


def _lines(file: TextIO) -> Iterator[str]:
    """The lines of a file, none of which is read whole if it is too long to be one of a table."""
    for number, line in enumerate(iter(lambda: file.readline(LONGEST + 1), ""), start=1):
        if len(line) > LONGEST:
            raise csv.Error(f"line {number} has more than {LONGEST:,} characters")
        yield line


def with_decimal_points(rows: Sequence[Sequence[str]]) -> list[list[str]] | None:
    """The rows with points before decimals; None where no number has a comma there, or one a point."""
    cells = {cell for row in rows for cell in row}
    if not any(map(_only_with_comma, cells)) or any(map(_only_with_point, cells)):
        return None
    pointed = {cell: _with_point(cell) for cell in cells}
    return [[pointed[cell] for cell in row] for row in rows]


def _only_with_comma(cell: str) -> bool:
    """Whether a cell is a number if a comma stands before decimals, and none otherwise."""
    match = _WITH_COMMA.fullmatch(cell)
    return match is not None and match["decimals"] is not None and not is_number(cell)


def _only_with_point(cell: str) -> bool:
    """Whether a cell is a number if a point stands before decimals, and none otherwise."""
    match = _WITH_COMMA.fullmatch(cell)
    return "." in cell and is_number(cell) and (match is None or match["whole"].startswith("0"))


def _with_point(cell: str) -> str:
    match = _WITH_COMMA.fullmatch(cell)
    if match is None:
        return cell
    decimals = "" if match["decimals"] is None else f".{match['decimals']}"
    return f"{match['before']}{match['whole'].replace('.', '')}{decimals}{match['after']}"
