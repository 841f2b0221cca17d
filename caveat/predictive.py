"""What a prediction says: the mixture over posterior draws, split into what is noise and what is not known.

Classification, draws p_s(y | x):   probs = mean_s p_s;   entropy H[probs] = aleatoric mean_s H[p_s] + epistemic (the
mutual information of label and weights). Regression: variance = aleatoric mean_s Var_s[y] + epistemic Var_s[E_s[y]].
`log_prob(y)` is the log density of the mixture, never the mean of log densities. The sample axis comes first, classes last.
`columns(targets)` flattens all of it to one row a decision: what is written to disk and scored.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

__all__ = [
    "BernoulliPredictive",
    "CategoricalPredictive",
    "GaussianPredictive",
    "Kind",
    "PoissonPredictive",
    "Predictive",
    "RegressionPredictive",
]

Kind = Literal["classification", "regression"]


class Predictive(Protocol):
    """What every prediction offers."""

    kind: ClassVar[Kind]

    @property
    def samples(self) -> Tensor:
        """Probabilities or means of each draw, sample axis first."""

    @property
    def aleatoric(self) -> Tensor:
        """The part of the uncertainty that more data would not remove."""

    @property
    def epistemic(self) -> Tensor:
        """The part of the uncertainty that comes from not knowing the weights."""

    def log_prob(self, targets: Tensor) -> Tensor:
        """Log density of targets under the mixture, one number a row."""

    def columns(self, targets: Tensor | None = None) -> dict[str, Tensor]:
        """Everything per decision, as flat columns."""


def _entropy(log_probs: Tensor) -> Tensor:
    return -torch.special.xlogy(log_probs.exp(), log_probs.exp()).sum(-1)


@dataclass(frozen=True)
class CategoricalPredictive:
    """One of C classes a row (or a pixel, or a position of a sequence)."""

    log_samples: Tensor  # [S, B, ..., C] log probabilities of each draw
    ignore_index: int = -100
    kind: ClassVar[Kind] = "classification"

    @cached_property
    def samples(self) -> Tensor:
        """Class probabilities of each draw, [S, B, ..., C]."""
        return self.log_samples.exp()

    @cached_property
    def probs(self) -> Tensor:
        """Class probabilities, [B, ..., C]."""
        return self.samples.mean(0)

    @property
    def label(self) -> Tensor:
        """The most probable class, [B, ...]."""
        return self.probs.argmax(-1)

    @cached_property
    def entropy(self) -> Tensor:
        """Entropy of the prediction in nats: aleatoric + epistemic."""
        return _entropy(self.probs.log())

    @cached_property
    def aleatoric(self) -> Tensor:
        """Mean entropy of the draws."""
        return _entropy(self.log_samples).mean(0)

    @cached_property
    def epistemic(self) -> Tensor:
        """Mutual information of label and weights: how much the draws disagree."""
        return (self.entropy - self.aleatoric).clamp_min(0)

    def log_prob(self, targets: Tensor) -> Tensor:
        """Log probability of each target; 0 where the target is ignored."""
        ignored = targets == self.ignore_index
        index = targets.masked_fill(ignored, 0).long().expand(self.log_samples.shape[:-1]).unsqueeze(-1)
        mixture = self.log_samples.gather(-1, index).squeeze(-1).logsumexp(0) - math.log(len(self.log_samples))
        return mixture.masked_fill(ignored, 0.0)

    def columns(self, targets: Tensor | None = None) -> dict[str, Tensor]:
        """Probabilities and their decomposition, one row a decision; ignored targets are left out."""
        table = {
            "probs": self.probs.flatten(0, -2),
            "entropy": self.entropy.flatten(),
            "aleatoric": self.aleatoric.flatten(),
            "epistemic": self.epistemic.flatten(),
        }
        if targets is None:
            return table
        kept = targets.flatten() != self.ignore_index
        table |= {"targets": targets.flatten().long(), "log_prob": self.log_prob(targets).flatten()}
        return {name: column[kept] for name, column in table.items()}


@dataclass(frozen=True)
class BernoulliPredictive:
    """Yes or no, for one label or for several independent ones."""

    logits: Tensor  # [S, B, ...] of each draw
    kind: ClassVar[Kind] = "classification"

    @cached_property
    def _both(self) -> CategoricalPredictive:
        log_sigmoid = torch.nn.functional.logsigmoid
        return CategoricalPredictive(torch.stack([log_sigmoid(-self.logits), log_sigmoid(self.logits)], -1))

    @cached_property
    def samples(self) -> Tensor:
        """Probability of yes in each draw, [S, B, ...]."""
        return self.logits.sigmoid()

    @cached_property
    def probs(self) -> Tensor:
        """Probability of yes, [B, ...]."""
        return self.samples.mean(0)

    @property
    def label(self) -> Tensor:
        """1 where yes is the more probable answer."""
        return (self.probs > 0.5).long()

    @property
    def entropy(self) -> Tensor:
        """Entropy of the prediction in nats: aleatoric + epistemic."""
        return self._both.entropy

    @property
    def aleatoric(self) -> Tensor:
        """Mean entropy of the draws."""
        return self._both.aleatoric

    @property
    def epistemic(self) -> Tensor:
        """Mutual information of label and weights."""
        return self._both.epistemic

    def log_prob(self, targets: Tensor) -> Tensor:
        """Log probability of each target (one a label)."""
        return self._both.log_prob(targets.reshape(self.logits.shape[1:]))

    def columns(self, targets: Tensor | None = None) -> dict[str, Tensor]:
        """Probabilities of no and yes and their decomposition, one row a label."""
        return self._both.columns(None if targets is None else targets.reshape(self.logits.shape[1:]))


@dataclass(frozen=True)
class GaussianPredictive:
    """A real number (or several) a row: an equal mixture of Gaussians, one a draw."""

    means: Tensor  # [S, B, ..., D]
    variances: Tensor  # [S, B, ..., D], of each component
    noise: Tensor  # [B, ..., D], the part of the components' variance that is observation noise
    kind: ClassVar[Kind] = "regression"

    @property
    def samples(self) -> Tensor:
        """The mean of each draw, [S, B, ..., D]."""
        return self.means

    @cached_property
    def mean(self) -> Tensor:
        """Predictive mean, [B, ..., D]."""
        return self.means.mean(0)

    @cached_property
    def variance(self) -> Tensor:
        """Predictive variance: aleatoric + epistemic."""
        return self.variances.mean(0) + self.means.var(0, correction=0)

    @property
    def aleatoric(self) -> Tensor:
        """Variance of the observation noise."""
        return self.noise

    @cached_property
    def epistemic(self) -> Tensor:
        """Variance from not knowing the weights."""
        return (self.variance - self.noise).clamp_min(0)

    def joint_covariance(self) -> Tensor:
        """Covariance of the draws' means over all rows and outputs of the batch at once, [B*D, B*D]."""
        centred = (self.means - self.mean).flatten(1)
        return centred.T @ centred / len(centred)

    def log_prob(self, targets: Tensor) -> Tensor:
        """Log density of each row's targets; the outputs of a row share a draw, so they are joint."""
        targets = targets.reshape(self.mean.shape)
        per_output = -0.5 * ((targets - self.means) ** 2 / self.variances + (2 * math.pi * self.variances).log())
        return per_output.flatten(2).sum(-1).logsumexp(0) - math.log(len(self.means))

    def cdf(self, y: Tensor) -> Tensor:
        """Probability of a value of at most y, for each output on its own."""
        return torch.special.ndtr((y - self.means) / self.variances.sqrt()).mean(0)

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """The central interval that holds `level` of the probability of each output."""
        std = self.variances.sqrt()
        low, high = (self.means - 10 * std).amin(0), (self.means + 10 * std).amax(0)
        return (
            _bisect(self.cdf, (1 - level) / 2, low, high),
            _bisect(self.cdf, (1 + level) / 2, low, high),
        )

    def crps(self, targets: Tensor) -> Tensor:
        """Continuous ranked probability score E|Y - y| - E|Y - Y'|/2 of each output, in closed form."""
        targets = targets.reshape(self.mean.shape)
        spread = torch.zeros_like(self.mean)
        for mean, variance in zip(self.means, self.variances.expand_as(self.means), strict=True):
            spread += _expected_distance(self.means - mean, self.variances + variance).mean(0)
        return _expected_distance(self.means - targets, self.variances).mean(0) - spread / (2 * len(self.means))

    def columns(self, targets: Tensor | None = None) -> dict[str, Tensor]:
        """Moments, the 90% interval and, with targets, the scores of every row."""
        table = _moments(self)
        if targets is not None:
            targets = targets.reshape(self.mean.shape)
            table |= _scores(self, targets, self.cdf(targets))
        return table


