"""Predictions of numbers: mixtures of Gaussians or of Poisson distributions, one component a draw."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Any, ClassVar

import torch
from torch import Tensor

from caveat.predictive.calibration import Calibration, Conformity, Kind
from caveat.predictive.named_columns import prediction_frame, prediction_html
from caveat.predictive.protocol import log_mean_exp, prediction_line, row_numbers, shaped

__all__ = ["GaussianPredictive", "PoissonPredictive", "RegressionPredictive"]

CRPS_ELEMENTS = 2**20  # numbers in one working tensor: 8 MB in float64, whatever the number of rows
CRPS_COUNTS = 10_000  # a count spread over more values than this is scored as a Gaussian, right to 1 in 10,000


@dataclass(frozen=True, repr=False)
class GaussianPredictive:
    """A real number (or several) a row: an equal mixture of Gaussians, one a draw."""

    means: Tensor  # [S, B, ..., D]
    variances: Tensor  # [S, B, ..., D], of each component
    noise: Tensor  # [B, ..., D], the part of the components' variance that is observation noise
    calibration: Calibration | None = None
    kind: ClassVar[Kind] = "regression"

    def __repr__(self) -> str:
        return prediction_line(self)

    def _repr_html_(self) -> str:
        return prediction_html(self)

    def to_frame(self, levels: Sequence[float] = (0.9,)) -> Any:
        """A frame of pandas, one row a decision: mean, deviations in the target's unit, and intervals of `levels`."""
        return prediction_frame(self, (), levels)

    @property
    def samples(self) -> Tensor:
        """The mean of each draw, [S, B, ..., D]."""
        return self.means

    @cached_property
    def mean(self) -> Tensor:
        """Predictive mean, [B, ..., D]."""
        return self.means.mean(0)

    @property
    def variance(self) -> Tensor:
        """Predictive variance: aleatoric + epistemic."""
        return self.aleatoric + self.epistemic

    @property
    def aleatoric(self) -> Tensor:
        """Variance of the observation noise."""
        return self.noise.expand_as(self.mean)

    @cached_property
    def epistemic(self) -> Tensor:
        """Variance from not knowing the weights: that of the means, and what the components have beside noise."""
        return self._spread(self.mean)

    def _spread(self, mean: Tensor) -> Tensor:
        return (self.means - mean).square().mean(0) + (self.variances.mean(0) - self.noise).clamp_min(0)

    def decomposed(self) -> tuple[Tensor, Tensor, Tensor]:
        """Mean, aleatoric and epistemic, of which nothing is kept: for tracing."""
        mean = self.means.mean(0)
        return mean, self.noise.expand_as(mean), self._spread(mean)

    def joint_covariance(self) -> Tensor:
        """Covariance of the draws' means over all rows and outputs of the batch at once, [B*D, B*D]."""
        centred = (self.means - self.mean).flatten(1)
        return centred.T @ centred / len(centred)

    def log_prob(self, targets: Tensor) -> Tensor:
        """Log density of each row's targets; the outputs of a row share a draw, so they are joint."""
        std = self.variances.sqrt()
        z = (_like(targets, self.mean) - self.means) / std
        per_output = -0.5 * (z.square() + math.log(2 * math.pi)) - std.log()
        return log_mean_exp(per_output.flatten(2).sum(-1))

    def cdf(self, y: Tensor) -> Tensor:
        """Probability of a value of at most y, for each output on its own."""
        return torch.special.ndtr((y - self.means) / self.variances.sqrt()).mean(0)

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """The central interval that holds `level` of the probability of each output.

        After `posterior.calibrate` the one that holds this share of targets like those of calibration.
        """
        if self.calibration is not None:
            return _calibrated_interval(self, self.calibration, level)
        lower, upper = (self._quantile(share) for share in _tails(level))
        return lower, upper

    def calibration_scores(self, targets: Tensor, like: Conformity, rng: torch.Generator) -> Tensor:
        """How badly each target fits its prediction, as `like` scores it, [N, D]."""
        return _deviations(self, like, _like(targets, self.mean))

    def _quantile(self, share: float) -> Tensor:
        """By bisection; a quantile of a mixture lies between those of its components."""
        each = self.means + self.variances.sqrt() * NormalDist().inv_cdf(share)
        digits = 1 - round(math.log2(torch.finfo(each.dtype).eps))
        return _bisect(self.cdf, share, each.amin(0), each.amax(0), steps=digits)

    def crps(self, targets: Tensor) -> Tensor:
        """Continuous ranked probability score of each output, exact, [B, ..., D]; a variance of 0 is a point mass."""
        return _crps_of_gaussians(self.means, self.variances, _like(targets, self.mean)).to(self.mean.dtype)

    def columns(self, targets: Tensor | None = None) -> dict[str, Tensor]:
        """Moments, the 90% interval and, with targets, the scores of every row."""
        table = _moments(self)
        if targets is not None:
            targets = _like(targets, self.mean)
            table |= _scores(self, targets, self.cdf(targets))
        return table


