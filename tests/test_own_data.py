"""Data of one's own on the command line: new data are matched by name, every row is predicted and can be traced."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from caveat.cli import main
from caveat.recipe import read_posterior

TRAINED = ["--training.epochs", "60", "--training.learning-rate", "0.01", "--quiet"]
LEVELS = {"circle": 40, "square": 120, "triangle": 200}


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    code = main([str(a) for a in arguments])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def images(folder: Path, classes: tuple[str, ...], each: int = 20, plain: bool = False) -> Path:
    """Grey images whose brightness tells the class."""
    rng = np.random.default_rng(len(classes))
    for name in classes:
        where = folder if plain else folder / name
        where.mkdir(parents=True, exist_ok=True)
        for index in range(each):
            pixels = rng.normal(LEVELS[name], 10, (6, 6)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(where / f"{name}{index:02}.png")
    return folder


def table(path: Path, rows: list[dict[str, Any]], columns: str) -> Path:
    """A csv with these columns."""
    lines = [",".join(str(row[name]) for name in columns.split(",")) for row in rows]
    path.write_text("\n".join([columns, *lines]) + "\n")
    return path


def lines(path: Path) -> list[dict[str, str]]:
    """The rows of a csv by the names of its columns."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def clusters(each: int = 20, names: tuple[str, ...] = ("0", "1", "2"), seed: int = 0) -> list[dict[str, Any]]:
    """Three clusters in the plane, far apart, of unequal scale so that swapped columns are noticed."""
    rng = np.random.default_rng(seed)
    centres = [(-3.0, 100.0), (3.0, 100.0), (0.0, 400.0)]
    return [
        {"a": round(a + rng.normal() / 4, 3), "b": round(b + 10 * rng.normal(), 3), "y": name, "id": f"row{i}"}
        for (a, b), name in zip(centres, names, strict=True)
        for i in range(each)
    ]


