"""Gains over rows: infinite ones are not compared, and rows that come twice count once."""

import numpy as np
import pytest

from caveat.evaluate.comparison import Gain, gain_in_auroc, gain_over_rows


def test_the_same_rows_twice_are_no_more_evidence():
    gains, rows = np.random.default_rng(0).normal(0.3, 1.0, 50), np.arange(50)
    once, twice = gain_over_rows([gains], [rows]), gain_over_rows([gains, gains], [rows, rows])
    assert (once.mean, once.low, once.high) == pytest.approx((twice.mean, twice.low, twice.high))


def test_what_cannot_be_averaged_is_not_compared():
    assert gain_over_rows([], []) is None
    assert gain_over_rows([np.array([0.1, -np.inf])], [np.arange(2)]) is None
    assert gain_over_rows([np.array([0.1])], [np.arange(1)]).verdict == "not distinguishable", "one row has no spread"


def test_a_difference_that_does_not_show_is_level():
    assert [Gain(0.2, low, high).verdict for low, high in ((0.1, 0.3), (-0.3, -0.1), (-0.1, 0.3))] == [
        "better",
        "worse",
        "not distinguishable",
    ]
    assert Gain(0.2, 0.1, 0.3, level=True).verdict == "level"


def test_equal_uncertainties_gain_nothing_in_auroc():
    inside, ood = np.arange(5.0), np.arange(3.0, 9.0)
    rows = np.arange(5), np.arange(6)
    assert gain_in_auroc((inside, ood), (inside, ood), rows).mean == 0
    assert gain_in_auroc((inside, ood), (inside, -ood), rows).mean > 0.9
