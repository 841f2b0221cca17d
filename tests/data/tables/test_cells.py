"""What cells say."""

import datetime

import numpy as np
import pytest

from caveat.data.tables.cells import Cells, date_format, dates, is_blank, is_number, numbers, whole_number


def cells(*texts, rows=None):
    return Cells("t.csv", "c", list(texts), rows or range(1, len(texts) + 1))


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("1200.5", 1200.5, ""),
        ("1,200.50", 1200.5, ""),
        ("$1,200.50", 1200.5, "$"),
        ("-$5", -5, "$"),
        ("$-5", -5, "$"),
        ("($35.00)", -35, "$"),
        ("(35)", -35, ""),
        ("€ 12", 12, "€"),
        ("12 EUR", 12, "EUR"),
        ("USD 1,000,000", 1e6, "USD"),
        ("12.5%", 12.5, "%"),
        ("12.5 %", 12.5, "%"),
        ("+.5", 0.5, ""),
        ("-4e1", -40, ""),
    ],
)
def test_numbers_and_their_units(text, value, unit):
    read = numbers(cells(text))
    assert (read.values.tolist(), read.unit) == ([value], unit)


@pytest.mark.parametrize("text", ["1,20", "12,5", "$1%", "(5", "5)", "(-5)", "1 200", "1.2.3", "$", "12 St", ""])
def test_what_is_no_number(text):
    assert not is_number(text)


def test_blanks_are_nan_and_the_unit_is_that_of_the_others():
    read = numbers(cells("", "$5", "NA", "7", "nan", "?", "-", "N/A"))
    np.testing.assert_array_equal(read.values, [np.nan, 5, np.nan, 7, *[np.nan] * 4])
    assert read.unit == "$"
    assert not any(is_blank(text) for text in ("none", "0", "no", "x"))


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["1", "two"], "row 8, column 'c': 'two' is not a number"),
        (["1", "inf"], "row 8, column 'c': 'inf' is a missing or infinite value"),
        (["1", "1e300"], "row 8, column 'c': '1e300' is beyond single precision"),
        (["$1", "€2"], r"'€2' is in €, the column is in \$: write all"),
        (["1", "€2", "$3"], r"row 9, column 'c': '\$3' is in \$, the column is in €"),
        (["1%", "2"], "'2' is without a unit, the column is in %"),
    ],
)
def test_cells_that_do_not_fit_are_named_with_their_row_of_the_file(texts, message):
    with pytest.raises(ValueError, match=message):
        numbers(cells(*texts, rows=[3, 8, 9]))


def test_units_are_held_to():
    assert numbers(cells("5"), "$").unit == "$"
    with pytest.raises(ValueError, match=r"'€5' is in €, the column is in \$"):
        numbers(cells("€5"), "$")


@pytest.mark.parametrize(
    ("texts", "name"),
    [
        (["2024-03-01", ""], "year-month-day"),
        (["2024-03-01T12:30:00Z"], "year-month-day"),
        (["2024-03-01 12:30"], "year-month-day"),
        (["2024/03/01"], "year/month/day"),
        (["01.03.2024"], "day.month.year"),
        (["03/01/2024"], "month/day/year"),
        (["03/01/2024", "13/01/2024"], "day/month/year"),
        (["01-Mar-2024"], "day-month-year"),
        (["1 March 2024", "2 Mar 2024"], "day month year"),
        (["March 1, 2024"], "month day, year"),
        (["05.06.2024", "2024-11-28", "", "2024-07-13 12:30"], "year-month-day or day.month.year"),
        (["2024-03-01", "03/01/2024", "13/01/2024"], "year-month-day or day/month/year"),
        (["2024-03-01", "soon"], None),
        (["", "NA"], None),
    ],
)
def test_how_dates_are_written(texts, name):
    assert date_format(cells(*texts)) == name


def test_dates_written_in_several_ways_are_read_each_in_its_own():
    days = dates(
        cells("02.01.1970", "1970-01-03", "", "5 Jan 1970"), "day month year or day.month.year or year-month-day"
    )
    np.testing.assert_array_equal(days, [1, 2, np.nan, 4])


@pytest.mark.parametrize("odd", ["soon", "13/13/2024", "02/28/2024"])  # the last has the month first, others the day
def test_a_cell_that_is_no_date_among_dates_is_named(odd):
    texts = ("28/02/2024", "2024-03-01", "14/02/2024", odd)
    with pytest.raises(ValueError, match=f"row 9, column 'c': '{odd}' is not a date .* --text c"):
        date_format(cells(*texts, rows=[3, 4, 8, 9]))


def test_days_since_1970():
    days = dates(cells("01.03.2024 06:00", "", "2.1.1970"), "day.month.year")
    expected = (datetime.date(2024, 3, 1) - datetime.date(1970, 1, 1)).days + 0.25
    np.testing.assert_array_equal(days, [expected, np.nan, 1])
    zoned = dates(cells("1970-01-02T02:00:00+02:00", "1970-01-02T00:00:00Z"), "year-month-day")
    assert zoned.tolist() == [1, 1], "in UTC"
    assert dates(cells("1970-01-03"), "month/day/year").tolist() == [2], "ISO dates are understood everywhere"
    with pytest.raises(ValueError, match=r"row 1, column 'c': 'soon' is not a date written day\.month\.year"):
        dates(cells("soon"), "day.month.year")


def test_whole_numbers_however_spelled():
    assert [whole_number(text) for text in ("1", "01", "+1", "-3", "1.0", "--1", "")] == [1, 1, 1, -3, None, None, None]
