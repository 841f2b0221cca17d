"""Means with standard errors: over seeds, and over the conditions of a shift."""

import numpy as np
import pytest

from caveat.evaluate.comparison import UNKNOWN, MeanAndError, curve_over_seeds, over_conditions, over_seeds


def test_the_error_over_seeds_is_that_of_a_mean():
    assert over_seeds([1.0, 2.0, 6.0]).mean == pytest.approx(3.0)
    assert over_seeds([1.0, 2.0, 6.0]).stderr == pytest.approx(np.sqrt(7 / 3))
    assert over_seeds([0.1, 0.1, 0.1]).stderr == 0, "equal values have no spread, not one of rounding"


def test_little_is_known_of_few_seeds():
    assert over_seeds([1.0]) == MeanAndError(1.0, None)
    assert over_seeds([1.0, None]) == over_seeds([]) == UNKNOWN


def test_the_error_over_conditions_is_an_upper_bound():
    assert over_conditions([MeanAndError(1.0, 0.1), MeanAndError(3.0, 0.3)]) == MeanAndError(2.0, 0.2)
    assert over_conditions([MeanAndError(1.0, 0.1), MeanAndError(3.0, None)]) == MeanAndError(2.0, None)
    assert over_conditions([MeanAndError(1.0, 0.1), UNKNOWN]) == over_conditions([]) == UNKNOWN


def test_curves_are_averaged_point_by_point():
    curves = np.random.default_rng(0).normal(size=(4, 7))
    mean, error = curve_over_seeds(curves)
    assert mean == pytest.approx([over_seeds(point).mean for point in curves.T])
    assert error == pytest.approx([over_seeds(point).stderr for point in curves.T])
    assert curve_over_seeds(curves[:1])[1] is None
