"""Data of one's own: new data are matched to a posterior by name, and prepared alike."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from caveat.recipe import read_posterior
from tests.cli.command import run
from tests.cli.own_data import TRAINED, accuracy, clusters, images, lines, table, without_columns


def test_folders_are_matched_to_the_posterior_by_name(
    shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two = images(tmp_path / "two", ("square", "triangle"))
    assert accuracy(capsys, shapes, two) > 0.9, "classes and brightness are those that the posterior knows"
    for part in ("train", "test"):
        images(tmp_path / "parts" / part, ("square", "triangle") if part == "train" else ("triangle",))
    assert accuracy(capsys, shapes, tmp_path / "parts") > 0.9, "one class is enough to score"
    metrics = json.loads((shapes.parent / "results-two" / "map" / "metrics.json").read_text())
    assert metrics["class_names"] == ["circle", "square", "triangle"]
    (two / "square").rename(two / "hexagon")
    code, _, err = run(capsys, "evaluate", "--posteriors", shapes, "--data", two, "--out", tmp_path / "r")
    assert (code, (tmp_path / "r").exists()) == (1, False)
    assert "two has the class hexagon, which the posterior does not know: it knows circle, square, triangle" in err


def test_csv_rows_are_matched_to_the_posterior_by_name(
    plane: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert accuracy(capsys, plane, plane.parent / "ok.csv") > 0.9
    rest = table(tmp_path / "rest.csv", [row for row in clusters(seed=1) if row["y"] != "0"], "a,b,y")
    assert accuracy(capsys, plane, rest) > 0.9
    single = table(tmp_path / "single.csv", [row for row in clusters(seed=1) if row["y"] == "2"], "a,b,y")
    assert accuracy(capsys, plane, single) > 0.9
    order = table(tmp_path / "order.csv", clusters(seed=2), "y,id,b,a")
    assert accuracy(capsys, plane, order) > 0.9, "columns are found by name, others are not read"

    command = ["evaluate", "--posteriors", plane, "--out", tmp_path / "r", "--data"]
    shifted = table(tmp_path / "from1.csv", clusters(names=("1", "2", "3")), "a,b,y")
    assert (
        "from1.csv has the class 3, which the posterior does not know: it knows 0, 1, 2"
        in run(capsys, *command, shifted)[2]
    )
    floats = table(tmp_path / "floats.csv", clusters(names=("0.0", "1.0", "2.0")), "a,b,y")
    assert (
        "floats.csv has the classes 0.0, 1.0, 2.0, which the posterior does not know"
        in run(capsys, *command, floats)[2]
    )
    missing = table(tmp_path / "missing.csv", clusters(), "a,id,y")
    code, _, err = run(capsys, *command, missing)
    assert (code, "missing.csv lacks the column b; it has a, id, y" in err) == (1, True)
    targetless = table(tmp_path / "targetless.csv", clusters(), "a,b")
    code, _, err = run(capsys, *command, targetless)
    assert (code, "targetless.csv lacks the column y; it has a, b" in err) == (1, True)
    assert not (tmp_path / "r").exists()


def test_a_posterior_of_numbers_reads_numbers(line: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = table(tmp_path / "whole.csv", [{"a": i / 3, "b": 0, "y": i} for i in range(15)], "a,b,y")
    code, out, err = run(
        capsys, "evaluate", "--posteriors", line, "--data", whole, "--out", tmp_path / "r", "--json", "--quiet"
    )
    assert code == 0, err
    assert json.loads(out)["map"]["clean"]["rmse"] < 2, "few whole numbers are no classes to a regression"
    code, _, err = run(capsys, "evaluate", "--posteriors", line, "--data", "breast_cancer", "--out", tmp_path / "q")
    assert (code, "error: breast_cancer" in err) == (1, True)


def test_a_posterior_stored_before_columns_were_reads_them_in_order(
    plane: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = without_columns(plane, tmp_path / "old")
    fresh = table(tmp_path / "fresh.csv", clusters(seed=1), "a,b,y")
    assert accuracy(capsys, old, fresh) > 0.9
    for columns in ("a,b,y", "a,b"):
        inputs = table(tmp_path / f"{len(columns)}.csv", clusters(seed=1), columns)
        out = tmp_path / f"{len(columns)}.npz"
        code, _, err = run(capsys, "predict", "--posterior", old, "--data", inputs, "--out", out, "--quiet")
        assert code == 0, err
    wide = table(tmp_path / "wide.csv", clusters(), "a,b,y,id")
    code, _, err = run(capsys, "predict", "--posterior", old, "--data", wide, "--out", tmp_path / "o.npz")
    assert (code, "wide.csv has 4 columns, the posterior's data have 2 inputs" in err) == (1, True)


def test_other_data_are_standardised_as_the_posterior_s_were(
    plane: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    far = table(tmp_path / "far.csv", [row for row in clusters(seed=1) if row["y"] != "1"], "a,b,y")
    x = np.array([[row["a"], row["b"]] for row in clusters(seed=1) if row["y"] != "1"])
    np.savez(tmp_path / "far.npz", x=x)  # which is known to be prepared as the posterior's data were
    out, results = tmp_path / "o.npz", tmp_path / "r"
    command = ["predict", "--posterior", plane, "--out", out, "--quiet", "--data", tmp_path / "far.npz"]
    assert run(capsys, *command)[0] == 0
    assert run(capsys, "evaluate", "--posteriors", plane, "--data", far, "--out", results, "--quiet")[0] == 0
    with np.load(out) as every, np.load(results / "map" / "predictions" / "clean.npz") as test:
        distance = np.abs(every["probs"][:, None] - test["probs"]).max(-1)  # [rows, test rows]
        assert len(test["probs"]) == 8
        assert distance.min(0).max() < 1e-5


def test_what_was_read_is_said_on_standard_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quick = ["--training.epochs", "1"]

    def said(path: Path, *more: object) -> str:
        out = tmp_path / f"p-{path.stem}-{len(more)}"
        code, _, err = run(capsys, "fit", "map", "--data", path, "--out", out, *quick, *more)
        assert code == 0, err
        return err

    classes = table(tmp_path / "classes.csv", clusters(), "a,b,y")
    assert "classes.csv: 48 + 12 rows, inputs a, b, target y, 3 classes: 0, 1, 2\n" in said(classes)
    assert "classes.csv" not in said(classes, "--quiet")
    first = table(tmp_path / "first.csv", clusters(), "y,a,b")
    assert "first.csv: 48 + 12 rows, inputs y, a, target b, regression\n" in said(first)
    assert "first.csv: 48 + 12 rows, inputs a, b, target y, 3 classes: 0, 1, 2\n" in said(first, "--target", "y")
    floats = table(tmp_path / "floats.csv", clusters(names=("0.0", "1.0", "2.0")), "a,b,y")
    line = "inputs a, b, target y, regression (3 whole numbers; classes are written as 0, 1, 2)"
    assert f"floats.csv: 48 + 12 rows, {line}\n" in said(floats)
    folder = images(tmp_path / "shapes", ("circle", "square"))
    assert "shapes: 32 + 8 images of shape [1, 6, 6], 2 classes: circle, square\n" in said(folder)
    np.savez(tmp_path / "a.npz", x_train=np.eye(8), y_train=np.arange(8) / 3, x_test=np.eye(8), y_test=np.arange(8) / 3)
    assert "a.npz: 8 + 8 rows of 8 inputs, regression\n" in said(tmp_path / "a.npz")
    code, _, err = run(capsys, "fit", "map", "--out", tmp_path / "digits", *quick)
    assert (code, "digits:" in err) == (0, False)

    shapes = [tmp_path / "p-classes-0", tmp_path / "p-classes-1"]
    code, _, err = run(capsys, "evaluate", "--posteriors", *shapes, "--data", classes, "--out", tmp_path / "r")
    assert (code, err.count("classes.csv: 48 + 12 rows")) == (0, 1)


def test_targets_that_cannot_be_learned_from_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for value in ("1", "yes", "2.5"):
        data = table(tmp_path / "const.csv", [row | {"y": value} for row in clusters()], "a,b,y")
        code, _, err = run(capsys, "fit", "map", "--data", data, "--out", tmp_path / "p")
        assert (code, (tmp_path / "p").exists()) == (1, False)
        assert f"const.csv: the target is {value} in every row, so there is nothing to learn" in err
    code, _, err = run(capsys, "fit", "map", "--data", "digits", "--target", "y", "--out", tmp_path / "p")
    assert (code, "target='y' is to be of a csv or parquet file, which 'digits' is not" in err) == (1, True)
    code, _, err = run(capsys, "fit", "map", "--data", data, "--target", "z", "--out", tmp_path / "p")
    assert (code, "const.csv lacks the column z; it has a, b, y" in err) == (1, True)


def test_the_columns_are_in_the_recipe(plane: Path) -> None:
    _, recipe = read_posterior(plane, torch.device("cpu"))
    assert recipe.preprocessing["columns"] == ["a", "b"]
    assert recipe.preprocessing["target"] == "y"


def test_numbers_as_yes_or_no_have_no_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row | {"y": float(row["y"] == "2")} for row in clusters()]
    data = table(tmp_path / "yes.csv", rows, "a,b,y")
    fitted = ["--data", data, "--out", tmp_path / "p", "--likelihood", "bernoulli"]
    assert run(capsys, "fit", "map", *fitted, *TRAINED)[0] == 0
    out = tmp_path / "o.csv"
    assert run(capsys, "predict", "--posterior", tmp_path / "p", "--out", out, "--quiet")[0] == 0
    assert [line["predicted"] for line in lines(out)] == ["0"] * 40 + ["1"] * 20
    assert accuracy(capsys, tmp_path / "p", data) == 1


def test_classes_of_a_named_set_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from sklearn.datasets import load_breast_cancer

    assert run(capsys, "fit", "map", "--data", "breast_cancer", "--out", tmp_path / "p", *TRAINED)[0] == 0
    bunch = load_breast_cancer()
    y = bunch.target_names[bunch.target]
    np.savez(tmp_path / "mine.npz", x_train=bunch.data, y_train=y, x_test=bunch.data[:50], y_test=y[:50])
    assert accuracy(capsys, tmp_path / "p", tmp_path / "mine.npz") > 0.9


def test_a_name_is_a_name_whatever_folder_there_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").mkdir()
    assert run(capsys, "fit", "map", "--data", "digits", "--out", "p", "--training.epochs", "1", "--quiet")[0] == 0
    assert run(capsys, "predict", "--posterior", "p", "--out", "o.npz", "--quiet")[0] == 0
