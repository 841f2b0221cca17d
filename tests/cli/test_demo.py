"""The main job, whole: one table, what it says, one page, every method in all of it; a folder of one's own is kept."""

import csv
import re
import time
from pathlib import Path

import pytest
import torch

from caveat.cli import main
from caveat.demo import NAMES, SEEDS, demo_rows

DOCUMENTED = Path(__file__).parents[2] / "docs" / "demo_results"


def documented_summary() -> list[dict[str, str]]:
    """What README.md and docs/ were made from."""
    with (DOCUMENTED / "summary.csv").open(newline="") as lines:
        return list(csv.DictReader(lines))


def test_the_demo_makes_a_table_what_it_says_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The field's lesson, in the numbers: the point is too sure, posteriors come nearer to HMC, the nearest is HMC."""
    folder = tmp_path / "demo"
    clock = time.process_time()
    assert main(["demo", "--out", str(folder), "--quiet"]) == 0
    printed, page = capsys.readouterr().out, (folder / "report.html").read_text()
    with (folder / "summary.csv").open(newline="") as lines:
        summary = list(csv.DictReader(lines))
    assert {row["seeds"] for row in summary} == {str(SEEDS)}
    for label, name in NAMES.items():
        assert name in printed
        assert label in page
    rows = demo_rows(summary)
    accuracy, nll, rotated, joint, distance, *_ = zip(*rows.values(), strict=True)
    assert min(accuracy) > 0.7
    assert all(shifted > 1.3 * clean for clean, shifted in zip(nll, rotated, strict=True))
    by_label = dict(zip(rows, zip(nll, joint, distance, strict=True), strict=True))
    point, hmc = by_label["map"], by_label["hmc"]
    assert hmc == tuple(map(min, zip(*by_label.values(), strict=True))), "a short HMC run is best at all three"
    for label in ("last_layer_laplace", "subnetwork_laplace", "sampled_laplace", "ssvi"):
        assert by_label[label][0] < point[0], f"{label} is not better than the point on clean rows"
        assert by_label[label][1] < 0.75 * point[1], f"{label} knows nothing of labels together"
        assert by_label[label][2] < point[2], f"{label} is no nearer to HMC than the point"
    assert rows["last_layer_laplace"][5] > rows["map"][5], "the training that it starts from counts"
    said, right = map(int, re.search(r"says (\d+)% of its labels and is right in (\d+)%", printed).groups())
    assert said > right + 4
    assert time.process_time() - clock < 120
    documented = demo_rows(documented_summary())
    for label, values in rows.items():
        assert values[:5] == pytest.approx(documented[label][:5], abs=0.015), (
            f"docs/demo_results is not what {label} gives"
        )
    assert re.search(r"says (\d+)%", (DOCUMENTED / "printed.txt").read_text()).group(1) == str(said)


def test_a_folder_that_the_demo_did_not_make_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "report.html").write_text("years of work")  # as `caveat evaluate` and `caveat report` leave one
    assert main(["demo", "--out", str(tmp_path), "--quiet"]) == 1
    assert "the demo did not make it: choose another --out, or delete it" in capsys.readouterr().err
    assert (tmp_path / "report.html").read_text() == "years of work"


def test_the_demo_runs_on_one_thread_and_gives_the_others_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def stopped(*_: object, **__: object) -> None:
        seen.append(torch.get_num_threads())
        raise KeyboardInterrupt

    monkeypatch.setattr("caveat.demo.grainy_digits.run_bench", stopped)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert main(["demo", "--out", str(tmp_path / "demo"), "--quiet"]) == 130
        assert (seen, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)
    assert not list(tmp_path.iterdir())
