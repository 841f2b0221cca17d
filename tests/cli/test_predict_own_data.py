"""Predictions of data of one's own: every row is predicted and can be traced."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.cli.command import run
from tests.cli.own_data import TRAINED, accuracy, clusters, images, lines, table


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
    deviations = ["standard_deviation", "aleatoric_deviation", "epistemic_deviation"]
    columns = ["row", "mean", *deviations, "lower_90", "upper_90"]
    assert list(rows[0]) == columns
    assert [row["row"] for row in rows] == ["0", "1", "2", "3"]
    variance = sum(float(rows[1][name]) ** 2 for name in deviations[1:])
    assert float(rows[1]["standard_deviation"]) == pytest.approx(variance**0.5, rel=1e-3)
    code, _, err = run(capsys, "predict", "--posterior", line, "--data", inputs, "--out", out)
    assert (code, "exists" in err) == (1, True)
    bad = table(tmp_path / "bad.csv", [{"a": 1, "b": "inf"}], "a,b")
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
    code, _, err = run(capsys, "predict", *posterior, "--out", "b.npz", "--quiet")
    assert (code, "which you have not run yet as it is now" in err) == (1, True)
    assert run(capsys, "predict", *posterior, "--model", "net.py:net", "--out", "c.npz", "--quiet")[0] == 0
    assert run(capsys, "predict", *posterior, "--out", "b.npz", "--quiet")[0] == 0
    with np.load("a.npz") as first, np.load("b.npz") as second:
        np.testing.assert_array_equal(first["probs"], second["probs"])
    Path("net.py").write_text(NET.format(bias=False))
    code, _, err = run(capsys, *evaluate, "--out", "again")
    assert (code, err.startswith("error: ")) == (1, True)


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