@dataclass(frozen=True, repr=False)
class PoissonPredictive:
    """A count a row: an equal mixture of Poisson distributions, one a draw. Sums over counts are taken in float64."""

    rates: Tensor  # [S, B, ..., D]
    calibration: Calibration | None = None
    kind: ClassVar[Kind] = "regression"

    def __repr__(self) -> str:
        return prediction_line(self)

    def _repr_html_(self) -> str:
        return prediction_html(self)

    def to_frame(self, levels: Sequence[float] = (0.9,)) -> Any:
        """A frame of pandas, one row a decision: mean, deviations in the target's unit, and intervals of `levels`."""
        return prediction_frame(self, (), levels)

    @property
    def samples(self) -> Tensor:
        """The rate of each draw, [S, B, ..., D]."""
        return self.rates

    @cached_property
    def mean(self) -> Tensor:
        """Expected count, [B, ..., D]."""
        return self.rates.mean(0)

    @property
    def variance(self) -> Tensor:
        """Predictive variance: aleatoric + epistemic."""
        return self.aleatoric + self.epistemic

    @property
    def aleatoric(self) -> Tensor:
        """Mean variance of the draws, which for a Poisson is its rate."""
        return self.mean

    @cached_property
    def epistemic(self) -> Tensor:
        """Variance of the rate over draws."""
        return (self.rates - self.mean).square().mean(0)

    def decomposed(self) -> tuple[Tensor, Tensor, Tensor]:
        """Mean, aleatoric and epistemic, of which nothing is kept: for tracing."""
        mean = self.rates.mean(0)
        return mean, mean, (self.rates - mean).square().mean(0)

    def _log_probs(self, counts: Tensor) -> Tensor:
        """Log probability of a count for each draw and output, [S, B, ..., D], float64."""
        rates, counts = self.rates.double(), counts.double()
        return torch.special.xlogy(counts, rates) - rates - torch.lgamma(counts + 1)

    def _cdf(self, counts: Tensor) -> Tensor:
        shape = (counts.double().floor() + 1).clamp_min(
            0
        )  # gammaincc(0, rate) is the probability of less than nothing, 0
        return (
            torch.special.gammaincc(shape.expand(self.rates.shape), self.rates.double()).mean(0).where(shape > 0, 0.0)
        )

    def log_prob(self, targets: Tensor) -> Tensor:
        """Log probability of each row's counts; the outputs of a row share a draw, so they are joint."""
        per_draw = self._log_probs(_like(targets, self.mean)).flatten(2).sum(-1)
        return log_mean_exp(per_draw).to(self.rates.dtype)

    def cdf(self, counts: Tensor) -> Tensor:
        """Probability of at most this many, for each output on its own."""
        return self._cdf(counts).to(self.rates.dtype)

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """The smallest counts whose probability from below reaches (1 - level)/2 and (1 + level)/2.

        After `posterior.calibrate` the counts between which lies this share of targets like those of calibration.
        """
        if self.calibration is not None:
            lower, upper = _calibrated_interval(self, self.calibration, level)
            lower, upper = lower.ceil().clamp_min(0), upper.floor()
            nearest = self.mean.round()  # where there is no count between the two ends
            return torch.where(lower > upper, nearest, lower), torch.where(lower > upper, nearest, upper)
        lower, upper = (self._quantile(share).to(self.rates.dtype) for share in _tails(level))
        return lower, upper

    def calibration_scores(self, targets: Tensor, like: Conformity, rng: torch.Generator) -> Tensor:
        """How badly each target fits its prediction, as `like` scores it, [N, D]."""
        return _deviations(self, like, _like(targets, self.mean))

    def _quantile(self, share: float) -> Tensor:
        largest = self.rates.amax(0).double()
        low, high = torch.full_like(largest, -1.0), largest + 20 * largest.sqrt() + 20
        steps = (
            math.ceil(math.log2(float(high.amax()) + 1)) + 1 if high.numel() else 0
        )  # until less than one count is left
        return _bisect(self._cdf, share, low, high, steps).floor()

    def crps(self, targets: Tensor) -> Tensor:
        """Ranked probability score, the sum over counts k of (P(Y <= k) - 1[y <= k])^2, [B, ..., D].

        Summed where P is neither 0 nor 1; on both sides every count on the way to the target counts 1.
        """
        y = _like(targets, self.mean).double()
        k, last = self._quantile(1e-8), self._quantile(1 - 1e-8)
        wide = torch.maximum(last - k, last.sqrt()) > CRPS_COUNTS
        score, cdf = (k - y).clamp_min(0), self._cdf(k - 1)
        for _ in range(int((last - k).masked_fill(wide, 0).amax()) + 1 if y.numel() else 0):
            cdf = cdf + self._log_probs(k).exp().mean(0)
            score = score + (cdf - (y <= k).double()).square()
            k = k + 1
        score = score + (y - k).clamp_min(0)
        if bool(wide.any()):
            score = torch.where(wide, _crps_of_gaussians(self.rates, self.rates, y), score)
        return score.to(self.mean.dtype)

    def columns(self, targets: Tensor | None = None) -> dict[str, Tensor]:
        """Moments, the 90% interval and, with targets, the scores of every row (the mid-point PIT of a count)."""
        table = _moments(self)
        if targets is not None:
            targets = _like(targets, self.mean)
            table |= _scores(self, targets, (self.cdf(targets) + self.cdf(targets - 1)) / 2)
        return table


