"""Priors over the weights: normalised log densities that can be sampled.

`log_prob(params)` sums over every weight given. Gaussian priors also say their `precision`, which curvature methods add
to the GGN; a correlated prior (EmpCov) maps to and from independent standard normals with `whiten` and `unwhiten`.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from caveat.batches import slices
from caveat.knobs import Positive, check_knobs

__all__ = [
    "EmpCovPrior",
    "GaussianMixturePrior",
    "GaussianPrior",
    "LaplacePrior",
    "LogisticPrior",
    "Params",
    "Prior",
    "StudentTPrior",
    "gaussian_precisions",
    "weight_decay",
]

Params = dict[str, Tensor]


class Prior(Protocol):
    """What a method may ask of a prior."""

    def log_prob(self, params: Params) -> Tensor:
        """Normalised log density of all weights together, a scalar."""

    def sample(self, like: Params, rng: torch.Generator) -> Params:
        """One draw, shaped as the weights given."""


@dataclass(frozen=True)
class GaussianPrior:
    """Independent N(0, 1/precision): one precision, or one for each name pattern, layer or weight.

    A mapping goes from name patterns (`"fc1.*"`, first match counts) to a number or a tensor shaped as the weight.
    """

    precision: float | Mapping[str, float | Tensor] = 1.0

    def __post_init__(self) -> None:
        for value in self._patterns().values():
            if not isinstance(value, int | float | Tensor) or not bool(_positive(torch.as_tensor(value)).all()):
                raise ValueError(f"GaussianPrior(precision={value!r}): must be numbers or tensors, finite and above 0")

    def _patterns(self) -> Mapping[str, float | Tensor]:
        return self.precision if isinstance(self.precision, Mapping) else {"*": self.precision}

    def of(self, name: str, weight: Tensor) -> Tensor:
        """The precision of one weight tensor: of no axes, or of the weight's shape."""
        for pattern, value in self._patterns().items():
            if fnmatchcase(name, pattern):
                if not isinstance(value, Tensor):  # filled in: a GPU would wait for the host's copy of it
                    return torch.full((), value, dtype=weight.dtype, device=weight.device)
                precision = value.to(weight.device, weight.dtype)
                if precision.ndim and precision.shape != weight.shape:
                    raise ValueError(
                        f"GaussianPrior has precisions of shape {tuple(precision.shape)} for {name!r}, which has shape "
                        f"{tuple(weight.shape)}: give a number, or one precision a weight"
                    )
                return precision
        raise ValueError(
            f"GaussianPrior has no precision for {name!r}: its patterns are {list(self._patterns())}; add one, or '*'"
        )

    def log_prob(self, params: Params) -> Tensor:
        """-(precision w^2 - log precision + log 2 pi) / 2, summed."""
        return _total(
            -0.5 * ((p := self.of(name, w)) * w.square() - p.log() + math.log(2 * math.pi)).sum()
            for name, w in params.items()
        )

    def sample(self, like: Params, rng: torch.Generator) -> Params:
        """Normal draws."""
        return {name: _normal(w, rng) / self.of(name, w).sqrt() for name, w in like.items()}


def gaussian_precisions(prior: Prior, weights: Mapping[str, Tensor]) -> Params | None:
    """The precision of each weight tensor, of no axes or of the tensor's shape; None unless a `GaussianPrior`.

    Methods that need a Gaussian prior with independent weights, or gain from one, ask here.
    """
    if not isinstance(prior, GaussianPrior):
        return None
    return {name: prior.of(name, weight) for name, weight in weights.items()}


def weight_decay(precisions: Params | None, rows: int) -> dict[str, float] | None:
    """A Gaussian prior as the decay of each weight tensor; None where the prior has to be in the loss instead.

    The gradient of -log p(w) / rows is precision / rows times the weight.

    Args:
        precisions: of each tensor, as `gaussian_precisions` gives them: None for a prior that is not Gaussian.
        rows: of the training data.
    """
    if precisions is None or any(precision.numel() > 1 for precision in precisions.values()):
        return None
    return {name: float(precision) / rows for name, precision in precisions.items()}


@dataclass(frozen=True)
class LaplacePrior:
    """Independent Laplace(0, scale): variance 2 scale^2."""

    scale: Positive = 1.0

    def __post_init__(self) -> None:
        check_knobs(self)

    def log_prob(self, params: Params) -> Tensor:
        """-|w| / scale - log(2 scale), summed."""
        return _total((-w.abs() / self.scale - math.log(2 * self.scale)).sum() for w in params.values())

    def sample(self, like: Params, rng: torch.Generator) -> Params:
        """By the inverse of the distribution function."""
        return _each(like, rng, lambda u: -self.scale * (u - 0.5).sign() * torch.log1p(-2 * (u - 0.5).abs()))