@dataclass(frozen=True)
class PoissonPredictive:
    """A count a row: an equal mixture of Poisson distributions, one a draw."""

    rates: Tensor  # [S, B, ..., D]
    kind: ClassVar[Kind] = "regression"

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
        return self.rates.var(0, correction=0)

    def log_prob(self, targets: Tensor) -> Tensor:
        """Log probability of each row's counts."""
        targets = targets.reshape(self.mean.shape).to(self.rates.dtype)
        per_output = torch.special.xlogy(targets, self.rates) - self.rates - torch.lgamma(targets + 1)
        return per_output.flatten(2).sum(-1).logsumexp(0) - math.log(len(self.rates))

    def cdf(self, counts: Tensor) -> Tensor:
        """Probability of at most this many, for each output on its own."""
        tail = torch.special.gammaincc((counts.floor() + 1).clamp_min(1e-30).expand_as(self.rates), self.rates)
        return torch.where(counts < 0, 0.0, tail.mean(0))

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """The smallest counts whose probability from below reaches (1 - level)/2 and (1 + level)/2."""
        low, high = torch.full_like(self.mean, -1.0), 20 + self.rates.amax(0) + 20 * self.rates.amax(0).sqrt()
        found = [_bisect(self.cdf, q, low, high, steps=80).floor() for q in ((1 - level) / 2, (1 + level) / 2)]
        return found[0], found[1]

    def crps(self, targets: Tensor) -> Tensor:
        """Ranked probability score: sum over counts k of (P(Y <= k) - 1[y <= k])^2."""
        targets = targets.reshape(self.mean.shape)
        top = int(torch.maximum(self.interval(1 - 1e-6)[1], targets).amax().item()) + 1 if targets.numel() else 0
        score = torch.zeros_like(self.mean)
        for k in range(top):
            score += (self.cdf(torch.full_like(self.mean, k)) - (targets <= k).to(self.mean.dtype)) ** 2
        return score

    def columns(self, targets: Tensor | None = None) -> dict[str, Tensor]:
        """Moments, the 90% interval and, with targets, the scores of every row (the mid-point PIT of a count)."""
        table = _moments(self)
        if targets is not None:
            targets = targets.reshape(self.mean.shape).to(self.mean.dtype)
            table |= _scores(self, targets, (self.cdf(targets) + self.cdf(targets - 1)) / 2)
        return table


