"""How columns become inputs; scikit-learn's own transforms are the reference."""

import dataclasses
import json

import numpy as np
import pytest
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import OneHotEncoder

from caveat.data.tables import Encoding, Table, learn_encoding, plain_numbers


def table(**columns):
    rows = len(next(iter(columns.values())))
    return Table("t.csv", tuple(columns), tuple(columns.values()), range(1, rows + 1))


def learned(text=(), **columns):
    return learn_encoding(table(**columns), tuple(columns), text)


def test_categories_are_encoded_as_scikit_learn_does():
    rng = np.random.default_rng(0)
    towns = [f"town{number}" for number in range(40)]
    train = [*rng.choice(towns, 400, p=np.arange(1, 41) / 820).tolist(), "rare"]
    new = [*towns, "rare", "never seen"]
    encoding = learned(town=train)
    reference = OneHotEncoder(
        max_categories=20, min_frequency=2, handle_unknown="infrequent_if_exist", sparse_output=False
    ).fit(np.array(train, dtype=object)[:, None])
    expected = reference.transform(np.array(new, dtype=object)[:, None])
    encoded = encoding.encode(table(town=new))
    np.testing.assert_array_equal(encoded.x, expected)
    assert encoded.x.shape[1] == 20 == len(encoding.inputs)
    assert encoding.inputs[-1] == "town is another"
    assert encoded.notes[0].endswith("in 23 rows, read as one category, another")


def test_blanks_are_filled_as_scikit_learn_does():
    train = ["1", "", "7", "2", "NA", "100"]
    new = ["", "3", "?"]
    encoding = learned(a=train)
    values = np.array([[1], [np.nan], [7], [2], [np.nan], [100]])
    reference = SimpleImputer(strategy="median", add_indicator=True).fit(values)
    encoded = encoding.encode(table(a=new))
    np.testing.assert_array_equal(encoded.x, reference.transform([[np.nan], [3], [np.nan]]))
    assert encoded.notes == ("column a: 2 blank cells, read as 4.5, the median of the training rows",)
    assert encoding.inputs == ["a", "a is blank"]


def test_a_column_without_blanks_takes_them_later():
    encoding = learned(a=["1", "2", "9"])
    encoded = encoding.encode(table(a=["", "4"]))
    assert encoded.x.tolist() == [[2], [4]]
    assert "1 blank cell, read as 2" in encoded.notes[0]


def test_dates_go_round_what_the_training_rows_go_round():
    encoding = learned(d=["2024-01-01", "2024-01-04"])
    assert encoding.inputs == ["d"]
    encoding = learned(d=["2024-01-01 06:00", "2025-03-01 12:00", ""])
    assert encoding.inputs[:3] == ["d", "d is blank", "d, sine of year"]
    assert encoding.inputs[-1] == "d, cosine of day"
    x = encoding.encode(table(d=["1970-01-01 06:00", "1970-01-08 06:00"])).x
    np.testing.assert_allclose(x[:, 0], [0.25, 7.25])
    np.testing.assert_allclose(x[0, 4:6], x[1, 4:6], atol=1e-12)  # a week later
    np.testing.assert_allclose(x[:, 6:], [[1, 0], [1, 0]], atol=1e-12)  # six in the morning


def test_kinds_of_columns():
    encoding = learned(
        text=("zip",),
        price=["$1,000", "$2", "$3", "$4"],
        day=["01/02/2024", "13/02/2024", "", "14/02/2024"],
        town=["Oslo", "Oslo", "", "?"],
        zip=["0150", "0151", "0150", "0151"],
        name=["a", "b", "c", "d"],
        empty=["", "NA", "-", "?"],
        continent=["Europe"] * 4,
    )
    assert encoding.columns == ("price", "day", "town", "zip")
    assert encoding.numbers[0].unit == "$"
    assert encoding.dates[0].written == "day/month/year"
    assert [(c.name, c.categories, c.other) for c in encoding.categories] == [
        ("town", ("", "Oslo"), False),
        ("zip", ("0150", "0151"), False),
    ]
    assert encoding.left_out == {
        "name": "text that hardly ever comes twice",
        "empty": "blank in every training row",
        "continent": "the same text in every training row",
    }
    days = ["day", "day is blank", "day, sine of week", "day, cosine of week"]
    places = ["town is blank", "town is Oslo", "zip is 0150", "zip is 0151"]
    assert encoding.inputs == ["price, $", *days, *places]


def test_an_odd_cell_among_numbers_is_named_with_the_way_round_it():
    with pytest.raises(ValueError, match=r"t.csv, row 3, column 'rooms': '3\+' is not a number.*--text rooms"):
        learned(rooms=["1", "2", "3+"])
    assert learned(text=("rooms",), rooms=["1", "1", "3+"]).inputs == ["rooms is 1", "rooms is another"]


def test_unknown_categories_without_a_place_for_others_are_none_of_them():
    encoding = learned(town=["Oslo", "Oslo", "Bergen", "Bergen"])
    encoded = encoding.encode(table(town=["Bodø", "Oslo"]))
    assert encoded.x.tolist() == [[0, 0], [0, 1]]
    assert encoded.notes == ("column town: 'Bodø' in 1 row, read as none of those that the fit had",)


def test_an_encoding_is_plain_json():
    encoding = learned(a=["1", "", "2"], d=["2024-01-01", "2024-02-01", ""], t=["x", "x", "y"], e=["", "", ""])
    again = Encoding.of(json.loads(json.dumps(dataclasses.asdict(encoding))))
    assert again == encoding
    with pytest.raises(ValueError, match="an encoding of the columns a describes b"):
        Encoding(("a",), numbers=plain_numbers(["b"]).numbers)


def test_columns_are_found_by_name_in_any_order():
    encoding = learned(a=["1", "2"], b=["3", "4"])
    assert encoding.encode(table(c=["x"], b=["4"], a=["1"])).x.tolist() == [[1, 4]]
    with pytest.raises(ValueError, match=r"t\.csv lacks the column b; it has a"):
        encoding.encode(table(a=["1"]))
    doubled = Table("t.csv", ("a", "a", "b"), (["1"], ["1"], ["1"]), [1])
    with pytest.raises(ValueError, match=r"t\.csv has more than one column named 'a'"):
        encoding.encode(doubled)


def test_plain_numbers_refuse_blanks():
    encoding = plain_numbers(["a"])
    assert encoding.encode(table(a=["$5"])).x.tolist() == [[5]]
    with pytest.raises(ValueError, match="row 2, column 'a': '' is a missing or infinite value; remove that row"):
        encoding.encode(table(a=["1", ""]))
