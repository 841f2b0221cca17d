"""`caveat calibrate`: part of the test rows calibrates, and `evaluate` scores the others."""

import json
from pathlib import Path

import pytest
import torch

from caveat.recipe import read_posterior
from tests.cli.command import run


def test_test_rows_calibrate_and_the_others_are_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    point, out = tmp_path / "point", tmp_path / "calibrated"
    assert run(capsys, "fit", "map", "--out", point, "--training.epochs", "8", "--quiet")[0] == 0
    arguments = ["calibrate", "--posterior", point, "--share", "0.6", "--score", "probability"]
    code, printed, _ = run(capsys, *arguments, "--out", out, "--json")
    assert (code, json.loads(printed)["rows"]) == (0, round(0.6 * 359))
    posterior, _ = read_posterior(out, torch.device("cpu"))
    assert posterior.calibration is not None
    assert posterior.calibration.rows == round(0.6 * 359)

    results = tmp_path / "results"
    arguments_of_evaluate = ["evaluate", "--posteriors", point, out, "--ood", "permuted", "--features"]
    code, printed, _ = run(capsys, *arguments_of_evaluate, "--out", results, "--quiet")
    assert (code, "AUROC, nearest rows" in printed) == (0, True)
    scored = [json.loads((results / name / "metrics.json").read_text())["data"][0] for name in ("point", "calibrated")]
    assert [entry["rows"] for entry in scored] == [359 - round(0.6 * 359)] * 2
    assert scored[1]["metrics"]["set_coverage_90"]["mean"] == pytest.approx(0.9, abs=0.08)
    assert "set_coverage_90" not in scored[0]["metrics"]

    table = tmp_path / "predictions.csv"
    assert run(capsys, "predict", "--posterior", out, "--out", table, "--quiet")[0] == 0
    header, first = table.read_text().splitlines()[:2]
    assert header.endswith("set_90")
    assert set(first.rpartition(",")[2].split()) <= {str(digit) for digit in range(10)}

    code, _, err = run(capsys, *arguments, "--out", out)
    assert (code, "exists" in err) == (1, True)
    code, _, err = run(capsys, *arguments[:3], "--out", tmp_path / "all", "--share", "1")
    assert code == 0
    code, _, err = run(capsys, "evaluate", "--posteriors", tmp_path / "all", "--out", tmp_path / "none")
    assert (code, "none is left to score" in err) == (1, True)