RegressionPredictive = GaussianPredictive | PoissonPredictive


def _moments(prediction: RegressionPredictive) -> dict[str, Tensor]:
    lower, upper = prediction.interval(0.9)
    table = {
        "mean": prediction.mean,
        "variance": prediction.variance,
        "aleatoric": prediction.aleatoric.expand_as(prediction.mean),
        "epistemic": prediction.epistemic,
        "lower_90": lower,
        "upper_90": upper,
    }
    return {name: column.flatten(0, -2) for name, column in table.items()}


def _scores(prediction: RegressionPredictive, targets: Tensor, pit: Tensor) -> dict[str, Tensor]:
    positions = targets[..., 0].numel() // max(len(targets), 1)  # a row of several positions shares one joint density
    return {
        "targets": targets.flatten(0, -2),
        "pit": pit.flatten(0, -2),
        "crps": prediction.crps(targets).flatten(0, -2),
        "log_prob": (prediction.log_prob(targets) / max(positions, 1)).repeat_interleave(positions),
    }


def _expected_distance(difference: Tensor, variance: Tensor) -> Tensor:
    """E|X| for X ~ N(difference, variance)."""
    std = variance.sqrt()
    z = difference / std
    density = torch.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    return difference * (2 * torch.special.ndtr(z) - 1) + 2 * std * density


def _bisect(cdf, level: float, low: Tensor, high: Tensor, steps: int = 60) -> Tensor:  # type: ignore[no-untyped-def]
    """The smallest y with cdf(y) >= level, element by element."""
    for _ in range(steps):
        middle = (low + high) / 2
        reached = cdf(middle) >= level
        low, high = torch.where(reached, low, middle), torch.where(reached, middle, high)
    return high
