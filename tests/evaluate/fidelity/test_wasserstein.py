"""Distances between predictive mixtures: against draws of them, and against scipy."""

import pytest
import torch
from scipy import stats

from caveat.evaluate.fidelity.wasserstein import wasserstein
from caveat.predictive import GaussianPredictive, PoissonPredictive


def sampled_distance(a: GaussianPredictive, b: GaussianPredictive, p: int) -> float:
    """By two million sorted draws of each: right to about 0.002."""
    rng, drawn = torch.Generator().manual_seed(0), []
    for mixture in (a, b):
        which = torch.randint(len(mixture.means), (2_000_000,), generator=rng)
        noise = torch.randn(len(which), generator=rng, dtype=torch.float64)
        drawn.append((mixture.means[which, 0, 0] + mixture.variances[which, 0, 0].sqrt() * noise).sort().values)
    return float((drawn[0] - drawn[1]).abs().pow(p).mean() ** (1 / p))


@pytest.mark.parametrize("components", [(2, 3), (40, 1), (600, 7)])
def test_mixtures_against_draws_of_them(components: tuple[int, int]) -> None:
    rng = torch.Generator().manual_seed(components[0])
    a, b = (
        GaussianPredictive(means, torch.rand(means.shape, generator=rng, dtype=torch.float64) + 0.1, means[0])
        for means in (2 * torch.randn(n, 1, 1, generator=rng, dtype=torch.float64) for n in components)
    )
    found, floor = wasserstein(a, [b])
    assert float(found["w1"]) == pytest.approx(sampled_distance(a, b, 1), abs=0.01)
    assert float(found["w2"]) == pytest.approx(sampled_distance(a, b, 2), abs=0.01)
    assert floor == []


def test_one_wild_component_does_not_blur_the_others() -> None:
    """A draw whose noise is ten thousand times the others' must not take the resolution away from them."""
    means = torch.zeros(100, 1, 1, dtype=torch.float64)
    variances = torch.ones_like(means)
    variances[0] = 1e8
    a, b = (GaussianPredictive(means + shift, variances, variances.mean(0)) for shift in (0.0, 0.3))
    assert float(wasserstein(a, [b])[0]["w1"]) == pytest.approx(0.3, rel=0.01)


@pytest.mark.parametrize(
    "rates", [([0.01], [0.02]), ([3.0, 9.0], [4.0]), ([900.0], [1000.0]), ([30_000.0], [31_000.0])]
)
def test_counts_against_their_probabilities(rates: tuple[list[float], list[float]]) -> None:
    a, b = (PoissonPredictive(torch.tensor(r).reshape(-1, 1, 1)) for r in rates)
    counts = torch.arange(40_000).numpy()
    pmf_a, pmf_b = (sum(stats.poisson(r).pmf(counts) for r in group) / len(group) for group in rates)
    found, _ = wasserstein(a, [b])
    assert float(found["w1"]) == pytest.approx(stats.wasserstein_distance(counts, counts, pmf_a, pmf_b), rel=2e-3)
    levels = (torch.arange(1_000_000, dtype=torch.float64) + 0.5) / 1_000_000
    quantiles = [torch.searchsorted(torch.from_numpy(pmf.cumsum()), levels).double() for pmf in (pmf_a, pmf_b)]
    assert float(found["w2"]) == pytest.approx(float((quantiles[0] - quantiles[1]).square().mean().sqrt()), rel=2e-3)
