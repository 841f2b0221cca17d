import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics.functional.classification import multiclass_calibration_error

from caveat.evaluate.metrics import (
    central_coverage,
    marginal_calibration_error,
    pit_calibration_error,
    pooled_reliability,
    reliability,
    share_interval,
    top_label_ece,
)

ERRORS = [top_label_ece, marginal_calibration_error]


def predictions(n, classes, seed=0, decimals=None):
    generator = torch.Generator().manual_seed(seed)
    probs = torch.softmax(2 * torch.randn(n, classes, generator=generator, dtype=torch.float64), dim=1)
    if decimals is not None:  # many ties
        probs = (probs * 10**decimals).round().clamp_min(1)
        probs = probs / probs.sum(dim=1, keepdim=True)
    return probs, torch.randint(0, classes, (n,), generator=generator)


def calibrated(n, classes, seed=0):
    """Targets drawn from the probabilities themselves."""
    generator = torch.Generator().manual_seed(seed)
    probs = torch.softmax(torch.randn(n, classes, generator=generator, dtype=torch.float64), dim=1)
    return probs, torch.multinomial(probs, 1, generator=generator)[:, 0]


def marginal_reference(probs, targets, bins):
    """The estimator of Kumar et al. as a loop over classes and bins, boundaries halfway between neighbours."""
    probs, targets = probs.numpy(), targets.numpy()
    per_class = []
    for k in range(probs.shape[1]):
        p, y = probs[:, k], targets == k
        parts = np.array_split(np.sort(p), min(bins, len(p)))
        edges = [(left[-1] + right[0]) / 2 for left, right in itertools.pairwise(parts)]
        index = np.searchsorted(sorted(set(edges)), p)
        total = 0.0
        for b in set(index.tolist()):
            inside = index == b
            n, share = inside.sum(), y[inside].mean()
            if n > 1:
                total += n / len(p) * ((p[inside].mean() - share) ** 2 - share * (1 - share) / (n - 1))
        per_class.append(max(total, 0.0))
    return math.sqrt(sum(per_class) / len(per_class))


@pytest.mark.parametrize("classes", [2, 10])
@pytest.mark.parametrize("bins", [1, 7, 15])
def test_top_label_ece_against_torchmetrics(classes, bins):
    probs, targets = predictions(500, classes)
    expected = multiclass_calibration_error(probs, targets, num_classes=classes, n_bins=bins, norm="l1").item()
    assert top_label_ece(probs, targets, bins) == pytest.approx(expected, abs=1e-6)
    assert top_label_ece(probs.float(), targets, bins) == pytest.approx(expected, abs=1e-5)


def test_top_label_ece_by_hand():
    probs = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.4, 0.6], [0.3, 0.7]], dtype=torch.float64)
    targets = torch.tensor([0, 1, 1, 1])
    # two bins over (0, 1/2] and (1/2, 1]: all in the second, accuracy 3/4, confidence 3/4
    assert top_label_ece(probs, targets, bins=2) == pytest.approx(0.0, abs=1e-12)
    # ten bins: one row each, |1 - .9|, |0 - .8|, |1 - .6|, |1 - .7|
    assert top_label_ece(probs, targets, bins=10) == pytest.approx((0.1 + 0.8 + 0.4 + 0.3) / 4)


def test_reliability_bins_are_closed_on_the_right_and_count_every_row():
    confidence = torch.tensor([0.5, 0.75, 0.76, 1.0], dtype=torch.float64)
    diagram = reliability(torch.stack([confidence, 1 - confidence], dim=1), torch.tensor([0, 0, 1, 0]), bins=4)
    assert diagram.count.tolist() == [0, 1, 1, 2]
    assert diagram.accuracy[1:].tolist() == [1, 1, 0.5]
    assert diagram.confidence[1:].tolist() == pytest.approx([0.5, 0.75, 0.88])
    assert diagram.accuracy[0].isnan()
    assert diagram.confidence[0].isnan()


@pytest.mark.parametrize("decimals", [None, 1])
@pytest.mark.parametrize("n", [5, 16, 17, 200])
@pytest.mark.parametrize("bins", [1, 2, 15])
def test_marginal_calibration_error_against_a_loop(n, bins, decimals):
    probs, targets = predictions(n, 4, decimals=decimals)
    expected = marginal_reference(probs, targets, bins)
    assert marginal_calibration_error(probs, targets, bins) == pytest.approx(expected, abs=1e-12)


def test_marginal_calibration_error_by_hand():
    # one class-0 probability for all 10 rows, 6 rows of class 0: both classes have (.9 - .6)^2 - .24 / 9
    probs = torch.tensor([[0.9, 0.1]], dtype=torch.float64).expand(10, 2)
    targets = torch.tensor([0] * 6 + [1] * 4)
    assert marginal_calibration_error(probs, targets) == pytest.approx(math.sqrt(0.09 - 0.24 / 9))


def test_debiasing_removes_the_error_that_small_bins_make_up():
    """The squared error of calibrated rows is zero on average before it is clipped; the plain estimate is not."""
    values = [marginal_calibration_error(*calibrated(300, 3, seed)) ** 2 for seed in range(60)]
    plain_bias = 15 / 300 * 0.2  # a bin of 20 rows has variance y (1 - y) / 20, about 0.01
    assert np.mean(values) < plain_bias / 4
    assert min(values) == 0  # clipped


def test_both_errors_find_the_same_overconfidence():
    """True probability .7 where .9 is said: both errors are .2."""
    generator = torch.Generator().manual_seed(0)
    targets = (torch.rand(200_000, generator=generator) >= 0.7).long()
    probs = torch.tensor([[0.9, 0.1]], dtype=torch.float64).expand(len(targets), 2)
    for error in ERRORS:
        assert error(probs, targets) == pytest.approx(0.2, abs=0.004)


