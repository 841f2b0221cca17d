"""What the cells of a column say: numbers with their unit, dates, or that there is nothing.

1,200.50   $1,200.50   (35.00)   12.5%   1e-3   900 EUR        numbers, all of one unit
2024-03-01   2024-03-01T12:30   01/03/2024   1 March 2024      dates, written in one way or in several
NA   n/a   nan   null   ?   -   and nothing at all             blanks
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import NamedTuple

import numpy as np

from caveat.data.dataset import LARGEST, Array

__all__ = ["Cells", "Numbers", "date_format", "dates", "is_blank", "is_number", "numbers", "whole_number"]

_BLANKS = frozenset({"", "na", "n/a", "#n/a", "<na>", "nan", "nat", "null", "?", "-"})
_CODES = "USD|EUR|GBP|CHF|JPY|CNY|INR|CAD|AUD|SEK|NOK|DKK|PLN|BRL"
_SIGNS = "[$€£¥₹]"
_NUMBER = re.compile(
    rf"(?P<open>\()?(?P<minus>[-+])?(?P<before>{_SIGNS}|(?:{_CODES})\b)?\s*(?P<sign>[-+])?"
    r"(?P<digits>\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d+(?:\.\d*)?|\.\d+)"
    rf"\s*(?P<after>%|{_SIGNS}|(?:{_CODES})\b)?(?P<close>\))?"
)
_TIMES = ("", " %H:%M", " %H:%M:%S")
_ISO = "year-month-day"
_FORMATS = {  # what a format is called -> how dates are written, the first that fits
    "year/month/day": ("%Y/%m/%d",),
    "day.month.year": ("%d.%m.%Y",),
    "month/day/year": ("%m/%d/%Y",),
    "day/month/year": ("%d/%m/%Y",),
    "day-month-year": ("%d-%m-%Y", "%d-%b-%Y"),
    "day month year": ("%d %B %Y", "%d %b %Y"),
    "month day, year": ("%B %d, %Y", "%b %d, %Y"),
}
_EITHER = ("month/day/year", "day/month/year")  # 01/02/2024 is of both, so a column has one of them
_OR = " or "  # between the ways of a column that has several
_FIRST_DAY = datetime(1970, 1, 1)


class Cells(NamedTuple):
    """The cells of a column, and where they are, for errors."""

    where: str  # the file
    name: str  # of the column
    texts: list[str]
    rows: Sequence[int]  # numbers of their rows in the file, from 1

    def place(self, index: int) -> str:
        """A cell and where it is."""
        return f"{self.where}, row {self.rows[index]}, column {self.name!r}: {self.texts[index]!r}"


class Numbers(NamedTuple):
    """The values of cells, NaN where they are blank, and the unit that they are written with."""

    values: Array  # [N] float64
    unit: str


def is_blank(cell: str) -> bool:
    """Whether a cell says that there is nothing."""
    return cell.casefold() in _BLANKS


def is_number(cell: str) -> bool:
    """Whether a cell is a number, with or without a unit."""
    return _number(cell) is not None


def whole_number(cell: str) -> int | None:
    """The whole number that a text stands for, however it is spelled; None where it stands for none."""
    try:
        return int(cell) if cell.lstrip("+-").isdecimal() else None
    except ValueError:  # two signs, or thousands of digits
        return None


def numbers(cells: Cells, unit: str | None = None) -> Numbers:
    """The cells of a column as numbers of one unit: the one given, or that of the first cell that has one.

    A ValueError names the first cell that is no such number.
    """
    try:
        values = np.array([float(text) for text in cells.texts])  # the way of most columns
    except ValueError:
        pass
    else:
        if not unit and (np.abs(values) <= LARGEST).all():
            return Numbers(values, "")
    values = np.full(len(cells.texts), np.nan)
    said = [None if is_blank(text) else _number(text) for text in cells.texts]
    if unit is None:
        unit = next((number[1] for number in said if number is not None and number[1]), "")
    for index, (text, number) in enumerate(zip(cells.texts, said, strict=True)):
        if is_blank(text):
            continue
        if number is None:
            raise ValueError(f"{cells.place(index)} is not a number, as others of this column are: correct or blank it")
        value, written = number
        if not np.isfinite(value):
            raise ValueError(f"{cells.place(index)} is a missing or infinite value; correct or blank it")
        if abs(value) > LARGEST:
            raise ValueError(
                f"{cells.place(index)} is beyond single precision, {LARGEST:.1e}; rescale it or remove the row"
            )
        if written != unit and not (written == "" and unit != "%"):  # a sum of money may do without its sign
            raise ValueError(
                f"{cells.place(index)} is {f'in {written}' if written else 'without a unit'}, the column is "
                f"{f'in {unit}' if unit else 'without one'}: write all of a column in one unit"
            )
        values[index] = value
    return Numbers(values, unit)


def _number(cell: str) -> tuple[float, str] | None:
    """A number and its unit."""
    try:
        return float(cell), ""
    except ValueError:
        match = _NUMBER.fullmatch(cell)
    if match is None or bool(match["open"]) != bool(match["close"]) or (match["before"] and match["after"]):
        return None
    negative = (match["open"] is not None) + (match["minus"] == "-") + (match["sign"] == "-")
    if negative > 1:
        return None
    value = float(match["digits"].replace(",", ""))
    return (-value if negative else value), match["before"] or match["after"] or ""


def date_format(cells: Cells) -> str | None:
    """What the way is called in which a column's dates are written, or the ways; None where it hardly has dates.

    A column may mix ways that cannot be taken for one another: `day.month.year or year-month-day`. Where more
    than half of the cells are dates, a ValueError names the first that is none.
    """
    written = [text for text in cells.texts if not is_blank(text)]
    if not written:
        return None
    for name in (_ISO, *_FORMATS):
        if _date(written[0], name) is not None and all(_date(text, name) is not None for text in written):
            return name
    ways, left = [], written
    first, second = ([text for text in written if _date(text, way) is not None] for way in _EITHER)
    passed_over = _EITHER[0] if len(second) > len(first) else _EITHER[1]
    for name in (_ISO, *_FORMATS):
        rest = left if name == passed_over else [text for text in left if _date(text, name) is None]
        ways += [name] * (len(rest) < len(left))
        left = rest
    if left and len(left) * 2 < len(written):
        raise ValueError(
            f"{cells.place(cells.texts.index(left[0]))} is not a date written {_OR.join(ways)}, as others of this "
            f"column are: correct or blank it, or have the column read as text, --text {cells.name}"
        )
    return None if left else _OR.join(ways)


def dates(cells: Cells, how: str) -> Array:
    """Days since the start of 1970, in UTC where a zone is written, [N]; NaN where blank."""
    days = np.full(len(cells.texts), np.nan)
    for index, text in enumerate(cells.texts):
        if is_blank(text):
            continue
        date = _date(text, how) or _date(text, _ISO)
        if date is None:
            raise ValueError(f"{cells.place(index)} is not a date written {how}")
        days[index] = (date - _FIRST_DAY).total_seconds() / 86_400
    return days


def _date(cell: str, how: str) -> datetime | None:
    if _OR in how:
        return next((date for way in how.split(_OR) if (date := _date(cell, way)) is not None), None)
    if how == _ISO:
        try:
            date = datetime.fromisoformat(f"{cell[:-1]}+00:00" if cell[-1:] == "Z" else cell)
        except ValueError:
            return None
        return date if date.tzinfo is None else date.astimezone(timezone.utc).replace(tzinfo=None)
    for form in _FORMATS[how]:
        for time in _TIMES:
            try:
                return datetime.strptime(cell, form + time)
            except ValueError:
                continue
    return None
