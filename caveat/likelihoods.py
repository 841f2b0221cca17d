"""Likelihoods: what a network's outputs say about its targets. One protocol, shared by every method.

`hyper` holds what a likelihood learns beside the weights (log noise, the units of the targets) and what is tuned after
training (a temperature). Each entry has the shape given here; in `predictive` it may have one more leading axis, when
each posterior draw has its own. The Fisher information F of the outputs is handed out as a factor R with R R^T = F,
because F is positive semi-definite for every likelihood here while the Hessian is not (heteroscedastic regression).
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from caveat.knobs import NonNegative, Positive, check_knobs
from caveat.predictive import (
    BernoulliPredictive,
    CategoricalPredictive,
    GaussianPredictive,
    Kind,
    PoissonPredictive,
    Predictive,
)

__all__ = [
    "Bernoulli",
    "Categorical",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Hyper",
    "Likelihood",
    "Poisson",
]

Hyper = dict[str, Tensor]


class Likelihood(Protocol):
    """What a method may ask of a likelihood; outputs and targets carry the batch axis first."""

    kind: ClassVar[Kind]
    tempered: ClassVar[bool]  # whether hyper["temperature"] has a meaning

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise a ValueError when the shapes, types or values do not fit."""

    def check_targets(self, targets: Tensor) -> None:
        """Raise a ValueError when targets alone are of the wrong type or not finite."""

    def initial_hyper(self, targets: Tensor) -> Hyper:
        """Starting values of what is learned, and the units of the targets."""

    def fitted_hyper(self, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Hyper:
        """The maximum-likelihood values given outputs: what a trained network's own noise is."""

    def log_prob(self, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Tensor:
        """Log likelihood of each row, [B], in the outputs' type."""

    def baseline(self, targets: Tensor) -> float:
        """Mean log likelihood of a row under the best prediction that is the same for all rows and positions."""

    def fisher_factor(self, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Tensor:
        """R with R R^T = Fisher information of the outputs, [B, ..., C, C]."""

    def sample_noise(self, outputs: Tensor, targets: Tensor, hyper: Hyper, rng: torch.Generator) -> Tensor:
        """R e with e standard normal: noise of the outputs' shape whose covariance is the Fisher information."""

    def predictive(self, outputs: Tensor, hyper: Hyper) -> Predictive:
        """The prediction from outputs [S, B, ...] of S draws."""


class _NothingLearned:
    """Likelihoods without hyperparameters."""

    def initial_hyper(self, targets: Tensor) -> Hyper:
        """Nothing to learn."""
        return {}

    def fitted_hyper(self, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Hyper:
        """Nothing to learn."""
        return hyper


class _DiagonalFisher:
    """Likelihoods whose outputs carry information independently: R is diagonal."""

    def _fisher_root(self, outputs: Tensor, hyper: Hyper) -> Tensor:
        """The diagonal of R, shaped as the outputs."""
        raise NotImplementedError

    def fisher_factor(self, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Tensor:
        """R as a diagonal matrix, [B, ..., D, D]."""
        return torch.diag_embed(self._fisher_root(outputs, hyper))

    def sample_noise(self, outputs: Tensor, targets: Tensor, hyper: Hyper, rng: torch.Generator) -> Tensor:
        """R e without forming R."""
        return self._fisher_root(outputs, hyper) * _standard_normal(outputs, rng)


@dataclass(frozen=True)
class Categorical(_NothingLearned):
    """One of C classes: softmax over logits [B, C], [B, C, H, W] or, with class_axis=-1, [B, T, C]."""

    class_axis: int = 1  # where the classes are in the outputs
    ignore_index: int = -100  # targets of this value are left out
    class_weights: tuple[NonNegative, ...] | None = None  # multiply the log likelihood of each class
    kind: ClassVar[Kind] = "classification"
    tempered: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_knobs(self)

    def check_targets(self, targets: Tensor) -> None:
        """Targets are whole numbers."""
        if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
            raise ValueError(
                f"Categorical needs integer class labels, got {targets.dtype}: use targets.long(), "
                "or Bernoulli() for a yes/no target"
            )

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """One label in 0..C-1 for each vector of logits."""
        self.check_targets(targets)
        if outputs.ndim < 2 or not -outputs.ndim < self.class_axis < outputs.ndim or self.class_axis == 0:
            raise ValueError(
                f"Categorical(class_axis={self.class_axis}) needs logits with classes on that axis and the batch on "
                f"the first, such as [batch, classes], got {_shape(outputs)}: change the network's output or class_axis"
            )
        *positions, classes = outputs.movedim(self.class_axis, -1).shape
        if tuple(positions) != _shape(targets):
            raise ValueError(
                f"logits of shape {_shape(outputs)} with class_axis={self.class_axis} need labels of shape "
                f"{tuple(positions)}, got {_shape(targets)}: reshape the labels or change class_axis"
            )
        if self.class_weights is not None and len(self.class_weights) != classes:
            raise ValueError(
                f"Categorical has {len(self.class_weights)} class weights, but the network has {classes} outputs: "
                "give one weight a class"
            )
        kept = targets[self._kept(targets)].long()
        low, high = (int(kept.min()), int(kept.max())) if kept.numel() else (0, 0)
        if low < 0 or high >= classes:
            advice = (
                f"mark labels to leave out with ignore_index={low}"
                if low < 0
                else f"give the network {high + 1} outputs"
            )
            raise ValueError(
                f"labels run from {low} to {high}, but the network has {classes} outputs (labels 0 to {classes - 1}): "
                f"check the labels, or {advice}"
            )

    def _kept(self, targets: Tensor) -> Tensor:
        return targets.long() != self.ignore_index  # long, because -100 as a uint8 is the label 156

    def log_prob(self, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Tensor:
        """Weighted log softmax at the label, summed over the positions of a row."""
        logits = outputs.movedim(self.class_axis, 1)
        weights = None if self.class_weights is None else logits.new_tensor(self.class_weights)
        loss = F.cross_entropy(logits, targets.long(), weights, ignore_index=self.ignore_index, reduction="none")
        return -loss.unsqueeze(-1).flatten(1).sum(1)

    def baseline(self, targets: Tensor) -> float:
        """The entropy of the labels' own frequencies, each class counted by its weight."""
        counts = torch.bincount(targets[self._kept(targets)].long()).double()
        if self.class_weights is not None:
            counts = counts * counts.new_tensor(self.class_weights[: len(counts)])
        return float(torch.special.xlogy(counts, counts / counts.sum()).sum()) / len(targets)

    def _probs_and_weight(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities [B, ..., C] and the root of each position's weight in the likelihood, [B, ...]."""
        p = outputs.movedim(self.class_axis, -1).softmax(-1)
        kept = self._kept(targets)
        weight = kept.to(p.dtype)
        if self.class_weights is not None:
            weight = weight * p.new_tensor(self.class_weights)[targets.long() * kept]
        return p, weight.sqrt()

    def fisher_factor(self, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Tensor:
        """R = diag(sqrt p) - p sqrt(p)^T, exact: R R^T = diag(p) - p p^T."""
        p, root_weight = self._probs_and_weight(outputs, targets)
        factor = torch.diag_embed(p.sqrt()) - p.unsqueeze(-1) * p.sqrt().unsqueeze(-2)
        return factor * root_weight[..., None, None]

    def sample_noise(self, outputs: Tensor, targets: Tensor, hyper: Hyper, rng: torch.Generator) -> Tensor:
        """sqrt(p) e - p (sqrt(p) . e) without forming R."""
        p, root_weight = self._probs_and_weight(outputs, targets)
        scaled = p.sqrt() * _standard_normal(p, rng)
        noise = (scaled - p * scaled.sum(-1, keepdim=True)) * root_weight.unsqueeze(-1)
        return noise.movedim(-1, self.class_axis)

    def predictive(self, outputs: Tensor, hyper: Hyper) -> CategoricalPredictive:
        """Softmax of logits / temperature for each draw."""
        logits = outputs.movedim(self.class_axis + 1 if self.class_axis > 0 else self.class_axis, -1)
        return CategoricalPredictive((logits / _temperature(hyper, logits)).log_softmax(-1), self.ignore_index)


@dataclass(frozen=True)
class Bernoulli(_NothingLearned, _DiagonalFisher):
    """Yes or no: one logit for a binary target [B] or [B, 1], or one for each of several labels [B, K]."""

    kind: ClassVar[Kind] = "classification"
    tempered: ClassVar[bool] = True

    def check_targets(self, targets: Tensor) -> None:
        """Targets are 0 or 1."""
        if not bool(((targets == 0) | (targets == 1)).all()):
            raise ValueError(
                f"Bernoulli needs targets 0 or 1, got {_examples(targets[(targets != 0) & (targets != 1)])}: "
                "clean them, or use Categorical() for more than two classes"
            )

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """One target for each logit."""
        self.check_targets(targets)
        _check_shape("Bernoulli", outputs, targets)

    def log_prob(self, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Tensor:
        """Log probability of the targets, summed over the labels of a row."""
        targets = targets.reshape(outputs.shape).to(outputs.dtype)
        return -F.binary_cross_entropy_with_logits(outputs, targets, reduction="none").flatten(1).sum(1)

    def baseline(self, targets: Tensor) -> float:
        """The entropy of each label's own frequency."""
        rows = _by_output(targets)
        share = rows.mean(0)
        per_position = (torch.special.xlogy(share, share) + torch.special.xlogy(1 - share, 1 - share)).sum()
        return float(per_position) * len(rows) / len(targets)

    def _fisher_root(self, outputs: Tensor, hyper: Hyper) -> Tensor:
        """F = p (1 - p)."""
        return (outputs.sigmoid() * (-outputs).sigmoid()).sqrt()

    def predictive(self, outputs: Tensor, hyper: Hyper) -> BernoulliPredictive:
        """Sigmoid of logits / temperature for each draw."""
        return BernoulliPredictive(outputs / _temperature(hyper, outputs))


@dataclass(frozen=True)
class Gaussian(_DiagonalFisher):
    """Real targets [B, D] with one noise level an output, given or learned.

    With `standardise` the network predicts (target - mean) / scale, with mean and scale of the training targets, and
    every prediction and score comes back in the targets' own units; a given `noise` is in those units too.
    """

    noise: Positive | None = None  # standard deviation of the observations; None learns it
    standardise: bool = False  # let the network predict targets of zero mean and unit variance
    kind: ClassVar[Kind] = "regression"
    tempered: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_knobs(self)

    def check_targets(self, targets: Tensor) -> None:
        """Targets are finite real numbers."""
        _check_real("Gaussian", targets)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """One target for each output."""
        self.check_targets(targets)
        _check_shape("Gaussian", outputs, targets)

    def initial_hyper(self, targets: Tensor) -> Hyper:
        """The targets' units, and noise as large as the targets' spread (what a network that knows nothing leaves)."""
        units = _units(targets, self.standardise)
        if self.noise is not None:
            log_noise = (self.noise / units["target_scale"]).log()
        else:
            spread = _by_output(targets).std(0, correction=0) / units["target_scale"]
            log_noise = spread.clamp_min(1e-6).log()
        return units | {"log_noise": log_noise}

    def fitted_hyper(self, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Hyper:
        """The noise that the residuals show: their root mean square."""
        if self.noise is not None:
            return hyper
        residuals = outputs.double() - _standardised(targets.reshape(outputs.shape), hyper)
        square = _by_output(residuals).square().mean(0)
        return hyper | {"log_noise": 0.5 * square.clamp_min(1e-12).log()}

    def log_prob(self, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Tensor:
        """Log density in the targets' own units, summed over the outputs of a row."""
        standard = _standardised(targets.reshape(outputs.shape), hyper).to(outputs.dtype)
        log_noise = hyper["log_noise"].to(outputs.dtype)
        density = -0.5 * (((standard - outputs) / log_noise.exp()) ** 2 + math.log(2 * math.pi)) - log_noise
        return (density - hyper["target_scale"].log().to(outputs.dtype)).flatten(1).sum(1)

    def baseline(self, targets: Tensor) -> float:
        """A constant mean with the spread of the targets as noise (or the noise given)."""
        rows = _by_output(targets)
        variance = rows.var(0, correction=0).clamp_min(1e-12)
        noise = torch.full_like(variance, self.noise**2) if self.noise is not None else variance
        per_position = -0.5 * (variance / noise + (2 * math.pi * noise).log()).sum()
        return float(per_position) * len(rows) / len(targets)

    def _fisher_root(self, outputs: Tensor, hyper: Hyper) -> Tensor:
        """F = 1 / noise^2."""
        return (-hyper["log_noise"]).exp().to(outputs.dtype).expand(outputs.shape)

    def predictive(self, outputs: Tensor, hyper: Hyper) -> GaussianPredictive:
        """A Gaussian around each draw's output, in the targets' units."""
        return _gaussian_predictive(outputs, 2 * _per_draw(hyper["log_noise"], outputs, base=1), hyper)


@dataclass(frozen=True)
class HeteroscedasticGaussian(_DiagonalFisher):
    """Real targets [B, D] whose noise depends on the input: outputs [B, 2 D] are D means, then D log variances."""

    standardise: bool = False  # let the network predict targets of zero mean and unit variance
    kind: ClassVar[Kind] = "regression"
    tempered: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_knobs(self)

    def check_targets(self, targets: Tensor) -> None:
        """Targets are finite real numbers."""
        _check_real("HeteroscedasticGaussian", targets)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Two outputs, a mean and a log variance, for each target."""
        self.check_targets(targets)
        _check_shape("HeteroscedasticGaussian", outputs, targets, per_target=2)

    def initial_hyper(self, targets: Tensor) -> Hyper:
        """The targets' units."""
        return _units(targets, self.standardise)

    def fitted_hyper(self, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Hyper:
        """Nothing to learn: the noise is an output."""
        return hyper

    def log_prob(self, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Tensor:
        """Log density in the targets' own units, summed over the targets of a row."""
        mean, log_variance = outputs.chunk(2, -1)
        standard = _standardised(targets.reshape(mean.shape), hyper).to(mean.dtype)
        density = -0.5 * ((standard - mean) ** 2 * (-log_variance).exp() + log_variance + math.log(2 * math.pi))
        return (density - hyper["target_scale"].log().to(mean.dtype)).flatten(1).sum(1)

    def baseline(self, targets: Tensor) -> float:
        """A constant mean and the spread of the targets as noise."""
        return Gaussian().baseline(targets)

    def _fisher_root(self, outputs: Tensor, hyper: Hyper) -> Tensor:
        """F = diag(1 / variance, 1/2), where the Hessian is indefinite."""
        mean, log_variance = outputs.chunk(2, -1)
        return torch.cat([(-log_variance / 2).exp(), torch.full_like(mean, math.sqrt(0.5))], -1)

    def predictive(self, outputs: Tensor, hyper: Hyper) -> GaussianPredictive:
        """A Gaussian with its own variance for each draw, in the targets' units."""
        mean, log_variance = outputs.chunk(2, -1)
        return _gaussian_predictive(mean, log_variance, hyper)


@dataclass(frozen=True)
class Poisson(_NothingLearned, _DiagonalFisher):
    """Counts [B, D]: outputs are log rates."""

    kind: ClassVar[Kind] = "regression"
    tempered: ClassVar[bool] = False

    def check_targets(self, targets: Tensor) -> None:
        """Targets are counts."""
        values = targets.double()
        bad = ~((values >= 0) & (values == values.floor()) & values.isfinite())
        if bool(bad.any()):
            raise ValueError(
                f"Poisson needs counts 0, 1, 2, ..., got {_examples(targets[bad])}: "
                "clean them, or use Gaussian() for real targets"
            )

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """One count for each log rate."""
        self.check_targets(targets)
        _check_shape("Poisson", outputs, targets)

    def log_prob(self, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Tensor:
        """Log probability of the counts of a row."""
        counts, log_rates = targets.reshape(outputs.shape).double(), outputs.double()  # large terms that nearly cancel
        log_probs = counts * log_rates - log_rates.exp() - torch.lgamma(counts + 1)
        return log_probs.flatten(1).sum(1).to(outputs.dtype)

    def baseline(self, targets: Tensor) -> float:
        """One rate an output for all rows."""
        counts = _by_output(targets)
        rate = counts.mean(0)
        return float((torch.special.xlogy(counts, rate) - rate - torch.lgamma(counts + 1)).sum()) / len(targets)

    def _fisher_root(self, outputs: Tensor, hyper: Hyper) -> Tensor:
        """F = rate."""
        return (outputs / 2).exp()

    def predictive(self, outputs: Tensor, hyper: Hyper) -> PoissonPredictive:
        """A Poisson at each draw's rate."""
        return PoissonPredictive(_within_range(outputs.exp()))


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _examples(values: Tensor) -> str:
    shown = ", ".join(f"{float(value):g}" for value in values[:3])
    return f"{shown}, ... ({len(values)} such)" if len(values) > 3 else shown


def _by_output(targets: Tensor) -> Tensor:
    """Rows and positions by outputs, [N, D], float64; targets [B] are one output."""
    return targets.reshape(-1, targets.shape[-1] if targets.ndim > 1 else 1).double()


def _check_shape(name: str, outputs: Tensor, targets: Tensor, per_target: int = 1) -> None:
    positions, width = (targets.shape[:-1], targets.shape[-1]) if targets.ndim > 1 else (targets.shape, 1)
    wanted = (*positions, per_target * width)
    if _shape(outputs) != wanted:
        count = "one output" if per_target == 1 else "two outputs, a mean and a log variance,"
        raise ValueError(
            f"{name} needs {count} for each target: targets {_shape(targets)} need outputs {wanted}, "
            f"got {_shape(outputs)}: change the network's last layer, or reshape the targets"
        )


def _check_real(name: str, targets: Tensor) -> None:
    if not targets.is_floating_point():
        raise ValueError(
            f"{name} needs real targets, got {targets.dtype}: use targets.float(), or Categorical() for classes"
        )
    bad = ~torch.isfinite(targets)
    if bool(bad.any()):
        row = int(bad.nonzero()[0, 0])
        raise ValueError(
            f"{name} needs finite targets, but row {row} holds {_examples(targets[row][bad[row]])}: "
            "clean or leave out such rows"
        )


def _standard_normal(like: Tensor, rng: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=rng, dtype=like.dtype, device=rng.device).to(like.device)


def _units(targets: Tensor, standardise: bool) -> Hyper:
    """Mean and scale of the targets, [D] each; 0 and 1 when they are left as they are."""
    rows = _by_output(targets)
    if not standardise:
        return {"target_mean": rows.new_zeros(rows.shape[1]), "target_scale": rows.new_ones(rows.shape[1])}
    equal = rows.amin(0) == rows.amax(0)
    if bool(equal.any()):
        output = int(equal.nonzero()[0])
        raise ValueError(
            f"standardise=True needs targets that vary, but those of output {output} are all "
            f"{float(rows[0, output]):g}: leave that output out, or use standardise=False"
        )
    return {"target_mean": rows.mean(0), "target_scale": rows.std(0, correction=0)}


def _standardised(targets: Tensor, hyper: Hyper) -> Tensor:
    return (targets.double() - hyper["target_mean"]) / hyper["target_scale"]


def _per_draw(value: Tensor, outputs: Tensor, base: int) -> Tensor:
    """A hyperparameter of `base` axes, with or without a draw axis, shaped to broadcast to outputs [S, B, ..., D]."""
    if value.ndim > base:
        value = value.reshape(len(value), *[1] * (outputs.ndim - 1 - base), *value.shape[1:])
    return value.to(outputs)


def _temperature(hyper: Hyper, outputs: Tensor) -> Tensor:
    return _per_draw(hyper.get("temperature", torch.ones(())), outputs, base=0)


def _gaussian_predictive(means: Tensor, log_variances: Tensor, hyper: Hyper) -> GaussianPredictive:
    """Components in the targets' units; a temperature multiplies the noise variance."""
    scale, shift = (_per_draw(hyper[name], means, base=1) for name in ("target_scale", "target_mean"))
    variances = _within_range(log_variances.exp() * _temperature(hyper, means) * scale**2).expand_as(means)
    return GaussianPredictive(means * scale + shift, variances, noise=variances.mean(0))


def _within_range(values: Tensor) -> Tensor:
    """Off zero and infinity, where the exponential of an extreme output ends, with room to sum over draws."""
    limits = torch.finfo(values.dtype)
    return values.clamp(limits.tiny, limits.max**0.9)
