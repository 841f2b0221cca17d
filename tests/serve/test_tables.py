"""Rows of a table over HTTP: cells by the names of columns, read as a file of such rows is; and calibrated answers."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import caveat
from caveat import data

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pandas = pytest.importorskip("pandas")

from caveat.serve import Service, app_of  # noqa: E402 - after what they need is known to be there
from tests.serve.test_app import ask, running  # noqa: E402

CITIES = ("Bonn", "Kyiv", "Oslo")
ROW = {"age": 31, "city": "Kyiv", "since": "2021-03-01", "price, €": "1,200 €"}


def rows_of_people() -> Any:
    rng = torch.Generator().manual_seed(0)
    ages, cities, days = (torch.randint(high, (80,), generator=rng).tolist() for high in (60, 3, 700))
    since = pandas.Timestamp("2020-01-01") + pandas.to_timedelta(days, unit="D")
    return pandas.DataFrame(
        {
            "age": [None if age < 4 else age for age in ages],
            "city": [CITIES[city] for city in cities],
            "since": since,
            "price, €": [f"{10 * age + 5} €" for age in ages],
            "stays": ["yes" if age > 30 else "no" for age in ages],
        }
    )


@pytest.fixture(scope="module")
def table() -> data.DataSet:
    return data.from_frame(rows_of_people(), target="stays")


@pytest.fixture(scope="module")
def posterior(table: data.DataSet) -> caveat.Posterior:
    torch.manual_seed(0)
    task = caveat.Task(nn.Linear(table.train.tensors[0].shape[1], 2), table.train, caveat.Categorical())
    return caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=5)), progress=False)


@pytest.fixture(scope="module")
def port(table: data.DataSet, posterior: caveat.Posterior) -> Iterator[int]:
    service = Service.of(posterior, table=table.preprocessing, class_names=table.class_names, most_rows=4)
    yield from running(app_of(service))


def test_cells_are_read_as_those_of_a_file(port: int, posterior: caveat.Posterior, table: data.DataSet) -> None:
    rows = [ROW, ROW | {"age": None, "city": "Oslo", "since": "2020-11-30T00:00"}]
    status, content = ask(port, "/predict", {"inputs": rows})
    expected = posterior.predict(data.prepare_table(pandas.DataFrame(rows), table.preprocessing)).probs
    assert status == 200
    assert torch.allclose(torch.tensor([row["probs"] for row in content["rows"]]), expected, atol=1e-6)
    assert content["rows"][0]["class"] in ("no", "yes")
    assert [note for note in content["notes"] if "column age: 1 blank cell, read as" in note]
    assert ask(port, "/predict", {"inputs": [[*ROW.values()]]}) == ask(port, "/predict", {"inputs": [ROW]})
    assert "notes" not in ask(port, "/predict", {"inputs": [ROW | {"stays": "yes"}]})[1]  # more columns are no fault


def test_a_category_that_the_fit_did_not_have_is_said(port: int) -> None:
    status, content = ask(port, "/predict", {"inputs": [ROW | {"city": "Rome"}]})
    assert (status, "'Rome' in 1 row" in content["notes"][0]) == (200, True)


REFUSED: dict[str, tuple[Any, str]] = {
    "a column is missing": ([{"age": 31, "city": "Bonn"}], "row 0 lacks the columns since, price, €; it has age, city"),
    "cells are missing": ([[31, "Bonn"]], "row 0: 2 cells for 4 columns"),
    "no number": ([ROW, ROW | {"age": "old"}], "row 1, column 'age': 'old' is not a number"),
    "no date": ([ROW | {"since": "yesterday"}], "row 0, column 'since': 'yesterday' is not a date"),
    "infinite": ([ROW | {"age": float("inf")}], "missing or infinite value"),
    "another unit": ([ROW | {"price, €": "12 $"}], "'12 $' is in $, the column is in €"),
    "a list as a cell": ([ROW | {"age": [31]}], "column 'age': a list or an object is no cell"),
    "no rows": ("Bonn", "not rows of a table: send a list of rows, each an object with the columns age, city, since"),
    "too many": ([ROW] * 5, "5 rows were sent, from 1 to 4"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_cells_that_cannot_be_read_are_refused_with_their_place(port: int, name: str) -> None:
    rows, reason = REFUSED[name]
    status, content = ask(port, "/predict", {"inputs": rows})
    assert status == 422
    assert reason in content["error"], content


def test_the_card_says_what_columns_take_and_has_a_row_that_is_taken(port: int) -> None:
    card = ask(port, "/card")[1]
    assert card["columns"] == {
        "age": "a number, or nothing",
        "city": "text: Bonn, Kyiv, Oslo",
        "since": "a date, year-month-day, or nothing",
        "price, €": "a number in €, or nothing",
    }
    assert card["example"].keys() == ROW.keys()
    status, content = ask(port, "/predict", {"inputs": [card["example"]]})
    assert (status, "notes" in content) == (200, False)


def test_preprocessing_without_columns_is_of_no_table(posterior: caveat.Posterior) -> None:
    with pytest.raises(ValueError, match="table= without columns is not of a table"):
        Service.of(posterior, table={"mean": [0.0], "std": [1.0]})


def test_a_calibrated_posterior_answers_with_its_sets(posterior: caveat.Posterior, table: data.DataSet) -> None:
    x, y = (torch.cat(pair) for pair in zip(table.train.tensors, table.test.tensors, strict=True))
    calibrated = posterior.calibrate(torch.utils.data.TensorDataset(x, y), randomised=False)
    for names, words in (((), [0, 1]), (("no", "yes"), ["no", "yes"])):
        for port in running(app_of(Service.of(calibrated, class_names=names))):
            rows = ask(port, "/predict", {"inputs": x[:8].tolist()})[1]["rows"]
            expected = calibrated.predict(x[:8]).label_set(0.9)  # type: ignore[attr-defined]
            sets = [[word for word, inside in zip(words, row, strict=True) if inside] for row in expected.tolist()]
            assert [row["set_90"] for row in rows] == sets
            assert ask(port, "/card")[1]["calibrated"]


def test_sets_of_several_labels_are_lists_of_no_and_yes() -> None:
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    task = caveat.Task(nn.Linear(4, 3), (x, (x[:, :3] > 0).float()), caveat.Bernoulli())
    plain = caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=2)), progress=False)
    calibrated = plain.calibrate((x, (x[:, :3] > 0).float()), randomised=False)
    for port in running(app_of(Service.of(calibrated))):
        row = ask(port, "/predict", {"inputs": x[:1].tolist()})[1]["rows"][0]
    expected = calibrated.predict(x[:1]).label_set(0.9)[0]  # type: ignore[attr-defined]
    assert row["set_90"] == [[label for label in (0, 1) if one[label]] for one in expected.tolist()]


def test_a_calibrated_regression_answers_with_its_intervals() -> None:
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    task = caveat.Task(nn.Linear(4, 1), (x, x[:, :1]), caveat.Gaussian())
    plain = caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=2)), progress=False)
    calibrated = plain.calibrate((x, 5 * x[:, :1]))
    for port in running(app_of(Service.of(calibrated))):
        row = ask(port, "/predict", {"inputs": x[:1].tolist()})[1]["rows"][0]
    assert row["upper_90"] == pytest.approx(calibrated.predict(x[:1]).interval(0.9)[1][0].tolist())  # type: ignore[attr-defined]
    assert row["upper_90"][0] > plain.predict(x[:1]).interval(0.9)[1][0, 0]  # type: ignore[attr-defined]
