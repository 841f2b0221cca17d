"""The one place that knows which way a metric is better."""

import pytest

from caveat.evaluate.metrics import METRICS


def test_losses_are_smaller_where_a_metric_is_better():
    assert METRICS["accuracy"].loss(0.9) < METRICS["accuracy"].loss(0.8)
    assert METRICS["nll"].loss(0.1) < METRICS["nll"].loss(0.2)
    assert METRICS["coverage_90"].loss(0.88) < METRICS["coverage_90"].loss(0.95)


def test_the_sign_is_the_direction_that_is_better():
    assert (METRICS["auroc_entropy"].sign, METRICS["brier"].sign) == (1, -1)
    with pytest.raises(ValueError, match=r"90% coverage is best at 0\.9"):
        METRICS["coverage_90"].sign  # noqa: B018


def test_words_and_directions_say_the_same():
    for metric in METRICS.values():
        if metric.better in ("higher", "lower") and "1 is best" not in metric.meaning:
            assert f"{metric.better} is better" in metric.meaning


def test_errors_have_the_unit_of_their_metric():
    assert METRICS["seconds"].error_text(0.02) == "20 ms"
    assert METRICS["nll"].error_text(0.02) == "0.020"
