"""Wasserstein distances between predictive mixtures on the line: one number for each row and output.

    W_p(F, G)^p  =  integral_0^1 |F^-1(u) - G^-1(u)|^p du  =  integral |F^-1(Phi(z)) - G^-1(Phi(z))|^p phi(z) dz

The whole predictive is compared, noise included, by its quantiles and not by draws of it, so there is no luck in it.
Mixtures of Gaussians: quantiles at the levels Phi(z), z from -5 to 5, read off the mixture's cdf at points that lie
densest where its mass is. Between points Phi^-1(cdf) is taken as linear, which for a single Gaussian it is.
Mixtures of Poissons: both quantile functions are steps and the integral is a finite sum.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from caveat.predictive import GaussianPredictive, PoissonPredictive, RegressionPredictive

__all__ = ["Distances", "one_against_others", "wasserstein"]

Distances = dict[str, Tensor]  # "w1" and "w2", [B, ..., D], float64
Gaps = tuple[Tensor, Tensor]  # weights of levels that sum to one, and the difference of two quantiles there

REACH = 5.0  # of the levels, in standard deviations: six in ten million lie beyond
LEVELS = 1001
POINTS = 512  # at which the cdf of a mixture is computed
MOST_COUNTS = 2000  # counts that may be larger are compared as Gaussians of their mean and variance


def wasserstein(
    ours: RegressionPredictive, chains: Sequence[RegressionPredictive]
) -> tuple[Distances, list[Distances]]:
    """Return the distances of a prediction from the mixture of chains, and of each chain from that of the others.

    The second is empty where there is one chain only.
    """
    mine, *theirs = (_in_float64(prediction) for prediction in (ours, *chains))
    counts = [p for p in (mine, *theirs) if isinstance(p, PoissonPredictive)]
    if len(counts) == 1 + len(theirs) and _largest(counts) <= MOST_COUNTS:
        pairs = _gaps_of_counts(mine, theirs, _largest(counts))
    else:
        pairs = _gaps_of_gaussians(_as_gaussians(mine), [_as_gaussians(chain) for chain in theirs])
    first, *others = (_distances(weights, gap) for weights, gap in pairs)
    return first, others


def _distances(weights: Tensor, gap: Tensor) -> Distances:
    """W1 and W2 from one sum over levels, so that W1 <= W2 holds in spite of rounding."""
    return {"w1": (weights * gap.abs()).sum(0), "w2": (weights * gap.square()).sum(0).sqrt()}


def _gaps_of_gaussians(mine: GaussianPredictive, theirs: Sequence[GaussianPredictive]) -> Iterator[Gaps]:
    """Ours against all chains, then each chain against the others, at the levels Phi(z)."""
    z = torch.linspace(-REACH, REACH, LEVELS, dtype=torch.float64, device=mine.means.device)
    weights = (-0.5 * z.square()).exp()
    weights = (weights / weights.sum()).reshape(-1, *[1] * mine.mean.ndim)
    our_points, points = _points([mine]), _points(theirs)
    by_chain = torch.stack([_cdf(chain, points) for chain in theirs])  # [chains, points, B, ..., D]
    yield weights, _quantiles(our_points, _cdf(mine, our_points), z) - _quantiles(points, by_chain.mean(0), z)
    for chain, others in one_against_others(by_chain):
        yield weights, _quantiles(points, chain, z) - _quantiles(points, others, z)


def _gaps_of_counts(mine: RegressionPredictive, theirs: Sequence[RegressionPredictive], largest: int) -> Iterator[Gaps]:
    """Ours against all chains, then each chain against the others, where both quantile functions are steps.

    Between two levels of either cdf both are constant, so that the integral over levels is a finite sum.
    """
    counts = torch.arange(largest + 1, dtype=torch.float64, device=mine.mean.device)
    points = counts.reshape(-1, *[1] * mine.mean.ndim).expand(-1, *mine.mean.shape)
    by_chain = torch.stack([_cdf(chain, points) for chain in theirs])
    for one, other in [(_cdf(mine, points), by_chain.mean(0)), *one_against_others(by_chain)]:
        levels = torch.cat([torch.zeros_like(one[:1]), one, other]).sort(0).values  # [levels, B, ..., D]
        middle = (levels[1:] + levels[:-1]).movedim(0, -1).contiguous() / 2
        steps = [torch.searchsorted(cdf.movedim(0, -1).contiguous(), middle) for cdf in (one, other)]
        yield levels.diff(dim=0), (steps[0] - steps[1]).movedim(-1, 0).double()


def one_against_others(by_chain: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pair the cdf or the probabilities of each chain with those of the mixture of the others; one chain has none.

    `by_chain` is [chains, ...], and each of the pair is [...].
    """
    for index in range(len(by_chain) if len(by_chain) > 1 else 0):
        yield by_chain[index], torch.cat([by_chain[:index], by_chain[index + 1 :]]).mean(0)


def _cdf(prediction: RegressionPredictive, points: Tensor) -> Tensor:
    return torch.stack([prediction.cdf(y) for y in points])


def _points(mixtures: Sequence[GaussianPredictive]) -> Tensor:
    """Quantiles of the components, at most POINTS of them, evenly by rank: [points, B, ..., D], ascending.

    A quantile of a mixture lies between those of its components, so that the ends enclose every level.
    """
    means, std = (torch.cat([getattr(m, name) for m in mixtures]) for name in ("means", "variances"))
    points_each = max(9, POINTS // len(means))
    z = torch.linspace(-REACH, REACH, points_each, dtype=means.dtype, device=means.device).reshape(
        -1, *[1] * means.ndim
    )
    points = (means + z * std.sqrt()).flatten(0, 1).sort(0).values
    return points[torch.linspace(0, len(points) - 1, min(len(points), POINTS), device=means.device).round().long()]


def _quantiles(points: Tensor, cdf: Tensor, z: Tensor) -> Tensor:
    """Quantiles at the levels Phi(z), [levels, B, ..., D], from the cdf at points."""
    y = points.movedim(0, -1).contiguous()  # [B, ..., D, points]
    heights = torch.special.ndtri(cdf).clamp(-8, 8).movedim(0, -1).contiguous()  # a cdf of 0 or 1 would be infinite
    above = torch.searchsorted(heights, z.expand(*y.shape[:-1], -1).contiguous()).clamp(1, y.shape[-1] - 1)
    y0, y1, z0, z1 = (t.gather(-1, index) for t in (y, heights) for index in (above - 1, above))
    share = ((z - z0) / (z1 - z0).clamp_min(1e-300)).clamp(0, 1)
    return (y0 + share * (y1 - y0)).movedim(-1, 0)


def _in_float64(prediction: RegressionPredictive) -> RegressionPredictive:
    """The same prediction in float64: in float32 a tail of one in ten million is lost."""
    values = {field.name: getattr(prediction, field.name) for field in dataclasses.fields(prediction)}
    tensors = {name: value.double() for name, value in values.items() if isinstance(value, Tensor)}
    return dataclasses.replace(prediction, **tensors)  # type: ignore[arg-type]  # of tensors alone


def _largest(predictions: Sequence[PoissonPredictive]) -> int:
    """A count that is exceeded with a probability of at most one in ten million."""
    rate = max(float(p.rates.max()) for p in predictions)
    return math.ceil(rate + 2 * REACH * math.sqrt(rate) + 20)


def _as_gaussians(prediction: RegressionPredictive) -> GaussianPredictive:
    if isinstance(prediction, PoissonPredictive):
        return GaussianPredictive(prediction.rates, prediction.rates, prediction.mean)
    return prediction