RegressionPredictive = GaussianPredictive | PoissonPredictive


def _like(targets: Tensor, mean: Tensor) -> Tensor:
    return shaped(targets, mean.shape).to(mean)


def _moments(prediction: RegressionPredictive) -> dict[str, Tensor]:
    lower, upper = prediction.interval(0.9)
    table = {
        "mean": prediction.mean,
        "variance": prediction.variance,
        "aleatoric": prediction.aleatoric,
        "epistemic": prediction.epistemic,
        "lower_90": lower,
        "upper_90": upper,
    }
    rows = {"rows": row_numbers(prediction.mean[..., 0])}
    return rows | {name: column.flatten(0, -2) for name, column in table.items()}


def _scores(prediction: RegressionPredictive, targets: Tensor, pit: Tensor) -> dict[str, Tensor]:
    positions = math.prod(targets.shape[1:-1])  # a row of several positions shares one joint density
    return {
        "targets": targets.flatten(0, -2),
        "pit": pit.flatten(0, -2),
        "crps": prediction.crps(targets).flatten(0, -2),
        "log_prob": (prediction.log_prob(targets) / positions).repeat_interleave(positions),
    }


def _centre_and_reach(prediction: RegressionPredictive, score: str) -> tuple[Tensor, Tensor, Tensor]:
    """What deviations are counted from, and their unit below and above it, [B, ..., D] each."""
    if score == "deviation":
        std = prediction.variance.sqrt()
        centre, below, above = prediction.mean, std, std
    else:
        lower, centre, upper = (prediction._quantile(share).to(prediction.mean) for share in (0.05, 0.5, 0.95))
        below, above = centre - lower, upper - centre
    smallest = torch.finfo(centre.dtype).tiny ** 0.5
    return centre, below.clamp_min(smallest), above.clamp_min(smallest)


