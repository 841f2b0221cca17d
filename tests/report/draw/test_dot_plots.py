"""One plot for all runs in place of a histogram each, and the few runs that a page begins with."""

import re

import numpy as np
import pytest

from caveat.report.draw import legend, styles, uncertainty_dots
from caveat.report.saved import SavedRun

LABELS = [f"run {number}" for number in range(8)]


@pytest.fixture
def runs(classification) -> list[SavedRun]:
    """Eight runs; the first is a MAP."""
    from dataclasses import replace

    from caveat.report.saved import read

    one = next(run for run in read(classification) if run.method == "map")
    return [replace(one, label=label, method="map" if label == "run 0" else "swag") for label in LABELS]


def test_dots_are_medians_and_quartiles(runs: list[SavedRun]) -> None:
    clean, ood = np.linspace(0, 1, 101), np.linspace(1, 3, 101)
    plot = uncertainty_dots(runs, "photographs", {"run 2": [clean, ood], "run 5": [clean, 2 * ood]}, "Entropy, nats")
    assert plot is not None
    dots = {(trace.y[0], trace.marker.symbol): trace for trace in plot.figure.data if trace.y != (None,)}
    assert dots["run 2", "circle-open"].x == (0.5,)
    assert dots["run 5", "circle"].x == (4.0,)
    assert dots["run 2", "circle"].error_x.array == (0.5,)
    assert dots["run 2", "circle"].meta == styles(runs)["run 2"].index, "it is hidden with its run"
    assert "run 5, photographs: 4.000" in plot.description
    assert uncertainty_dots(runs, "photographs", {}, "Entropy, nats") is None


def test_a_page_of_many_runs_begins_with_five(runs: list[SavedRun]) -> None:
    pressed = re.findall(r'aria-pressed="(true|false)"', legend(runs))
    assert pressed == ["true"] * 5 + ["false"] * 3
    assert ">all 8</button>" in legend(runs)
    assert set(re.findall(r'aria-pressed="(true|false)"', legend(runs[:6]))) == {"true"}, "one more needs no press"