def accuracy(capsys: pytest.CaptureFixture[str], posterior: Path, data: Path) -> float:
    """The clean accuracy that `caveat evaluate` prints."""
    out = posterior.parent / f"results-{data.stem}"
    code, printed, err = run(
        capsys, "evaluate", "--posteriors", posterior, "--data", data, "--out", out, "--quiet", "--json"
    )
    assert code == 0, err
    return float(json.loads(printed)[posterior.name]["clean"]["accuracy"])


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A posterior of three classes of images."""
    folder = tmp_path_factory.mktemp("shapes")
    data = images(folder / "shapes", ("circle", "square", "triangle"))
    assert main(["fit", "map", "--data", str(data), "--out", str(folder / "map"), *TRAINED]) == 0
    return folder / "map"


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A posterior of three classes of csv rows."""
    folder = tmp_path_factory.mktemp("plane")
    data = table(folder / "ok.csv", clusters(), "a,b,y")
    assert main(["fit", "map", "--data", str(data), "--out", str(folder / "map"), *TRAINED]) == 0
    return folder / "map"


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A posterior of a regression."""
    folder = tmp_path_factory.mktemp("line")
    rows = [{"a": i / 10, "b": -(i % 7), "y": 3 * i / 10 + 0.25} for i in range(60)]
    data = table(folder / "line.csv", rows, "a,b,y")
    assert main(["fit", "map", "--data", str(data), "--out", str(folder / "map"), *TRAINED]) == 0
    return folder / "map"


def without_columns(posterior: Path, target: Path) -> Path:
    """The posterior as it was stored before columns were."""
    from caveat.storage import write_json

    content = json.loads((posterior / "posterior.json").read_text())
    del content["checksum"]
    for key in ("columns", "target"):
        content["note"]["recipe"]["preprocessing"].pop(key, None)
    target.mkdir()
    (target / "state.safetensors").write_bytes((posterior / "state.safetensors").read_bytes())
    write_json(target / "posterior.json", content)
    return target


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


def test_every_image_of_a_folder_is_predicted_and_named(
    shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["predict", "--posterior", shapes, "--quiet", "--out"]
    assert run(capsys, *command, tmp_path / "own.npz")[0] == 0
    with np.load(tmp_path / "own.npz", allow_pickle=False) as arrays:
        assert arrays["probs"].shape == (60, 3), "every row, not a fifth"
        assert arrays["class_names"].tolist() == ["circle", "square", "triangle"]
        assert arrays["files"][21] == "square/square01.png"
        guessed = arrays["class_names"][arrays["probs"].argmax(1)]
        assert np.mean([file.startswith(name) for file, name in zip(arrays["files"], guessed, strict=True)]) > 0.9
    plain = images(tmp_path / "plain", ("triangle", "circle"), each=3, plain=True)
    (plain / "._circle00.png").write_bytes(b"what a file system leaves behind")
    assert run(capsys, *command, tmp_path / "plain.csv", "--data", plain)[0] == 0
    rows = lines(tmp_path / "plain.csv")
    assert [row["file"] for row in rows] == [f"{n}{i:02}.png" for n in ("circle", "triangle") for i in range(3)]
    assert [row["predicted"] for row in rows] == ["circle"] * 3 + ["triangle"] * 3
    parts = ["prob_circle", "prob_square", "prob_triangle", "entropy", "aleatoric", "epistemic"]
    assert list(rows[0]) == ["file", "predicted", "probability", *parts]
    assert float(rows[0]["probability"]) == float(rows[0]["prob_circle"])
    images(tmp_path / "parts" / "train", ("circle",))
    images(tmp_path / "parts" / "test", ("square",), each=2)
    assert run(capsys, *command, tmp_path / "parts.npz", "--data", tmp_path / "parts")[0] == 0
    with np.load(tmp_path / "parts.npz") as arrays:
        assert arrays["files"].tolist() == ["test/square/square00.png", "test/square/square01.png"]
    (tmp_path / "nothing").mkdir()
    code, _, err = run(capsys, *command, tmp_path / "x.npz", "--data", tmp_path / "nothing")
    assert (code, "nothing holds no images" in err) == (1, True)


def test_colour_and_size_are_checked(shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "big").mkdir()
    Image.fromarray(np.zeros((9, 9), np.uint8)).save(tmp_path / "big" / "a.png")
    code, _, err = run(
        capsys, "predict", "--posterior", shapes, "--data", tmp_path / "big", "--out", tmp_path / "o.npz"
    )
    assert (code, "a row has shape [1, 9, 9], the posterior's data have [1, 6, 6]" in err) == (1, True)
    code, _, err = run(capsys, "evaluate", "--posteriors", shapes, "--data", "breast_cancer", "--out", tmp_path / "r")
    assert (code, "breast_cancer: a row has shape [30], the posterior's data have [1, 6, 6]" in err) == (1, True)


def test_every_csv_row_is_predicted_with_or_without_a_target(
    plane: Path, line: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {}
    for columns in ("a,b,y", "b,id,a"):
        data, out = tmp_path / "in.csv", tmp_path / f"{columns}.npz"
        table(data, clusters(seed=1), columns)
        code, _, err = run(capsys, "predict", "--posterior", plane, "--data", data, "--out", out, "--quiet")
        assert code == 0, err
        with np.load(out, allow_pickle=False) as arrays:
            found[columns] = arrays["probs"]
            assert arrays["rows"].tolist() == list(range(60))
            assert "files" not in arrays.files
    np.testing.assert_array_equal(found["a,b,y"], found["b,id,a"])
    assert found["a,b,y"].argmax(1).tolist() == [int(row["y"]) for row in clusters()]

    inputs = table(tmp_path / "inputs.csv", [{"a": i, "b": 0} for i in range(4)], "a,b")
    out = tmp_path / "out.csv"
    code, printed, err = run(capsys, "predict", "--posterior", line, "--data", inputs, "--out", out, "--quiet")
    assert code == 0, err
    assert "4 rows" in printed
    rows = lines(out)
    columns = ["row", "mean", "standard_deviation", "aleatoric", "epistemic", "lower_90", "upper_90"]
    assert list(rows[0]) == columns
    assert [row["row"] for row in rows] == ["0", "1", "2", "3"]
    variance = float(rows[1]["aleatoric"]) + float(rows[1]["epistemic"])
    assert float(rows[1]["standard_deviation"]) == pytest.approx(variance**0.5, rel=1e-3)
    code, _, err = run(capsys, "predict", "--posterior", line, "--data", inputs, "--out", out)
    assert (code, "exists" in err) == (1, True)
    bad = table(tmp_path / "bad.csv", [{"a": 1, "b": "nan"}], "a,b")
    code, _, err = run(capsys, "predict", "--posterior", line, "--data", bad, "--out", tmp_path / "o.csv")
    assert (code, "bad.csv" in err, (tmp_path / "o.csv").exists()) == (1, True, False)


def test_npz_inputs(plane: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = np.array([[row["a"], row["b"]] for row in clusters()])
    command = ["predict", "--posterior", plane, "--quiet", "--data", tmp_path / "in.npz", "--out"]
    np.savez(tmp_path / "in.npz", x=x)
    assert run(capsys, *command, tmp_path / "x.npz")[0] == 0
    np.savez(tmp_path / "in.npz", x_train=x, y_train=x[:, 0], x_test=x[:7], y_test=x[:7, 0])
    assert run(capsys, *command, tmp_path / "test.npz")[0] == 0
    with np.load(tmp_path / "x.npz") as every, np.load(tmp_path / "test.npz") as test:
        np.testing.assert_allclose(every["probs"][:7], test["probs"], atol=1e-6)
        assert (len(every["probs"]), len(test["probs"])) == (60, 7)
    np.savez(tmp_path / "in.npz", inputs=x)
    code, _, err = run(capsys, *command, tmp_path / "no.npz")
    assert (code, "in.npz has neither x nor x_test; it holds inputs" in err) == (1, True)
    (tmp_path / "in.npz").write_bytes(b"PK broken")
    code, _, err = run(capsys, *command, tmp_path / "no.npz")
    assert (code, err.startswith("error: ")) == (1, True)


NET = "from torch import nn\ndef net():\n    return nn.Sequential(nn.Linear(2, 3, bias={bias}))\n"


def test_a_model_of_ones_own_is_found_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("here", "there", "beside"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("net.py").write_text(NET.format(bias=True))
    table(Path("ok.csv"), clusters(), "a,b,y")
    quick = ["--training.epochs", "2", "--quiet"]
    assert run(capsys, "fit", "map", "--data", "ok.csv", "--model", "net.py:net", "--out", "p", *quick)[0] == 0
    Path("net.py").rename(tmp_path / "beside" / "other.py")
    again = ["--data", "ok.csv", "--model", "../beside/other.py:net", "--start", "p", "--out", "again", *quick]
    assert run(capsys, "fit", "map", *again)[0] == 0, "a start is of the model that is fitted"

    monkeypatch.chdir(tmp_path / "there")
    posterior = ["--posterior", "../here/p"]
    code, _, err = run(capsys, "predict", *posterior, "--out", "a.npz")
    assert code == 1
    stored = tmp_path / "here" / "net.py"
    assert f"{stored} is not there, nor is net.py in this folder: give --model FILE.py:net" in err
    model = ["--model", "../beside/other.py:net"]
    assert run(capsys, "predict", *posterior, *model, "--out", "a.npz", "--quiet")[0] == 0
    evaluate = ["evaluate", "--posteriors", "../here/p", "--quiet"]
    assert run(capsys, *evaluate, *model)[0] == 0
    code, _, err = run(capsys, "diagnose", *posterior, *model)
    assert (code, "runs no chains" in err) == (1, True)
    code, _, err = run(capsys, "predict", *posterior, "--model", "none.py:net", "--out", "b.npz")
    assert (code, "none.py is not a Python file" in err) == (1, True)
    Path("net.py").write_text(NET.format(bias=True))
    assert run(capsys, "predict", *posterior, "--out", "b.npz", "--quiet")[0] == 0
    with np.load("a.npz") as first, np.load("b.npz") as second:
        np.testing.assert_array_equal(first["probs"], second["probs"])
    Path("net.py").write_text(NET.format(bias=False))
    code, _, err = run(capsys, *evaluate, "--out", "again")
    assert (code, err.startswith("error: ")) == (1, True)


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
    assert (code, "target='y' is to be a column of a csv file, which 'digits' is not" in err) == (1, True)
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


def test_pixels_of_other_units(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The digits' own pixels run from 0 to 16, those of image files from 0 to 255."""
    from sklearn.datasets import load_digits

    assert run(capsys, "fit", "map", "--data", "digits", "--out", tmp_path / "p", *TRAINED)[0] == 0
    digits = load_digits()
    for index, (pixels, label) in enumerate(zip(digits.images[:200], digits.target, strict=False)):
        where = tmp_path / "pngs" / str(label)
        where.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels / 16 * 255).round().astype(np.uint8)).save(where / f"{index}.png")
    x, y = digits.images[:100, None], digits.target[:100]
    parts = {"x_train": x, "y_train": y, "x_test": x, "y_test": y}
    np.savez(tmp_path / "raw.npz", **parts)
    np.savez(tmp_path / "unit.npz", **(parts | {"x_train": x / 16, "x_test": x / 16}))
    assert accuracy(capsys, tmp_path / "p", tmp_path / "pngs") > 0.95
    assert accuracy(capsys, tmp_path / "p", tmp_path / "raw.npz") > 0.95
    out = tmp_path / "r"
    code, _, err = run(
        capsys, "evaluate", "--posteriors", tmp_path / "p", "--data", tmp_path / "unit.npz", "--out", out
    )
    assert (code, "pixels go to 1, those of the posterior's data from 0 to 16" in err) == (1, True)


