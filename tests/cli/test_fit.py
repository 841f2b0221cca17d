"""`caveat fit`, `predict` and `evaluate`: from a fit to a page, and what they are refused for."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from caveat.cli import main
from caveat.methods import discover
from caveat.recipe import read_posterior
from tests.cli.command import QUICK, run


def test_from_fit_to_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    point = tmp_path / "posteriors" / "point"
    code, out, _ = run(
        capsys, "fit", "map", "--out", point, "--training.epochs", "15", "--quiet", "--json", "--seed", "3"
    )
    assert code == 0
    assert json.loads(out)["info"]["seed"] == 3
    swag = tmp_path / "posteriors" / "swag"
    assert run(capsys, "fit", "swag", "--out", swag, "--start", point, *QUICK, "--rank", "2")[0] == 0
    assert json.loads((swag / "posterior.json").read_text())["method"]["fields"]["rank"] == 2

    sampled = tmp_path / "posteriors" / "sampled"
    knobs = ["--samples", "1", "--precision", "1", "--solver", "conjugate-gradients:rank=4,tolerance=.1"]
    assert run(capsys, "fit", "sampled_laplace", "--out", sampled, "--start", point, "--quiet", *knobs)[0] == 0
    solver = json.loads((sampled / "posterior.json").read_text())["method"]["fields"]["solver"]
    assert solver["type"] == "ConjugateGradients"
    assert (solver["fields"]["rank"], solver["fields"]["tolerance"]) == (4, 0.1)
    for given, told in (("newton", "newton is none of auto"), ("exact:rank=4", "exact has no knob")):
        code, _, err = run(capsys, "fit", "sampled_laplace", "--out", tmp_path / "no", "--solver", given)
        assert (code, told in err) == (2, True)

    predictions = tmp_path / "predictions.npz"
    code, out, _ = run(capsys, "predict", "--posterior", swag, "--out", predictions, "--draws", "4", "--quiet")
    assert code == 0
    with np.load(predictions) as arrays:
        assert arrays["probs"].shape == (359, 10)
        assert {"entropy", "epistemic", "aleatoric"} <= set(arrays.files)
    inputs = tmp_path / "inputs.npz"
    np.savez(inputs, x=np.zeros((5, 1, 8, 8), np.float32))
    again = ["predict", "--posterior", swag, "--data", inputs, "--json", "--out"]
    code, _, err = run(capsys, *again, predictions)
    assert (code, "exists" in err) == (1, True)
    code, out, _ = run(capsys, *again, tmp_path / "again.npz")
    assert json.loads(out)["rows"] == 5

    results = tmp_path / "results"
    arguments = ["--posteriors", point, swag, "--rotate", 30, 60, "--ood", "permuted", "--out", results, "--quiet"]
    code, out, _ = run(capsys, "evaluate", *arguments)
    assert code == 0
    assert "swag" in out
    assert "Accuracy" in out
    assert (results / "results.csv").exists()
    metrics = json.loads((results / "swag" / "metrics.json").read_text())
    assert [d["name"] for d in metrics["data"]] == ["clean", "rotated 30", "rotated 60", "permuted"]
    again = ["--posteriors", point, "--shift", "contrast", "translation", "--out", tmp_path / "shifted", "--quiet"]
    assert run(capsys, "evaluate", *again)[0] == 0
    metrics = json.loads((tmp_path / "shifted" / "point" / "metrics.json").read_text())
    assert [d["name"] for d in metrics["data"]][::5] == ["clean", "contrast 5", "translation 0.25"]
    accuracy = [d["metrics"]["accuracy"]["mean"] for d in metrics["data"]]
    assert accuracy[10] < accuracy[6] - 0.1, "digits moved by a quarter of their side are not read"
    code, _, err = run(capsys, "evaluate", "--posteriors", point, "--shift", "contrasts", "--out", tmp_path / "none")
    assert (code, "did you mean 'contrast'?" in err) == (1, True)
    code, out, _ = run(capsys, "report", "--results", results, "--title", "Mine")
    assert code == 0
    assert "<title>Mine</title>" in (results / "report.html").read_text()


def test_a_method_that_needs_a_trained_network_trains_a_map_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, "fit", "swag", "--out", tmp_path / "p", "--data", "breast_cancer", *QUICK)
    assert code == 0, err


@pytest.mark.parametrize("likelihood", ["gaussian", "heteroscedastic"])
def test_regression_by_name(likelihood: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "p"
    assert run(capsys, "fit", "map", "--out", folder, "--data", "diabetes", "--likelihood", likelihood, *QUICK)[0] == 0
    code, out, _ = run(capsys, "evaluate", "--posteriors", folder, "--out", tmp_path / "r", "--quiet", "--json")
    assert code == 0
    assert json.loads(out)["p"]["clean"]["rmse"] < 120, "scores are in the targets' own units"


def test_a_model_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    )
    reference = f"{tmp_path / 'mine.py'}:net"
    assert run(capsys, "fit", "map", "--out", tmp_path / "p", "--model", reference, *QUICK)[0] == 0
    assert run(capsys, "predict", "--posterior", tmp_path / "p", "--out", tmp_path / "o.npz", "--quiet")[0] == 0
    code, _, err = run(
        capsys, "fit", "map", "--out", tmp_path / "q", "--model", f"{tmp_path / 'mine.py'}:nothing", *QUICK
    )
    assert (code, "no function nothing" in err) == (1, True)


SMALL = {
    "training.epochs": 3,
    "rate": 0.1,
    "members": 2,
    "chains": 1,
    "length": 4,
    "warmup": 20,
    "burn_in": 2,
    "samples": 2,
}


@pytest.fixture(scope="module")
def few_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of 48 training rows."""
    x = np.random.default_rng(0).standard_normal((60, 3)).astype(np.float32)
    file = tmp_path_factory.mktemp("data") / "few.npz"
    np.savez(
        file, x_train=x[:48], y_train=(x[:48, 0] > 0).astype(int), x_test=x[48:], y_test=(x[48:, 0] > 0).astype(int)
    )
    return file


