"""Files and frames as columns of text."""

import datetime

import numpy as np
import pytest

from caveat.data.tables.sources import read_frame, read_table


def csv_file(tmp_path, text):
    path = tmp_path / "table.csv"
    path.write_text(text)
    return path


def test_a_csv_is_columns_of_text(tmp_path):
    table = read_table(csv_file(tmp_path, "\ufeffa, b ,t\n1,2, dog\n\n3,-4e1,\n"))
    assert table.header == ("a", "b", "t")
    assert table.columns == (["1", "3"], ["2", "-4e1"], ["dog", ""])
    part = table.rows([1])
    assert (part.columns, part.numbers) == ((["3"], ["-4e1"], [""]), [2]), "rows keep their numbers"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "needs a header"),
        ("a,t\n", "needs a header"),
        ("1,2\n3,4\n", "has no header: its first line is all numbers"),
        ("a,t\n1,2\n3\n", ", row 2: 1 cells, but the header has 2"),
    ],
)
def test_broken_csv_files_are_refused(tmp_path, text, message):
    with pytest.raises(ValueError, match=f"table.csv.*{message}"):
        read_table(csv_file(tmp_path, text))


def test_names_of_columns_are_in_one_line(tmp_path):
    table = read_table(csv_file(tmp_path, '"note\nof  agent",t\nx,1\n'))
    assert table.header == ("note of agent", "t")
    for asked in ("note of agent", "note\nof  agent"):  # as earlier posteriors have it
        assert table.cells([asked])[asked].texts == ["x"]


@pytest.mark.parametrize("between", [";", "\t"])
def test_semicolons_and_tabs_between_cells_and_commas_before_decimals(tmp_path, between):
    lines = ["a", "b", "day", "price"], ["3,5", "1.000", "01.03.2024", "1.234,50 €"], ["-7", "12,25%", "", "(€ 35,00)"]
    table = read_table(csv_file(tmp_path, "\n".join(map(between.join, lines))))
    assert table.columns == (["3.5", "-7"], ["1000", "12.25%"], ["01.03.2024", ""], ["1234.50 €", "(€ 35.00)"])
    assert table.notes == table.rows([0]).notes == ("a comma stands before decimals",)


@pytest.mark.parametrize("cells", ["1,234;7", "3,5;7.25", "3,5;0.125", "x, y;2"])
def test_commas_that_need_not_stand_before_decimals_stay(tmp_path, cells):
    table = read_table(csv_file(tmp_path, f"a;b\n{cells}\n"))
    assert [column[0] for column in table.columns] == cells.split(";")
    assert not table.notes


def test_cells_may_hold_semicolons_and_lines(tmp_path):
    table = read_table(csv_file(tmp_path, 'a,t\n"x; ""y""\r\nz",1\n\u2028,2\n'))
    assert table.columns == (['x; "y"\r\nz', ""], ["1", "2"])


def test_csv_that_is_not_text(tmp_path):
    path = tmp_path / "table.csv"
    path.write_bytes(b"a,t\n\xff\xfe,1\n")
    with pytest.raises(ValueError, match=r"table.csv is not a text file"):
        read_table(path)


ROWS = {
    "count": [1, 2, 3],
    "share": [0.5, None, 2.0],
    "town": ["Oslo", None, " Bergen "],
    "sold": [datetime.date(2024, 3, 1), datetime.date(2024, 3, 2), None],
    "seen": [datetime.datetime(2024, 3, 1, 12, 30), None, datetime.datetime(2024, 3, 2)],
    "new": [True, False, True],
}
TEXTS = {
    "count": ["1", "2", "3"],
    "share": ["0.5", "", "2.0"],
    "town": ["Oslo", "", "Bergen"],
    "sold": ["2024-03-01", "2024-03-02", ""],
    "seen": ["2024-03-01T12:30:00", "", "2024-03-02T00:00:00"],
    "new": ["True", "False", "True"],
}


@pytest.mark.parametrize("library", ["pandas", "polars", "pyarrow"])
def test_frames_of_every_library_read_alike(library):
    module = pytest.importorskip(library)
    frame = module.table(ROWS) if library == "pyarrow" else module.DataFrame(ROWS)
    table = read_frame(frame)
    assert dict(zip(table.header, table.columns, strict=True)) == TEXTS


def test_pandas_has_many_ways_to_say_nothing():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {"a": pandas.array([1, None], dtype="Int64"), "b": [pandas.Timestamp("2024-03-01"), pandas.NaT]}
    )
    frame["c"] = pandas.Categorical(["x", None])
    assert read_frame(frame).columns == (["1", "<NA>"], ["2024-03-01T00:00:00", ""], ["x", ""])


def test_a_parquet_file_reads_as_its_frame(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(arrow.table(ROWS), tmp_path / "t.parquet")
    assert read_table(tmp_path / "t.parquet").columns == tuple(TEXTS.values())
    (tmp_path / "t.parquet").write_bytes(b"PAR1 broken")
    with pytest.raises(ValueError, match=r"t.parquet cannot be read as a parquet file"):
        read_table(tmp_path / "t.parquet")


def test_what_is_no_frame():
    with pytest.raises(TypeError, match="the frame is a list, not a frame of pandas or polars"):
        read_frame([1, 2])
    with pytest.raises(TypeError, match="is a ndarray"):
        read_frame(np.zeros((2, 2)))
