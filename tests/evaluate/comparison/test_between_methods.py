"""How far the predictions of methods lie from each other."""

import numpy as np
import pytest

from caveat.evaluate.comparison import disagreement, mean_distance, mean_total_variation


def test_methods_that_say_the_same_do_not_disagree():
    probs = np.array([[[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.5, 0.5]]])  # two methods, two inputs
    np.testing.assert_allclose(disagreement(probs), [0.5, 0.0])


def test_distances_by_hand():
    assert mean_total_variation(np.array([[1.0, 0.0], [0.5, 0.5]]), np.array([[0.0, 1.0], [0.5, 0.5]])) == 0.5
    assert mean_distance(np.array([[1.0, 2.0]]), np.array([[0.0, 4.0]])) == pytest.approx(3.0)
