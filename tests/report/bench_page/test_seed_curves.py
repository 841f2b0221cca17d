"""Curves of a bench over all rows and seeds."""

from pathlib import Path

import numpy as np
import pytest
import torch

from caveat.evaluate.metrics import reliability
from caveat.report.bench_page.seed_curves import REJECTED, calibration_plots, rejection_plot
from caveat.report.saved import read_bench

pytest.importorskip("plotly")


def test_reliability_is_of_all_seeds(digits: Path) -> None:
    (group,) = read_bench(digits).groups
    plot = calibration_plots(group)[0]
    clean = [cell.run.clean.predictions for cell in group.seeds("map")]
    probs, targets = (np.concatenate([one[key] for one in clean]) for key in ("probs", "targets"))
    expected = reliability(torch.from_numpy(probs), torch.from_numpy(targets))
    drawn = plot.figure.data[0]
    kept = expected.count / 2 >= 5
    np.testing.assert_allclose(drawn.y, expected.accuracy[kept], rtol=1e-5)
    np.testing.assert_array_equal(drawn.customdata, (expected.count[kept] / 2).int())


def test_rejecting_nothing_is_the_accuracy_and_rejecting_helps(digits: Path) -> None:
    (group,) = read_bench(digits).groups
    curve = rejection_plot(group, "clean data", ["clean"]).figure.data[1]
    assert group.runs[0].clean is not None
    assert curve.y[0] == pytest.approx(group.runs[0].clean.metrics["accuracy"].mean, abs=1e-6)
    assert curve.y[len(REJECTED) // 2] > curve.y[0]