@given(classes=st.integers(1, 5), n=st.integers(1, 60), bins=st.integers(1, 20), seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_errors_are_bounded_and_do_not_depend_on_the_order_of_rows(classes, n, bins, seed):
    probs, targets = predictions(n, classes, seed, decimals=1 if seed % 2 else None)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    for error in ERRORS:
        value = error(probs, targets, bins)
        assert 0 <= value <= 1
        assert error(probs[order], targets[order], bins) == pytest.approx(value, abs=1e-7)


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("n", [1, 2, 40])
def test_perfect_predictions_have_no_error(error, n):
    _, targets = predictions(n, 3)
    assert error(torch.nn.functional.one_hot(targets, 3).float(), targets) == 0


@pytest.mark.parametrize("error", ERRORS)
def test_a_single_class(error):
    assert error(torch.ones(8, 1), torch.zeros(8, dtype=torch.long)) == 0
    all_alike = torch.tensor([[0.75, 0.25]]).expand(8, 2)
    expected = 0.25  # class 0 always happens, said with .75
    assert error(all_alike, torch.zeros(8, dtype=torch.long)) == pytest.approx(expected)


@pytest.mark.parametrize("error", [*ERRORS, reliability])
@pytest.mark.parametrize(
    ("probs", "message"), [(torch.zeros(0, 3), "at least one row"), (torch.full((2, 3), math.nan), "2 of 2 rows")]
)
def test_bad_input_is_refused(error, probs, message):
    with pytest.raises(ValueError, match=message):
        error(probs, torch.zeros(len(probs), dtype=torch.long))
    with pytest.raises(ValueError, match="bins=0"):
        error(torch.ones(2, 1), torch.zeros(2, dtype=torch.long), bins=0)


def test_pit_calibration_error_by_hand():
    pit = torch.tensor([[0.1], [0.2], [0.3], [0.9]])
    # shares at or below .25, .5 and .75 are 2/4, 3/4 and 3/4
    assert pit_calibration_error(pit, [0.25, 0.5, 0.75]) == pytest.approx((0.25 + 0.25 + 0.0) / 3)


def test_pit_calibration_error_extremes():
    even = ((torch.arange(1000) + 0.5) / 1000)[:, None]
    assert pit_calibration_error(even) == pytest.approx(0, abs=1e-6)
    assert pit_calibration_error(torch.zeros(10, 2)) == pytest.approx(0.5)
    assert pit_calibration_error(torch.ones(1, 1)) == pytest.approx(0.5)
    # a predictive far too wide: every PIT near the middle
    assert pit_calibration_error(torch.full((10, 1), 0.501)) == pytest.approx(
        sum(abs((p >= 11) - p / 20) for p in range(1, 20)) / 19
    )


def test_pit_calibration_error_averages_outputs():
    generator = torch.Generator().manual_seed(0)
    pit = torch.rand(50, 2, generator=generator)
    separate = [pit_calibration_error(pit[:, i : i + 1]) for i in range(2)]
    assert pit_calibration_error(pit) == pytest.approx(sum(separate) / 2)


def test_pit_of_calibrated_rows_is_as_small_as_its_docstring_says():
    generator = torch.Generator().manual_seed(0)
    values = [pit_calibration_error(torch.rand(400, 1, generator=generator)) for _ in range(200)]
    assert np.mean(values) == pytest.approx(0.3 / math.sqrt(400), rel=0.15)


@pytest.mark.parametrize(
    ("pit", "levels", "message"),
    [
        (torch.zeros(0, 1), (0.5,), "at least one row"),
        (torch.zeros(3), (0.5,), r"\[N, D\]"),
        (torch.full((2, 1), math.nan), (0.5,), "without NaN"),
        (torch.full((2, 1), 1.5), (0.5,), r"\[0, 1\]"),
        (torch.zeros(2, 1), (), "levels must be given"),
        (torch.zeros(2, 1), (0.5, 1.0), r"within \(0, 1\)"),
    ],
)
def test_pit_refuses_bad_input(pit, levels, message):
    with pytest.raises(ValueError, match=message):
        pit_calibration_error(pit, levels)


def test_diagrams_of_parts_are_that_of_all_rows():
    probs, targets = predictions(300, 4)
    parts = [reliability(probs[part], targets[part]) for part in (slice(0, 90), slice(90, 300))]
    pooled, whole = pooled_reliability(parts), reliability(probs, targets)
    torch.testing.assert_close(pooled.count, whole.count)
    torch.testing.assert_close(pooled.confidence, whole.confidence, equal_nan=True)
    torch.testing.assert_close(pooled.accuracy, whole.accuracy, equal_nan=True)
    gap = float(probs.max(1).values.double().mean() - (probs.argmax(1) == targets).double().mean())
    assert whole.overconfidence == pytest.approx(gap)


def test_the_interval_of_a_share_has_a_width_at_its_ends():
    share, count = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64), torch.tensor([10.0, 10.0, 10.0])
    low, high = share_interval(share, count)
    assert low[0] == 0
    assert high[2] == 1
    assert (high - low).min() > 0.05
    z = (share[1] - low[1]) / math.sqrt(low[1] * (1 - low[1]) / 10)  # Wilson: one standard error of the end itself
    assert float(z) == pytest.approx(1.0)


def test_central_intervals_cover_what_lies_within():
    pit = torch.tensor([0.5, 0.4, 0.05, 0.95])
    assert central_coverage(pit, torch.tensor([0.1, 0.5, 0.92])).tolist() == pytest.approx([0.25, 0.5, 1.0])
