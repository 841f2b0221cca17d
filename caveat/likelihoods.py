"""Likelihoods: what a network's outputs say about its targets. One protocol, shared by every method.

`hyper` holds what a likelihood learns beside the weights (log noise, the units of the targets) and what is tuned after
training (a temperature). Each entry has the shape given here, or one more leading axis when each posterior draw has its own.
The Fisher information F of the outputs is handed out as a factor R with R R^T = F, because F is positive semi-definite
for every likelihood here while the Hessian is not (heteroscedastic regression).
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from caveat.knobs import Positive, check_knobs
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
        """Log likelihood of each row, [B]."""

    def baseline(self, targets: Tensor) -> float:
        """Mean log likelihood of a row under the best prediction that ignores the inputs."""

    def fisher_factor(self, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Tensor:
        """R with R R^T = Fisher information of the outputs, [B, ..., C, C]."""

    def sample_noise(self, outputs: Tensor, targets: Tensor, hyper: Hyper, rng: torch.Generator) -> Tensor:
        """R e with e standard normal: noise of the outputs' shape whose covariance is the Fisher information."""

    def predictive(self, outputs: Tensor, hyper: Hyper) -> Predictive:
        """The prediction from outputs [S, B, ...] of S draws."""


@dataclass(frozen=True)
class Categorical:
    """One of C classes: softmax over logits [B, C], [B, C, H, W] or, with class_axis=-1, [B, T, C]."""

    class_axis: int = 1  # where the classes are in the outputs
    ignore_index: int = -100  # targets of this value are left out
    class_weights: tuple[float, ...] | None = None  # multiply the log likelihood of each class
    kind: ClassVar[Kind] = "classification"
    tempered: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_knobs(self)

    def _classes_last(self, outputs: Tensor) -> Tensor:
        return outputs.movedim(self.class_axis, -1)

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
        if outputs.ndim < 2 or not -outputs.ndim <= self.class_axis < outputs.ndim:
            raise ValueError(f"Categorical(class_axis={self.class_axis}) needs logits [batch, classes], got {_shape(outputs)}")
        logits = self._classes_last(outputs)
        if logits.shape[:-1] != targets.shape:
            raise ValueError(
                f"logits of shape {_shape(outputs)} need labels of shape {tuple(logits.shape[:-1])}, got {_shape(targets)}"
            )
        classes = logits.shape[-1]
        if self.class_weights is not None and len(self.class_weights) != classes:
            raise ValueError(f"{len(self.class_weights)} class weights for {classes} classes")
        kept = targets[targets != self.ignore_index]
        if kept.numel() and (int(kept.min()) < 0 or int(kept.max()) >= classes):
            raise ValueError(
                f"labels run from {int(kept.min())} to {int(kept.max())}, but the network has {classes} outputs "
                f"(labels 0 to {classes - 1}): check the labels, or give the network {int(kept.max()) + 1} outputs"
            )

    def initial_hyper(self, targets: Tensor) -> Hyper:
        """Nothing to learn."""
        return {}

    def fitted_hyper(self, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Hyper:
        """Nothing to learn."""
        return hyper

    def log_prob(self, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Tensor:
        """Weighted log softmax at the label, summed over the positions of a row."""
        logits = outputs.movedim(self.class_axis, 1)
        weights = None if self.class_weights is None else logits.new_tensor(self.class_weights)
        loss = F.cross_entropy(logits, targets.long(), weights, ignore_index=self.ignore_index, reduction="none")
        return -loss.flatten(1).sum(1) if loss.ndim > 1 else -loss

    def baseline(self, targets: Tensor) -> float:
        """The entropy of the labels' own frequencies."""
        kept = targets[targets != self.ignore_index].flatten()
        counts = torch.bincount(kept).double()
        weights = counts.new_tensor(self.class_weights) if self.class_weights else torch.ones_like(counts)
        share = counts / counts.sum()
        log_share = torch.special.xlogy(share * weights[: len(share)], share).sum()
        return float(log_share) * kept.numel() / max(len(targets), 1)

    def _position_weight(self, logits: Tensor, targets: Tensor) -> Tensor:
        kept = (targets != self.ignore_index).to(logits.dtype)
        if self.class_weights is None:
            return kept
        return kept * logits.new_tensor(self.class_weights)[targets.masked_fill(targets == self.ignore_index, 0)]

    def fisher_factor(self, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Tensor:
        """R = diag(sqrt p) - p sqrt(p)^T, exact: R R^T = diag(p) - p p^T."""
        logits = self._classes_last(outputs)
        p = logits.softmax(-1)
        factor = torch.diag_embed(p.sqrt()) - p.unsqueeze(-1) * p.sqrt().unsqueeze(-2)
        return factor * self._position_weight(logits, targets).sqrt()[..., None, None]

    def sample_noise(self, outputs: Tensor, targets: Tensor, hyper: Hyper, rng: torch.Generator) -> Tensor:
        """sqrt(p) e - p (sqrt(p) . e) without forming R."""
        logits = self._classes_last(outputs)
        p = logits.softmax(-1)
        scaled = p.sqrt() * _standard_normal(p, rng)
        noise = (scaled - p * scaled.sum(-1, keepdim=True)) * self._position_weight(logits, targets).sqrt().unsqueeze(-1)
        return noise.movedim(-1, self.class_axis)

    def predictive(self, outputs: Tensor, hyper: Hyper) -> CategoricalPredictive:
        """Softmax of logits / temperature for each draw."""
        axis = self.class_axis + 1 if self.class_axis >= 0 else self.class_axis
        logits = outputs.movedim(axis, -1)
        return CategoricalPredictive((logits / _temperature(hyper, logits)).log_softmax(-1), self.ignore_index)


@dataclass(frozen=True)
class Bernoulli:
    """Yes or no: one logit for a binary target [B] or [B, 1], or one for each of several labels [B, K]."""

    kind: ClassVar[Kind] = "classification"
    tempered: ClassVar[bool] = True

    def check_targets(self, targets: Tensor) -> None:
        """Targets lie in [0, 1]."""
        if targets.numel() and not bool(((targets >= 0) & (targets <= 1)).all()):
            raise ValueError(f"Bernoulli needs targets in [0, 1], got {_extremes(targets)}: use Categorical() for classes")

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """One target for each logit."""
        self.check_targets(targets)
        _check_count("Bernoulli", outputs, targets)

    def initial_hyper(self, targets: Tensor) -> Hyper:
        """Nothing to learn."""
        return {}

    def fitted_hyper(self, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Hyper:
        """Nothing to learn."""
        return hyper

    def log_prob(self, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Tensor:
        """Log probability of the targets, summed over the labels of a row."""
        targets = targets.reshape(outputs.shape).to(outputs.dtype)
        return -F.binary_cross_entropy_with_logits(outputs, targets, reduction="none").reshape(len(outputs), -1).sum(1)

    def baseline(self, targets: Tensor) -> float:
        """The entropy of each label's own frequency."""
        share = targets.double().reshape(len(targets), -1).mean(0)
        return float((torch.special.xlogy(share, share) + torch.special.xlogy(1 - share, 1 - share)).sum())

    def fisher_factor(self, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Tensor:
        """diag(sqrt(p (1 - p)))."""
        return torch.diag_embed(_bernoulli_std(_at_least_two(outputs)))

    def sample_noise(self, outputs: Tensor, targets: Tensor, hyper: Hyper, rng: torch.Generator) -> Tensor:
        """sqrt(p (1 - p)) e."""
        return _bernoulli_std(outputs) * _standard_normal(outputs, rng)

    def predictive(self, outputs: Tensor, hyper: Hyper) -> BernoulliPredictive:
        """Sigmoid of logits / temperature for each draw."""
        return BernoulliPredictive(outputs / _temperature(hyper, outputs))


@dataclass(frozen=True)
class Gaussian:
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
        _check_count("Gaussian", outputs, targets)

    def initial_hyper(self, targets: Tensor) -> Hyper:
        """The targets' units, and noise as large as the targets' spread (what a network that knows nothing leaves)."""
        units = _units(targets, self.standardise)
        if self.noise is not None:
            log_noise = (self.noise / units["target_scale"]).log()
        else:
            spread = targets.reshape(-1, _width(targets)).double().std(0, correction=0) / units["target_scale"]
            log_noise = spread.clamp_min(1e-6).log()
        return units | {"log_noise": log_noise}

    def fitted_hyper(self, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Hyper:
        """The noise that the residuals show: their root mean square."""
        if self.noise is not None:
            return hyper
        residuals = outputs.double() - _standardised(targets.reshape(outputs.shape), hyper)
        square = residuals.reshape(-1, outputs.shape[-1]).square().mean(0)
        return hyper | {"log_noise": (0.5 * square.clamp_min(1e-12).log()).to(hyper["log_noise"].dtype)}

    def log_prob(self, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Tensor:
        """Log density in the targets' own units, summed over the outputs of a row."""
        standard = _standardised(targets.reshape(outputs.shape), hyper).to(outputs.dtype)
        log_noise = hyper["log_noise"].to(outputs.dtype)
        density = -0.5 * (((standard - outputs) / log_noise.exp()) ** 2 + math.log(2 * math.pi)) - log_noise
        return (density - hyper["target_scale"].log().to(outputs.dtype)).reshape(len(outputs), -1).sum(1)

    def baseline(self, targets: Tensor) -> float:
        """A constant mean with the spread of the targets as noise (or the noise given)."""
        flat = targets.reshape(-1, _width(targets)).double()
        variance = flat.var(0, correction=0).clamp_min(1e-12)
        noise = torch.full_like(variance, self.noise**2) if self.noise is not None else variance
        per_position = -0.5 * (variance / noise + (2 * math.pi * noise).log()).sum()
        return float(per_position) * len(flat) / max(len(targets), 1)

    def fisher_factor(self, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Tensor:
        """I / noise."""
        return torch.diag_embed((-hyper["log_noise"]).exp().to(outputs.dtype).expand(outputs.shape))

    def sample_noise(self, outputs: Tensor, targets: Tensor, hyper: Hyper, rng: torch.Generator) -> Tensor:
        """Noise of standard deviation 1 / noise."""
        return _standard_normal(outputs, rng) * (-hyper["log_noise"]).exp().to(outputs.dtype)

    def predictive(self, outputs: Tensor, hyper: Hyper) -> GaussianPredictive:
        """A Gaussian around each draw's output, in the targets' units."""
        noise = _per_draw(hyper["log_noise"], outputs, base=1).exp() ** 2
        return _gaussian_predictive(outputs, noise, hyper)


@dataclass(frozen=True)
class HeteroscedasticGaussian:
    """Real targets [B, D] whose noise depends on the input: outputs [B, 2 D] are D means, then D log variances."""

    standardise: bool = False  # let the network predict targets of zero mean and unit variance
    kind: ClassVar[Kind] = "regression"
    tempered: ClassVar[bool] = True

    def check_targets(self, targets: Tensor) -> None:
        """Targets are finite real numbers."""
        _check_real("HeteroscedasticGaussian", targets)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Two outputs, a mean and a log variance, for each target."""
        self.check_targets(targets)
        if outputs.ndim < 2 or outputs.shape[-1] % 2 or outputs.numel() != 2 * targets.numel():
            raise ValueError(
                f"HeteroscedasticGaussian needs a mean and a log variance for each target: targets {_shape(targets)} need "
                f"outputs [batch, {2 * _width(targets)}], got {_shape(outputs)}"
            )

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
        return (density - hyper["target_scale"].log().to(mean.dtype)).reshape(len(outputs), -1).sum(1)

    def baseline(self, targets: Tensor) -> float:
        """A constant mean and the spread of the targets as noise."""
        return Gaussian().baseline(targets)

    def fisher_factor(self, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Tensor:
        """diag(exp(-log variance / 2), sqrt(1/2)): the Fisher information, where the Hessian is indefinite."""
        return torch.diag_embed(_heteroscedastic_scale(outputs))

    def sample_noise(self, outputs: Tensor, targets: Tensor, hyper: Hyper, rng: torch.Generator) -> Tensor:
        """R e for the diagonal R above."""
        return _heteroscedastic_scale(outputs) * _standard_normal(outputs, rng)

    def predictive(self, outputs: Tensor, hyper: Hyper) -> GaussianPredictive:
        """A Gaussian with its own variance for each draw, in the targets' units."""
        mean, log_variance = outputs.chunk(2, -1)
        return _gaussian_predictive(mean, log_variance.exp(), hyper)


@dataclass(frozen=True)
class Poisson:
    """Counts [B, D]: outputs are log rates."""

    kind: ClassVar[Kind] = "regression"
    tempered: ClassVar[bool] = False

    def check_targets(self, targets: Tensor) -> None:
        """Targets are counts."""
        values = targets.double()
        if targets.numel() and not bool(((values >= 0) & (values == values.floor()) & values.isfinite()).all()):
            raise ValueError(f"Poisson needs counts 0, 1, 2, ..., got {_extremes(targets)}: use Gaussian() for real targets")

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """One count for each log rate."""
        self.check_targets(targets)
        _check_count("Poisson", outputs, targets)

    def initial_hyper(self, targets: Tensor) -> Hyper:
        """Nothing to learn."""
        return {}

    def fitted_hyper(self, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Hyper:
        """Nothing to learn."""
        return hyper

    def log_prob(self, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Tensor:
        """Log probability of the counts of a row."""
        counts = targets.reshape(outputs.shape).to(outputs.dtype)
        return (counts * outputs - outputs.exp() - torch.lgamma(counts + 1)).reshape(len(outputs), -1).sum(1)

    def baseline(self, targets: Tensor) -> float:
        """One rate for all rows."""
        counts = targets.reshape(-1, _width(targets)).double()
        rate = counts.mean(0).clamp_min(1e-12)
        per_position = (counts * rate.log() - rate - torch.lgamma(counts + 1)).sum()
        return float(per_position) / max(len(targets), 1)

    def fisher_factor(self, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Tensor:
        """diag(sqrt(rate))."""
        return torch.diag_embed((outputs / 2).exp())

    def sample_noise(self, outputs: Tensor, targets: Tensor, hyper: Hyper, rng: torch.Generator) -> Tensor:
        """sqrt(rate) e."""
        return (outputs / 2).exp() * _standard_normal(outputs, rng)

    def predictive(self, outputs: Tensor, hyper: Hyper) -> PoissonPredictive:
        """A Poisson at each draw's rate."""
        return PoissonPredictive(outputs.exp())


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _width(targets: Tensor) -> int:
    return targets.shape[-1] if targets.ndim > 1 else 1


def _extremes(tensor: Tensor) -> str:
    return f"values from {float(tensor.min()):g} to {float(tensor.max()):g}"


def _check_count(name: str, outputs: Tensor, targets: Tensor) -> None:
    if outputs.ndim < 2 or outputs.numel() != targets.numel() or len(outputs) != len(targets):
        wanted = "[batch, outputs]" if targets.ndim < 2 else str(_shape(targets))
        raise ValueError(f"{name} needs one output for each target: targets {_shape(targets)} need outputs {wanted}, got {_shape(outputs)}")


def _check_real(name: str, targets: Tensor) -> None:
    if not targets.is_floating_point():
        raise ValueError(f"{name} needs real targets, got {targets.dtype}: use targets.float(), or Categorical() for classes")
    bad = ~torch.isfinite(targets)
    if bool(bad.any()):
        row = int(bad.reshape(len(targets), -1).any(1).nonzero()[0])
        raise ValueError(f"{name} needs finite targets, but row {row} holds {targets[row].flatten().tolist()[:3]}")


def _standard_normal(like: Tensor, rng: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=rng, dtype=like.dtype, device=rng.device).to(like.device)


def _at_least_two(outputs: Tensor) -> Tensor:
    return outputs if outputs.ndim > 1 else outputs.unsqueeze(-1)


def _bernoulli_std(logits: Tensor) -> Tensor:
    return (logits.sigmoid() * (-logits).sigmoid()).sqrt()


def _heteroscedastic_scale(outputs: Tensor) -> Tensor:
    mean, log_variance = outputs.chunk(2, -1)
    return torch.cat([(-log_variance / 2).exp(), torch.full_like(mean, math.sqrt(0.5))], -1)


def _units(targets: Tensor, standardise: bool) -> Hyper:
    """Mean and scale of the targets, [D] each; 0 and 1 when they are left as they are."""
    flat = targets.reshape(-1, _width(targets)).double()
    if not standardise:
        return {"target_mean": torch.zeros_like(flat[0]), "target_scale": torch.ones_like(flat[0])}
    scale = flat.std(0, correction=0)
    if bool((scale == 0).any()):
        raise ValueError("standardise=True needs targets that vary, but an output's targets are all equal")
    return {"target_mean": flat.mean(0), "target_scale": scale}


def _standardised(targets: Tensor, hyper: Hyper) -> Tensor:
    return (targets.double() - hyper["target_mean"]) / hyper["target_scale"]


def _per_draw(value: Tensor, outputs: Tensor, base: int) -> Tensor:
    """Shape a hyperparameter of `base` axes, with or without a draw axis, to broadcast against outputs [S, B, ..., D]."""
    if value.ndim > base:
        value = value.reshape(len(value), *[1] * (outputs.ndim - 1 - base), *value.shape[1:])
    return value.to(outputs.dtype)


def _temperature(hyper: Hyper, outputs: Tensor) -> Tensor:
    return _per_draw(hyper.get("temperature", torch.ones(())), outputs, base=0).to(outputs.device)


def _gaussian_predictive(means: Tensor, noise_variance: Tensor, hyper: Hyper) -> GaussianPredictive:
    """Components in the targets' units; a temperature multiplies the noise variance."""
    scale, shift = hyper["target_scale"].to(means.dtype), hyper["target_mean"].to(means.dtype)
    variances = (noise_variance * _temperature(hyper, means) * scale**2).expand_as(means)
    return GaussianPredictive(means * scale + shift, variances, noise=variances.mean(0))