@dataclass(frozen=True)
class StudentTPrior:
    """Independent Student-t with location 0: heavier tails the fewer the degrees of freedom."""

    scale: Positive = 1.0
    degrees: Positive = 4.0  # of freedom

    def __post_init__(self) -> None:
        check_knobs(self)

    def log_prob(self, params: Params) -> Tensor:
        """The t density, summed."""
        nu = self.degrees
        constant = math.lgamma((nu + 1) / 2) - math.lgamma(nu / 2) - 0.5 * math.log(nu * math.pi) - math.log(self.scale)
        return _total(
            (constant - (nu + 1) / 2 * torch.log1p((w / self.scale) ** 2 / nu)).sum() for w in params.values()
        )

    def sample(self, like: Params, rng: torch.Generator) -> Params:
        """A normal over the root of an independent chi-squared / degrees."""
        return {
            name: self.scale * _normal(w, rng) / (2 / self.degrees * _gamma(self.degrees / 2, w, rng)).sqrt()
            for name, w in like.items()
        }


@dataclass(frozen=True)
class LogisticPrior:
    """Independent logistic with location 0: variance (pi scale)^2 / 3."""

    scale: Positive = 1.0

    def __post_init__(self) -> None:
        check_knobs(self)

    def log_prob(self, params: Params) -> Tensor:
        """-|z| - 2 log(1 + e^-|z|) - log scale with z = w / scale, summed."""
        return _total(
            ((-(z := (w / self.scale).abs())) - 2 * torch.log1p((-z).exp()) - math.log(self.scale)).sum()
            for w in params.values()
        )

    def sample(self, like: Params, rng: torch.Generator) -> Params:
        """By the inverse of the distribution function."""
        return _each(like, rng, lambda u: self.scale * (u.log() - torch.log1p(-u)))


@dataclass(frozen=True)
class GaussianMixturePrior:
    """Independent mixtures of zero-mean Gaussians, such as a spike and a slab."""

    stds: tuple[Positive, ...] = (0.1, 1.0)
    weights: tuple[Positive, ...] = (0.5, 0.5)  # of the components; scaled to sum to one

    def __post_init__(self) -> None:
        check_knobs(self)
        if len(self.stds) != len(self.weights) or not self.stds:
            raise ValueError(
                f"GaussianMixturePrior has {len(self.stds)} stds and {len(self.weights)} weights: "
                "give one of each a component, and at least one component"
            )

    def log_prob(self, params: Params) -> Tensor:
        """Log of the mixture density, summed."""
        total = sum(self.weights)

        def component(w: Tensor, std: float, weight: float) -> Tensor:
            return -0.5 * (w / std) ** 2 - math.log(std) - 0.5 * math.log(2 * math.pi) + math.log(weight / total)

        return _total(
            torch.stack([component(w, s, v) for s, v in zip(self.stds, self.weights, strict=True)]).logsumexp(0).sum()
            for w in params.values()
        )

    def sample(self, like: Params, rng: torch.Generator) -> Params:
        """A component for each weight, then a normal draw from it."""
        drawn: Params = {}
        for name, w in like.items():
            weights = torch.tensor(self.weights, dtype=torch.float64, device=rng.device)
            choice = torch.multinomial(weights, w.numel(), replacement=True, generator=rng).reshape(w.shape)
            drawn[name] = _normal(w, rng) * w.new_tensor(self.stds)[choice.to(w.device)]
        return drawn