@pytest.mark.parametrize("name", discover())
def test_every_method_fits_without_a_start(
    name: str, few_rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import dataclasses

    knobs = {field.name for field in dataclasses.fields(discover()[name])}
    knobs |= {"training.epochs"} if "training" in knobs else set()
    small = [text for knob, value in SMALL.items() if knob in knobs for text in (f"--{knob.replace('_', '-')}", value)]
    folder = tmp_path / "p"
    code, _, err = run(capsys, "fit", name, "--data", few_rows, "--out", folder, "--quiet", *small)
    assert code == 0, err
    assert (folder / "posterior.json").exists()


def test_an_existing_posterior_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "fit", "map", "--out", tmp_path / "p", *QUICK)[0] == 0
    before = (tmp_path / "p" / "posterior.json").read_bytes()
    code, _, err = run(capsys, "fit", "map", "--out", tmp_path / "p", *QUICK)
    assert (code, "p exists: choose another --out, or delete it" in err) == (1, True)
    assert (tmp_path / "p" / "posterior.json").read_bytes() == before


@pytest.mark.parametrize("damage", ["truncated", "edited", "missing", "not a posterior"])
def test_a_damaged_posterior_is_refused(damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "p"
    assert run(capsys, "fit", "map", "--out", folder, *QUICK)[0] == 0
    file = folder / "state.safetensors"
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    elif damage == "edited":
        content = json.loads((folder / "posterior.json").read_text())
        content["method"]["fields"]["temperature"] = True
        (folder / "posterior.json").write_text(json.dumps(content))
    elif damage == "missing":
        file.unlink()
    else:
        folder = tmp_path
    code, _, err = run(capsys, "predict", "--posterior", folder, "--out", tmp_path / "o.npz")
    assert code == 1
    assert err.startswith("error: ")
    assert not (tmp_path / "o.npz").exists()


def test_a_file_of_ones_own_is_found_and_prepared_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    x = 300 + 50 * rng.standard_normal((120, 2))
    y = 1000 + 0.4 * (x[:, 0] - 300)
    monkeypatch.chdir(tmp_path)
    np.savez("mine.npz", x_train=x[:100], y_train=y[:100], x_test=x[100:], y_test=y[100:])
    np.savez("raw.npz", x=x[100:])
    assert run(capsys, "fit", "map", "--data", "mine.npz", "--out", "p", "--training.epochs", "40", "--quiet")[0] == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert run(capsys, "predict", "--posterior", "../p", "--out", "own.npz", "--quiet")[0] == 0
    assert run(capsys, "predict", "--posterior", "../p", "--data", "../raw.npz", "--out", "raw.npz", "--quiet")[0] == 0
    with np.load("own.npz") as own, np.load("raw.npz") as raw:
        np.testing.assert_allclose(own["mean"], raw["mean"], rtol=1e-5)
    assert run(capsys, "evaluate", "--posteriors", "../p", "--quiet")[0] == 0
    code, _, err = run(capsys, "predict", "--posterior", "../p", "--data", "digits", "--out", "o.npz")
    assert (code, err.startswith("error: ")) == (1, True)


def test_posteriors_of_one_name_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "evaluate", "--posteriors", tmp_path / "a" / "map", tmp_path / "b" / "map")
    assert (code, "of different names" in err) == (1, True)


def test_a_score_is_a_name_or_a_file_of_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "score.npy", np.arange(3760.0))
    start = tmp_path / "map"
    assert main(["fit", "map", "--out", str(start), "--training.epochs", "5", "--quiet"]) == 0
    options = ["--weights", "50", "--start", str(start), "--quiet"]
    for name, score in (("named", "obd"), ("given", str(tmp_path / "score.npy"))):
        assert main(["fit", "subnetwork_laplace", "--out", str(tmp_path / name), "--score", score, *options]) == 0
    chosen = read_posterior(tmp_path / "given", torch.device("cpu"))[0].state["subnetwork"]
    assert sum(len(index) for index in chosen.values()) == 50
    assert [len(index) for index in chosen.values()][-1] == 10, "the last weights have the highest numbers"
    with pytest.raises(SystemExit):
        main(["fit", "subnetwork_laplace", "--out", str(tmp_path / "wrong"), "--score", "engery", *options])
    assert "engery" in capsys.readouterr().err


def test_an_ensemble_takes_its_method_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "posterior"
    code, _, err = run(capsys, "fit", "ensemble", "--of", "last-layer-laplace", "--members", 2, "--out", out, *QUICK)
    assert code == 0, err
    described = json.loads((out / "posterior.json").read_text())["method"]["fields"]
    assert (described["of"]["type"], described["members"]) == ("LastLayerLaplace", 2)
    code, _, err = run(capsys, "fit", "ensemble", "--of", "swog", "--out", tmp_path / "none", *QUICK)
    assert (code != 0, "swog" in err) == (True, True)
