"""What methods say of single inputs."""

import re
from pathlib import Path

import numpy as np
import pytest

from caveat.evaluate.comparison import disagreement
from caveat.report.bench_page.shown_inputs import disagreement_gallery
from caveat.report.saved import read_bench

pytest.importorskip("plotly")


def test_the_gallery_shows_what_methods_disagree_about(digits: Path) -> None:
    (group,) = read_bench(digits).groups
    text = disagreement_gallery(group)
    assert re.findall(r"<summary>(.*?) <", text) == ["clean", "rotation 60", "permuted"]
    runs = [group.cells[run.label][0].run for run in group.done]
    every = np.stack([run.by_name["clean"].predictions["probs"] for run in runs]).astype(np.float64)
    with np.load(digits / "inputs" / "digits" / "clean.npz") as inputs:
        shown = inputs["rows"]
    first = shown[np.argmax(disagreement(every[:, shown]))]
    assert int(re.search(r'alt="Row (\d+) of clean', text)[1]) == first