def test_an_outlier_leaves_other_rows_as_they_are(
    line: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"a": i / 10, "b": -(i % 7), "y": 3 * i / 10 + 0.25} for i in range(60)]
    clean = table(tmp_path / "clean.csv", rows, "a,b,y")
    scores = []
    for broken in range(60):  # one of the rows that are not scored, most likely
        rows[broken]["b"] = 1e9
        data = table(tmp_path / "broken.csv", rows, "a,b,y")
        out = tmp_path / f"r{broken}"
        command = ["evaluate", "--posteriors", line, "--out", out, "--quiet", "--json", "--data"]
        scores = [
            json.loads(run(capsys, *command[:4], f"{out}-{source.stem}", *command[5:], source)[1])["map"]["clean"]
            for source in (clean, data)
        ]
        if scores[1]["rmse"] < 1e6:
            break
        rows[broken]["b"] = -(broken % 7)
    assert scores[1]["rmse"] == pytest.approx(scores[0]["rmse"], rel=1e-4)


def test_a_name_is_a_name_whatever_folder_there_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").mkdir()
    assert run(capsys, "fit", "map", "--data", "digits", "--out", "p", "--training.epochs", "1", "--quiet")[0] == 0
    assert run(capsys, "predict", "--posterior", "p", "--out", "o.npz", "--quiet")[0] == 0