def _deviations(prediction: RegressionPredictive, like: Conformity, targets: Tensor) -> Tensor:
    """Each target's distance from its prediction's centre, in the prediction's own unit, [N, D]."""
    centre, below, above = _centre_and_reach(prediction, like.score)
    scores = torch.where(targets < centre, (centre - targets) / below, (targets - centre) / above)
    return scores.reshape(-1, scores.shape[-1] if scores.ndim > 1 else 1)


def _calibrated_interval(
    prediction: RegressionPredictive, calibration: Calibration, level: float
) -> tuple[Tensor, Tensor]:
    """The values within the calibration's bound."""
    centre, below, above = _centre_and_reach(prediction, calibration.conformity.score)
    bound = calibration.bound(level).to(centre)
    return centre - bound * below, centre + bound * above


def _tails(level: float) -> tuple[float, float]:
    if not 0 < level < 1:
        raise ValueError(f"interval(level={level!r}): must be above 0 and below 1, such as 0.9 for 90%")
    return (1 - level) / 2, (1 + level) / 2


def _bisect(cdf: Callable[[Tensor], Tensor], share: float, low: Tensor, high: Tensor, steps: int) -> Tensor:
    """The smallest y with cdf(y) >= share, element by element, from above."""
    for _ in range(steps):
        middle = (low + high) / 2
        reached = cdf(middle) >= share
        low, high = torch.where(reached, low, middle), torch.where(reached, middle, high)
    return high


def _crps_of_gaussians(means: Tensor, variances: Tensor, targets: Tensor) -> Tensor:
    """CRPS of equal mixtures of S Gaussians (Grimit, Gneiting, Berrocal and Johnson, 2006), float64.

        1/S sum_i A(y - m_i, v_i) - 1/(2 S^2) sum_ij A(m_i - m_j, v_i + v_j),   A(m, v) = E|N(m, v)|

    O(S^2) time a target, and memory that does not grow with their number. Shapes [S, ...], [S, ...] and [...].
    """
    components = len(means)
    flat = means.flatten(1), variances.expand(means.shape).flatten(1), targets.flatten().unsqueeze(0)  # [S, N], [1, N]
    pieces = zip(*(tensor.split(max(1, CRPS_ELEMENTS // components), 1) for tensor in flat), strict=True)
    scores = []
    for m, v, y in ((m.double(), v.double(), y.double()) for m, v, y in pieces):
        # The S^2 pairs are taken as S cyclic shifts, each the size of the means; shifts k and S - k give the same sum.
        spread = _mean_absolute(torch.zeros_like(m), 2 * v).sum(0)  # shift 0
        for shift in range(1, components // 2 + 1):
            pairs = _mean_absolute(m - m.roll(shift, 0), v + v.roll(shift, 0)).sum(0)
            spread += pairs if 2 * shift == components else 2 * pairs
        scores.append(_mean_absolute(y - m, v).mean(0) - spread / (2 * components**2))
    return torch.cat(scores).clamp_min(0).reshape(targets.shape)  # rounding may leave -1e-17


def _mean_absolute(mean: Tensor, variance: Tensor) -> Tensor:
    """E|X| for X ~ N(mean, variance)."""
    scale = (2 * variance).clamp_min(1e-300).sqrt()  # a zero variance then gives |mean|
    ratio = mean / scale
    return scale / math.sqrt(math.pi) * torch.exp(-ratio.square()) + mean * torch.erf(ratio)
