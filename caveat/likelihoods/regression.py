"""Likelihoods of numbers: Gaussian noise of one level or of a level that depends on the input, and counts."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from caveat.knobs import Positive, check_knobs
from caveat.likelihoods.protocol import (
    DiagonalFisher,
    Hyper,
    NothingLearned,
    TargetFault,
    by_output,
    check_shape,
    examples,
    per_draw,
    temperature,
    within_range,
)
from caveat.predictive import GaussianPredictive, Kind, PoissonPredictive

__all__ = ["Gaussian", "HeteroscedasticGaussian", "Poisson"]


@dataclass(frozen=True)
class Gaussian(DiagonalFisher):
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
        """Raise a ValueError unless targets are finite real numbers."""
        _check_real("Gaussian", targets)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise a ValueError unless there is one finite target for each output."""
        self.check_targets(targets)
        check_shape("Gaussian", outputs, targets)

    def initial_hyper(self, targets: Tensor) -> Hyper:
        """The targets' units, and noise as large as the targets' spread (what a network that knows nothing leaves)."""
        units = _units(targets, self.standardise)
        if self.noise is not None:
            log_noise = (self.noise / units["target_scale"]).log()
        else:
            spread = by_output(targets).std(0, correction=0) / units["target_scale"]
            log_noise = spread.clamp_min(1e-6).log()
        return units | {"log_noise": log_noise}

    def fitted_hyper(self, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Hyper:
        """The noise that the residuals show: their root mean square."""
        if self.noise is not None:
            return hyper
        residuals = outputs.double() - _standardised(targets.reshape(outputs.shape), hyper)
        square = by_output(residuals).square().mean(0)
        return hyper | {"log_noise": 0.5 * square.clamp_min(1e-12).log()}

    def log_prob(self, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Tensor:
        """Log density in the targets' own units, summed over the outputs of a row."""
        standard = _standardised(targets.reshape(outputs.shape), hyper).to(outputs.dtype)
        log_noise = hyper["log_noise"].to(outputs.dtype)
        density = -0.5 * (((standard - outputs) / log_noise.exp()) ** 2 + math.log(2 * math.pi)) - log_noise
        return (density - hyper["target_scale"].log().to(outputs.dtype)).flatten(1).sum(1)

    def baseline(self, targets: Tensor) -> float:
        """A constant mean with the spread of the targets as noise (or the noise given)."""
        rows = by_output(targets)
        variance = rows.var(0, correction=0).clamp_min(1e-12)
        noise = torch.full_like(variance, self.noise**2) if self.noise is not None else variance
        per_position = -0.5 * (variance / noise + (2 * math.pi * noise).log()).sum()
        return float(per_position) * len(rows) / len(targets)

    def _fisher_root(self, outputs: Tensor, hyper: Hyper) -> Tensor:
        """F = 1 / noise^2."""
        return (-hyper["log_noise"]).exp().to(outputs.dtype).expand(outputs.shape)

    def predictive(self, outputs: Tensor, hyper: Hyper) -> GaussianPredictive:
        """A Gaussian around each draw's output, in the targets' units."""
        return _gaussian_predictive(outputs, 2 * per_draw(hyper["log_noise"], outputs, base=1), hyper)

    def closed_predictive(self, mean: Tensor, variance: Tensor, hyper: Hyper) -> GaussianPredictive:
        """A Gaussian, exactly: its variance is the outputs' and the noise's."""
        return _with_variance(self.predictive(mean.unsqueeze(0), hyper), variance, hyper)


@dataclass(frozen=True)
class HeteroscedasticGaussian(DiagonalFisher):
    """Real targets [B, D] whose noise depends on the input: outputs [B, 2 D] are D means, then D log variances."""

    standardise: bool = False  # let the network predict targets of zero mean and unit variance
    kind: ClassVar[Kind] = "regression"
    tempered: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_knobs(self)

    def check_targets(self, targets: Tensor) -> None:
        """Raise a ValueError unless targets are finite real numbers."""
        _check_real("HeteroscedasticGaussian", targets)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise a ValueError unless there are two outputs, a mean and a log variance, for each target."""
        self.check_targets(targets)
        check_shape("HeteroscedasticGaussian", outputs, targets, per_target=2)

    def initial_hyper(self, targets: Tensor) -> Hyper:
        """The units of the targets: their mean and scale, [D] each."""
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

    def closed_predictive(self, mean: Tensor, variance: Tensor, hyper: Hyper) -> GaussianPredictive:
        """The Gaussian of the prediction's own mean and variance; the noise is the mean of a log-normal."""
        (centre, log_noise), (spread, noise_spread) = mean.chunk(2, -1), variance.chunk(2, -1)
        outputs = torch.cat([centre, log_noise + noise_spread / 2], -1)
        return _with_variance(self.predictive(outputs.unsqueeze(0), hyper), spread, hyper)


@dataclass(frozen=True)
class Poisson(NothingLearned, DiagonalFisher):
    """Counts [B, D]: outputs are log rates."""

    kind: ClassVar[Kind] = "regression"
    tempered: ClassVar[bool] = False

    def check_targets(self, targets: Tensor) -> None:
        """Raise a ValueError unless targets are counts."""
        values = targets.double()
        bad = ~((values >= 0) & (values == values.floor()) & values.isfinite())
        if bool(bad.any()):
            raise ValueError(
                f"Poisson needs counts 0, 1, 2, ..., got {examples(targets[bad])}: "
                "clean them, or use Gaussian() for real targets"
            )

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise a ValueError unless there is one count for each log rate."""
        self.check_targets(targets)
        check_shape("Poisson", outputs, targets)

    def log_prob(self, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Tensor:
        """Log probability of the counts of a row."""
        counts, log_rates = targets.reshape(outputs.shape).double(), outputs.double()  # large terms that nearly cancel
        log_probs = counts * log_rates - log_rates.exp() - torch.lgamma(counts + 1)
        return log_probs.flatten(1).sum(1).to(outputs.dtype)

    def baseline(self, targets: Tensor) -> float:
        """One rate an output for all rows."""
        counts = by_output(targets)
        rate = counts.mean(0)
        return float((torch.special.xlogy(counts, rate) - rate - torch.lgamma(counts + 1)).sum()) / len(targets)

    def _fisher_root(self, outputs: Tensor, hyper: Hyper) -> Tensor:
        """F = rate."""
        return (outputs / 2).exp()

    def predictive(self, outputs: Tensor, hyper: Hyper) -> PoissonPredictive:
        """A Poisson at each draw's rate."""
        return PoissonPredictive(within_range(outputs.exp()))

    def closed_predictive(self, mean: Tensor, variance: Tensor, hyper: Hyper) -> PoissonPredictive:
        """Raise a ValueError: a Poisson prediction has no closed form."""
        raise ValueError("a Poisson prediction has no closed form: use prediction='samples'")


def _check_real(name: str, targets: Tensor) -> None:
    if not targets.is_floating_point():
        raise ValueError(
            f"{name} needs real targets, got {targets.dtype}: use targets.float(), or Categorical() for classes"
        )
    bad = ~torch.isfinite(targets)
    if bool(bad.any()):
        row = int(bad.nonzero()[0, 0])
        held = examples(targets[row][bad[row]])
        raise TargetFault(
            f"{name} needs finite targets, but row {{row}} holds {held}: clean or leave out such rows", row
        )


def _units(targets: Tensor, standardise: bool) -> Hyper:
    """Mean and scale of the targets, [D] each; 0 and 1 when they are left as they are."""
    rows = by_output(targets)
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


def _gaussian_predictive(means: Tensor, log_variances: Tensor, hyper: Hyper) -> GaussianPredictive:
    """Components in the targets' units; a temperature multiplies the noise variance."""
    scale, shift = (per_draw(hyper[name], means, base=1) for name in ("target_scale", "target_mean"))
    variances = within_range(log_variances.exp() * temperature(hyper, means) * scale**2).expand_as(means)
    return GaussianPredictive(means * scale + shift, variances, noise=variances.mean(0))


def _with_variance(prediction: GaussianPredictive, variance: Tensor, hyper: Hyper) -> GaussianPredictive:
    """A single component that is wider by the variance of its mean, given in the outputs' units."""
    scale = per_draw(hyper["target_scale"], prediction.means, base=1)
    wider = prediction.variances + within_range(variance.clamp_min(0) * scale**2)
    return GaussianPredictive(prediction.means, wider, prediction.noise)
