"""Paired intervals over crossed seeds and rows: against their definitions, scipy, and the truth they should cover."""

import math

import numpy as np
import pytest
from scipy import stats

from caveat.evaluate.comparison import crossed_interval, seeds_interval
from caveat.evaluate.comparison.crossed_intervals import student_quantile


@pytest.mark.parametrize("freedom", [1, 2, 3.7, 10, 120, 5000])
def test_the_quantile_is_students(freedom: float) -> None:
    assert student_quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-4)


def test_one_seed_is_the_paired_t_test_over_rows() -> None:
    gains = np.random.default_rng(0).normal(0.3, 1.0, (1, 40))
    found = crossed_interval([gains])
    low, high = stats.ttest_1samp(gains[0], 0.0).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((low, high), rel=1e-4)
    assert found.over == "rows"


def test_a_t_over_seeds() -> None:
    gains = np.array([0.2, 0.5, 0.1])
    low, high = stats.ttest_1samp(gains, 0.0).confidence_interval(0.95)
    found = seeds_interval(gains)
    assert (found.low, found.high) == pytest.approx((low, high), rel=1e-4)
    assert seeds_interval(gains[:1]).low is None, "one seed says nothing of others"
    assert seeds_interval(gains[:1]).verdict == "not distinguishable"


def test_the_variance_is_that_of_the_two_way_layout() -> None:
    """Mean squares written out from the definition."""
    gains = np.random.default_rng(1).normal(size=(3, 7)) + np.array([[0.0], [2.0], [-1.0]])
    s, n = gains.shape
    mean = gains.mean()
    ms_seeds = n * sum((gains[i].mean() - mean) ** 2 for i in range(s)) / (s - 1)
    ms_rows = s * sum((gains[:, j].mean() - mean) ** 2 for j in range(n)) / (n - 1)
    rest = sum((gains[i, j] - gains[i].mean() - gains[:, j].mean() + mean) ** 2 for i in range(s) for j in range(n)) / (
        (s - 1) * (n - 1)
    )
    variance = (ms_seeds + max(ms_rows - rest, 0.0)) / (s * n)
    freedom = variance**2 / ((ms_seeds / (s * n)) ** 2 / (s - 1) + (ms_rows / (s * n)) ** 2 / (n - 1))
    found = crossed_interval([gains])
    assert found.high - found.gain == pytest.approx(stats.t.ppf(0.975, freedom) * math.sqrt(variance), rel=1e-4)


@pytest.mark.parametrize(("seed_spread", "row_spread"), [(0.0, 1.0), (0.3, 1.0), (1.0, 0.3)])
def test_intervals_cover_the_truth(seed_spread: float, row_spread: float) -> None:
    """Whichever of the two makes the spread, 95% intervals miss the true gain about one time in twenty."""
    rng = np.random.default_rng(2)
    covered = only_rows = 0
    for _ in range(400):
        gains = rng.normal(0, seed_spread, (3, 1)) + rng.normal(0, row_spread, (1, 50)) + rng.normal(0, 0.5, (3, 50))
        found = crossed_interval([gains])
        covered += found.low <= 0 <= found.high
        rows = gains.mean(0)
        only_rows += abs(rows.mean()) <= 1.96 * rows.std(ddof=1) / math.sqrt(50)
    assert 0.91 <= covered / 400 <= 0.995
    if seed_spread > 0.2:
        assert only_rows / 400 < 0.9, "rows alone do not know that seeds differ"


def test_two_sets_of_rows_add() -> None:
    """As for an AUROC, whose rows inside and ood are both samples."""
    rng = np.random.default_rng(3)
    inside, ood = rng.normal(size=(1, 30)), rng.normal(size=(1, 20))
    inside, ood = inside - inside.mean() + 0.1, ood - ood.mean() + 0.1
    found = crossed_interval([inside, ood])
    variance = inside.var(ddof=1) / 30 + ood.var(ddof=1) / 20
    assert found.gain == pytest.approx(0.1)
    assert (found.high - found.gain) / math.sqrt(variance) == pytest.approx(2.02, abs=0.05)


def test_verdicts() -> None:
    rows = np.random.default_rng(4).normal(0, 0.1, (3, 100))
    assert crossed_interval([rows + 1]).verdict == "better"
    assert crossed_interval([rows - 1]).verdict == "worse"
    assert crossed_interval([rows]).verdict == "not distinguishable"
    assert crossed_interval([np.zeros((3, 5))]).verdict == "not distinguishable"
    assert crossed_interval([np.array([[0.1, -np.inf]])]).verdict == "worse", "a target without probability"
    assert crossed_interval([np.array([[np.inf, -np.inf]])]).gain is None