@dataclass(frozen=True)
class EmpCovPrior:
    """First-layer filters ~ N(0, alpha Sigma + epsilon I) with Sigma the covariance of inputs (Izmailov et al. 2021b).

    Directions in which the inputs do not vary get a small prior variance, so that weights along them stay small and do
    not harm predictions when shifted inputs do vary there. Every other weight is N(0, 1/precision). Factors are
    float64, and live where `covariance` does: weights on another device cost a copy a call.
    """

    layer: str  # name of the first layer's weight, [out, in] or [out, in, height, width]
    covariance: Tensor = field(repr=False)  # of an input row or patch, [d, d]
    alpha: Positive = 1.0
    epsilon: Positive = 1e-2
    precision: Positive = 1.0  # of every other weight

    def __post_init__(self) -> None:
        check_knobs(self)
        shape = tuple(self.covariance.shape)
        if len(shape) != 2 or shape[0] != shape[1] or not torch.allclose(self.covariance, self.covariance.T):
            raise ValueError(
                f"EmpCovPrior needs a symmetric covariance [d, d] without NaN, and the tensor given, of shape {shape}, "
                "is not one: EmpCovPrior.from_inputs(...) measures it"
            )
        _ = self._factors  # now: what is first computed inside torch.func.grad cannot be kept

    @staticmethod
    def from_inputs(
        layer: str, weight: Tensor, inputs: Tensor, *, alpha: float = 1.0, epsilon: float = 1e-2, precision: float = 1.0
    ) -> "EmpCovPrior":
        """Measure the covariance of what the layer sees: input rows, or all patches of its filter's size."""
        d, rows_at_once = weight[0].numel(), max(1, 2**22 // (inputs[0].numel() * weight[0, 0].numel()))
        shift = _seen_by(weight, inputs[:rows_at_once]).mean(0)  # any point near the mean: less cancels below
        count, total, products = 0, torch.zeros_like(shift), shift.new_zeros(d, d)
        for piece in slices(inputs, rows_at_once):
            rows = _seen_by(weight, piece) - shift  # [rows, d]
            count, total, products = count + len(rows), total + rows.sum(0), products + rows.T @ rows
        covariance = products / count - torch.outer(total, total) / count**2
        return EmpCovPrior(layer, covariance, alpha, epsilon, precision)

    @cached_property
    def _factors(self) -> tuple[Tensor, Tensor, Tensor]:
        """The symmetric square root of alpha Sigma + epsilon I, its inverse, and its log determinant."""
        values, vectors = torch.linalg.eigh(self.covariance.double())
        if float(values[0]) < -1e-4 * float(values.abs().max()):
            raise ValueError(
                f"EmpCovPrior needs a positive semi-definite covariance, but its lowest eigenvalue is "
                f"{float(values[0]):.3g}: EmpCovPrior.from_inputs(...) measures one"
            )
        stds = (self.alpha * values.clamp_min(0) + self.epsilon).sqrt()  # below 0 by rounding only
        return (vectors * stds) @ vectors.T, (vectors / stds) @ vectors.T, stds.log().sum()

    @cached_property
    def _standard(self) -> GaussianPrior:
        """The prior of whitened weights, whose precision is looked at once."""
        return GaussianPrior(1.0)

    @property
    def root(self) -> Tensor:
        """The symmetric square root of alpha Sigma + epsilon I, float64."""
        return self._factors[0]

    def _change(self, params: Params, factor: Tensor, other: float) -> Params:
        """Every filter of the layer times a factor, every other weight times a number."""
        if self.layer not in params:
            raise ValueError(f"EmpCovPrior is about {self.layer!r}, which is not among the weights {list(params)[:8]}")
        weight, d = params[self.layer], len(factor)
        if weight[0].numel() != d:
            raise ValueError(
                f"EmpCovPrior has a covariance of size {d}, but a filter of {self.layer!r} has {weight[0].numel()} "
                "weights: measure it with EmpCovPrior.from_inputs(...)"
            )
        changed = {name: w * other for name, w in params.items()}
        filters = weight.reshape(-1, d).double() @ factor.to(weight.device)
        changed[self.layer] = filters.reshape(weight.shape).to(weight.dtype)
        return changed

    def whiten(self, params: Params) -> Params:
        """Weights to independent standard normals."""
        return self._change(params, self._factors[1], math.sqrt(self.precision))

    def unwhiten(self, params: Params) -> Params:
        """Independent standard normals to weights."""
        return self._change(params, self._factors[0], 1 / math.sqrt(self.precision))

    def log_prob(self, params: Params) -> Tensor:
        """Standard normal density of the whitened weights, less the log determinant of the map."""
        density = self._standard.log_prob(self.whiten(params))
        log_det = len(params[self.layer]) * self._factors[2].to(density)
        others = sum(w.numel() for name, w in params.items() if name != self.layer)
        return density - log_det + 0.5 * others * math.log(self.precision)

    def sample(self, like: Params, rng: torch.Generator) -> Params:
        """Unwhitened standard normals."""
        return self.unwhiten({name: _normal(w, rng) for name, w in like.items()})


def _seen_by(weight: Tensor, x: Tensor) -> Tensor:
    """What a layer multiplies with each of its filters: input rows or patches, [rows, d], float64."""
    if weight.ndim == 4 and x.ndim == 4 and x.shape[1] == weight.shape[1]:
        patches = torch.nn.functional.unfold(x.double(), weight.shape[2:])  # [N, d, positions]
        return patches.transpose(1, 2).flatten(0, 1)
    if weight.ndim == 2 and weight.shape[1] in (x[0].numel(), x.shape[-1]):
        return x.double().reshape(-1, weight.shape[1])
    raise ValueError(
        f"EmpCovPrior knows linear layers [out, in] and convolutions [out, in, height, width], and inputs of shape "
        f"{tuple(x.shape)} do not fit a weight of shape {tuple(weight.shape)}: give the covariance yourself"
    )


def _positive(values: Tensor) -> Tensor:
    return torch.isfinite(values) & (values > 0)


def _total(terms: Iterable[Tensor]) -> Tensor:
    return torch.stack([*terms]).sum()


def _normal(like: Tensor, rng: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=rng, dtype=like.dtype, device=rng.device).to(like.device)


def _gamma(shape: float, like: Tensor, rng: torch.Generator) -> Tensor:
    concentration = torch.full(like.shape, shape, dtype=torch.float64, device=rng.device)
    drawn = torch._standard_gamma(concentration, generator=rng).to(like.device, like.dtype)
    return drawn.clamp_min(torch.finfo(like.dtype).tiny)  # never 0, which a small shape can round to


def _each(like: Params, rng: torch.Generator, transform: Callable[[Tensor], Tensor]) -> Params:
    """Transform uniforms that are never 0 nor 1 (drawn in float64)."""
    drawn: Params = {}
    for name, w in like.items():
        u = torch.rand(w.shape, generator=rng, dtype=torch.float64, device=rng.device).clamp(1e-16, 1 - 1e-16)
        drawn[name] = transform(u).to(w.device, w.dtype)
    return drawn
