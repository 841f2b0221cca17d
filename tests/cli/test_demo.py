"""The main job, whole: one table, one page, every method in both; a folder of one's own is not replaced."""

import json
import re
import time
from pathlib import Path

import pytest
import torch

from caveat.cli import main
from caveat.methods import built_in


def readme_scores() -> dict[str, list[float]]:
    """Accuracy and NLL on clean digits of every row of the README's table."""
    text = (Path(__file__).parents[2] / "README.md").read_text()
    rows = re.findall(r"^(\S.*?)\s{2,}([\d.]+) ±[\d.]+\*?\s+([\d.]+) ±", text, re.MULTILINE)
    return {label: [float(accuracy), float(nll)] for label, accuracy, nll in reversed(rows)}  # the first block counts


def test_the_demo_makes_a_table_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "demo"
    clock = time.monotonic()
    assert main(["demo", "--out", str(folder), "--quiet"]) == 0
    assert time.monotonic() - clock < 180
    table = capsys.readouterr().out
    assert "with HMC, a stored run of 4 chains of 400 draws" in table
    page = (folder / "report.html").read_text()
    for name, method in built_in().items():
        label = "MAP" if name == "map" else method.__name__
        assert label in table
        assert label in page
        metrics = json.loads((folder / name / "metrics.json").read_text())
        scores = {entry["name"]: entry["metrics"] for entry in metrics["data"]}
        assert scores["clean"]["accuracy"]["mean"] > 0.93, f"{name} has not learned the digits"
        assert scores["rotated 90"]["accuracy"]["mean"] < 0.5
        assert scores["photographs"]["auroc_entropy"]["mean"] > 0.9
        assert 0.9 < scores["clean"]["agreement"]["mean"] <= 1
        assert 0 < scores["clean"]["total_variation"]["mean"] < 0.1
        assert scores["rotated 90"]["total_variation"]["mean"] > scores["clean"]["total_variation"]["mean"]
        assert metrics["info"]["seconds"] < 20  # under five on two idle cores
        assert readme_scores()[label] == pytest.approx(
            [scores["clean"][m]["mean"] for m in ("accuracy", "nll")], abs=0.01
        )
    assert main(["demo", "--out", str(folder), "--quiet", "--json"]) == 0, "its own folder is replaced"
    assert json.loads(capsys.readouterr().out)["report"] == str(folder / "report.html")


def test_a_folder_that_the_demo_did_not_make_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "report.html").write_text("years of work")  # as `caveat evaluate` and `caveat report` leave one
    assert main(["demo", "--out", str(tmp_path), "--quiet"]) == 1
    assert "the demo did not make it: choose another --out, or delete it" in capsys.readouterr().err
    assert (tmp_path / "report.html").read_text() == "years of work"


def test_the_demo_runs_on_one_thread_and_gives_the_others_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def stopped(*_: object) -> None:
        seen.append(torch.get_num_threads())
        raise KeyboardInterrupt

    monkeypatch.setattr("caveat.cli.digits_demo._posteriors", stopped)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert main(["demo", "--out", str(tmp_path / "demo"), "--quiet"]) == 130
        assert (seen, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)
    assert not list(tmp_path.iterdir())
