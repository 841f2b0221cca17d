"""What the target of a table is."""

import numpy as np
import pytest

from caveat.data.tables import MAX_CLASSES, read_target
from caveat.data.tables.cells import Cells


def target(*texts, **known):
    return read_target(Cells("t.csv", "t", list(texts), range(1, len(texts) + 1)), **known)


def test_whole_numbers_are_classes_in_numeric_order():
    read = target("10", "-1", "9", "10")
    assert (read.class_names, read.y.tolist()) == (("-1", "9", "10"), [2, 0, 1, 2])


def test_text_is_classes():
    read = target("dog", "cat", "dog")
    assert (read.class_names, read.y.tolist()) == (("cat", "dog"), [1, 0, 1])


def test_many_whole_numbers_and_decimals_are_numbers():
    read = target(*map(str, range(MAX_CLASSES + 1)))
    assert read.class_names == ()
    assert read.y.dtype == np.float64
    assert target("0.0", "1.0").class_names == ()
    assert target("1", "2", kind="numbers").class_names == ()
    assert target("0.5", "1.5", kind="classes").class_names == ("0.5", "1.5")


def test_money_has_a_unit():
    read = target("$1,000", "$2,000.50")
    assert (read.y.tolist(), read.unit, read.class_names) == ([1000, 2000.5], "$", ())
    with pytest.raises(ValueError, match=r"'€5' is in €, the column is in \$"):
        target("€5", kind="numbers", unit="$")


def test_rows_without_a_target_are_left_out():
    read = target("yes", "", "no", "NA")
    assert (read.y.tolist(), read.rows) == ([1, 0], [0, 2])
    read = target("0.5", "", "2")
    assert (read.y.tolist(), read.rows) == ([0.5, 2], [0, 2])
    with pytest.raises(ValueError, match="target column 't': blank in every row"):
        target("", "NA")


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["0.5", "oops"], "t.csv, row 2, column 't': 'oops' is not a number"),
        ([f"name{number}" for number in range(30)], "text with 30 distinct values.*at most 20"),
    ],
)
def test_what_can_be_neither(texts, message):
    with pytest.raises(ValueError, match=message):
        target(*texts)


def test_one_whole_number_is_one_class_however_it_is_spelled():
    read = target(*["1", "01", "+1", "2", "-3"] * 4)
    assert (read.class_names, read.y.tolist()) == (("-3", "1", "2"), [1, 1, 1, 2, 0] * 4)
    assert target(*["00", "01", "02"] * 3).class_names == ("00", "01", "02"), "as they are written"
    assert target("--1", "--1").class_names == ("--1",)
    with pytest.raises(ValueError, match=r"row 1, column 't': '9+' is a missing or infinite value"):
        target(*["9" * 5000] * 9)
