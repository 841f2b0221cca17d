"""The scores for keeping weights are what integration says they are, at every scale, without a NaN."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from caveat.engine.sparse.removal_criteria import (
    CRITERIA,
    expected_magnitude,
    keep_scores,
    log_expected_exponential,
    log_snr_of_exponential,
    signal_to_noise,
    snr_of_magnitude,
)

NODES, WEIGHTS = np.polynomial.legendre.leggauss(40)
RATIOS = (0.0, 1e-8, 1e-3, 0.1, 0.7, 1.0, 2.5, 6.0, 12.0, 30.0)
STDS = (1e-6, 1e-4, 3e-3, 0.1, 1.0, 10.0)
LAMBDAS = (0.1, 1.0, 5.0)
SCALES = (0.0, *(10.0**p for p in range(-12, 7)))


def normal_rule(a: float, reach: float) -> tuple[np.ndarray, np.ndarray]:
    """|z| and log weights of Gauss-Legendre panels for z ~ N(a, 1), panels that meet at z = 0, where |z| has a kink."""
    edges = np.unique([0.0, *np.arange(a - reach - 14, a + reach + 15)])
    half, middle = np.diff(edges)[:, None] / 2, (edges[1:] + edges[:-1])[:, None] / 2
    z = middle + half * NODES
    log_weights = np.log(half * WEIGHTS) - (z - a) ** 2 / 2 - math.log(2 * math.pi) / 2
    return np.abs(z).ravel(), log_weights.ravel()


def integrated_exponential(a: float, s: float) -> tuple[float, float]:
    """log E e^(s |z|), and the log of that expectation over its standard deviation."""
    z, log_weights = normal_rule(a, 2 * s)
    if s > 0.5:  # the moments may be beyond float64, but their ratio has lost nothing
        first, second = (np.logaddexp.reduce(log_weights + k * s * z) for k in (1, 2))
        D = second - 2 * first
        return first, -(D + math.log(-math.expm1(-D))) / 2
    # About e^(s a), so that a small spread does not cancel.
    weights, u = np.exp(log_weights), np.expm1(s * (z - a))
    mean = weights @ u
    return s * a + math.log1p(mean), math.log1p(mean) - math.log(weights @ (u - mean) ** 2) / 2


def pair(a: float, std: float) -> tuple[Tensor, Tensor]:
    return torch.tensor([-a * std], dtype=torch.float64), torch.tensor([std], dtype=torch.float64)


@pytest.mark.parametrize("a", RATIOS)
@pytest.mark.parametrize("std", STDS)
def test_moments_of_the_magnitude_equal_integration(a: float, std: float) -> None:
    z, log_weights = normal_rule(a, 0.0)
    weights = np.exp(log_weights)
    mean = weights @ z
    deviation = math.sqrt(weights @ (z - mean) ** 2)
    assert expected_magnitude(*pair(a, std)).item() == pytest.approx(std * mean, rel=1e-10)
    assert snr_of_magnitude(*pair(a, std)).item() == pytest.approx(mean / deviation, rel=1e-10)


@pytest.mark.parametrize("a", RATIOS)
@pytest.mark.parametrize("std", STDS)
@pytest.mark.parametrize("lam", LAMBDAS)
def test_moments_of_the_exponential_equal_integration(a: float, std: float, lam: float) -> None:
    log_mean, log_snr = integrated_exponential(a, lam * std)
    assert log_expected_exponential(*pair(a, std), lam).item() == pytest.approx(log_mean, rel=1e-8)
    # In the logarithm an absolute error is the ratio's relative one.
    assert log_snr_of_exponential(*pair(a, std), lam).item() == pytest.approx(log_snr, rel=1e-12, abs=1e-7)


def test_integration_itself_agrees_with_a_closed_form() -> None:
    # Far from the kink e^(s |z|) is log-normal.
    log_mean, log_snr = integrated_exponential(30.0, 0.3)
    assert log_mean == pytest.approx(0.3 * 30 + 0.3**2 / 2, rel=1e-12)
    assert log_snr == pytest.approx(-math.log(math.expm1(0.3**2)) / 2, rel=1e-12)


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_scale_gives_a_nan(criterion, dtype) -> None:
    mean, std = torch.tensor(SCALES, dtype=dtype)[:, None], torch.tensor(SCALES, dtype=dtype)
    for sign in (1, -1):
        for lam in LAMBDAS:
            scores = keep_scores(criterion, sign * mean, std, lam)
            assert scores.dtype == torch.float64
            assert scores.shape == (len(SCALES), len(SCALES)) or criterion == "magnitude"
            assert not scores.isnan().any()
            assert scores.expand(len(SCALES), -1)[:, 1:].isfinite().all()  # infinite only where there is no spread


def test_a_weight_that_is_surely_zero_is_kept_last_by_its_ratio_and_a_sure_weight_first() -> None:
    mean, std = torch.tensor([0.0, 0.0, 0.3, 0.3]), torch.tensor([0.0, 0.1, 0.1, 0.0])
    for criterion in ("snr", "snr_magnitude"):
        assert keep_scores(criterion, mean, std).tolist() == pytest.approx([0.0, 0.0, 3.0, math.inf], rel=1e-6)
    assert keep_scores("expected_magnitude", mean, std)[[0, 3]].tolist() == pytest.approx([0.0, 0.3])
    assert keep_scores("exponential", mean, std, 2.0)[[0, 3]].tolist() == pytest.approx([0.0, 0.6])


def random_weights(n: int = 20_000) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    mean = torch.randn(n, generator=rng) * 0.01
    return mean, torch.randn(n, generator=rng).mul(1.5).exp() * 3e-3


def test_both_ratios_give_one_order() -> None:
    mean, std = random_weights()
    a = signal_to_noise(mean, std)
    assert torch.equal(keep_scores("snr", mean, std).argsort(), keep_scores("snr_magnitude", mean, std).argsort())
    order = a.argsort()
    value = snr_of_magnitude(mean, std)[order]
    assert (value.diff() > -1e-14 * value[1:]).all()
    tells_apart = order[a[order] > 1e-2]  # below it the value is flat, and equal ratios of float32 weights are rare
    assert torch.equal(snr_of_magnitude(mean, std)[tells_apart].argsort(stable=True), torch.arange(len(tells_apart)))
    assert torch.equal(keep_scores("magnitude", mean, std), mean.double().abs())


def test_the_ratio_tells_weights_apart_where_that_of_magnitudes_cannot() -> None:
    mean, std = torch.tensor([3e-10, 1e-10, 2e-10]), torch.ones(3)
    assert snr_of_magnitude(mean, std).unique().numel() == 1
    assert keep_scores("snr_magnitude", mean, std).argsort().tolist() == [1, 2, 0]


@pytest.mark.parametrize("lam", LAMBDAS)
def test_series_and_closed_forms_meet(lam: float) -> None:
    a = torch.linspace(0, 30, 61, dtype=torch.float64)
    for s in (1e-4, 5e-5, math.sqrt(30)):  # where s, 2 s and D change from one form to another
        below, above = (torch.full_like(a, s * (1 + side) / lam) for side in (-1e-9, 1e-9))
        for function in (log_expected_exponential, log_snr_of_exponential):
            left, right = function(a * below, below, lam), function(a * above, above, lam)
            torch.testing.assert_close(left, right, rtol=1e-8, atol=1e-7)


@pytest.mark.parametrize("std", [1e-9, 1e-5, 1e-3, 1.0, 100.0])
def test_a_larger_mean_is_never_worth_less(std: float) -> None:
    mean = torch.cat([torch.zeros(1), torch.logspace(-3, 3, 500)]).double() * std
    for criterion in CRITERIA:
        if criterion == "snr_exponential":  # it falls at first: near zero folding takes spread away
            continue
        scores = keep_scores(criterion, mean, torch.full_like(mean, std))
        assert (scores.diff() >= -1e-15 * scores.abs().max()).all(), criterion


def test_small_weights_rank_by_their_expected_magnitude_under_the_exponential() -> None:
    mean, std = (1e-7 * w for w in random_weights())
    assert torch.equal(
        keep_scores("exponential", mean, std).argsort(), keep_scores("expected_magnitude", mean, std).argsort()
    )


def test_bad_knobs_are_refused() -> None:
    weights = torch.ones(2), torch.ones(2)
    with pytest.raises(ValueError, match=r"criterion='size' is not one of magnitude, snr, expected_magnitude"):
        keep_scores("size", *weights)  # type: ignore[arg-type]
    for lam in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="must be positive and finite"):
            keep_scores("exponential", *weights, lam)
