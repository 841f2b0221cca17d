"""Priors over the weights: normalised log densities that can be sampled.

`log_prob(params)` sums over every weight given. Gaussian priors also say their `precision`, which curvature methods add
to the GGN; a correlated prior (EmpCov) maps to and from independent standard normals with `whiten` and `unwhiten`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Protocol

import torch
from torch import Tensor

from caveat.batches import Inputs
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
        values = self.precision.values() if isinstance(self.precision, Mapping) else [self.precision]
        for value in values:
            tensor = torch.as_tensor(value)
            if not bool((torch.isfinite(tensor) & (tensor > 0)).all()):
                raise ValueError(f"GaussianPrior(precision={value!r}): must be finite and above 0")

    def of(self, name: str, weight: Tensor) -> Tensor:
        """The precision of one weight tensor, broadcastable to it."""
        if not isinstance(self.precision, Mapping):
            return weight.new_tensor(self.precision)
        for pattern, value in self.precision.items():
            if fnmatchcase(name, pattern):
                return torch.as_tensor(value, dtype=weight.dtype, device=weight.device)
        raise ValueError(f"GaussianPrior has no precision for {name!r}: its patterns are {list(self.precision)}; add one, or '*'")

    def log_prob(self, params: Params) -> Tensor:
        """-(precision w^2 - log precision + log 2 pi) / 2, summed."""
        return _total(
            -0.5 * ((p := self.of(name, w)) * w.square() - p.log() + math.log(2 * math.pi)).sum() for name, w in params.items()
        )

    def sample(self, like: Params, rng: torch.Generator) -> Params:
        """Normal draws."""
        return {name: _normal(w, rng) / self.of(name, w).sqrt() for name, w in like.items()}


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
        return _total((constant - (nu + 1) / 2 * torch.log1p((w / self.scale) ** 2 / nu)).sum() for w in params.values())

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
            raise ValueError(f"GaussianMixturePrior needs one weight a component, got {len(self.stds)} stds and {len(self.weights)} weights")

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
    not harm predictions when shifted inputs do vary there. Every other weight is N(0, 1/precision). Factors are float64.
    """

    layer: str  # name of the first layer's weight, [out, in] or [out, in, height, width]
    covariance: Tensor = field(repr=False)  # of an input row or patch, [d, d]
    alpha: Positive = 1.0
    epsilon: Positive = 1e-2
    precision: Positive = 1.0  # of every other weight

    def __post_init__(self) -> None:
        check_knobs(self)
        if self.covariance.ndim != 2 or not torch.allclose(self.covariance, self.covariance.T):
            raise ValueError(f"EmpCovPrior needs a symmetric covariance [d, d], got {tuple(self.covariance.shape)}")

    @staticmethod
    def from_inputs(layer: str, weight: Tensor, inputs: Inputs, *, alpha: float = 1.0, epsilon: float = 1e-2, precision: float = 1.0) -> "EmpCovPrior":
        """Measure the covariance of what the layer sees: input rows, or all patches of its filter's size."""
        x = inputs.double()
        if weight.ndim == 4:
            x = torch.nn.functional.unfold(x, weight.shape[2:]).transpose(1, 2)
        rows = x.reshape(-1, weight[0].numel())
        return EmpCovPrior(layer, torch.cov(rows.T, correction=0).reshape(len(rows.T), -1), alpha, epsilon, precision)

    def _root(self, like: Tensor) -> Tensor:
        """The symmetric square root of alpha Sigma + epsilon I, float64."""
        values, vectors = torch.linalg.eigh(self.covariance.double().to(like.device))
        return (vectors * (self.alpha * values.clamp_min(0) + self.epsilon).sqrt()) @ vectors.T

    def _filters(self, weight: Tensor) -> Tensor:
        d = len(self.covariance)
        if weight[0].numel() != d:
            raise ValueError(f"EmpCovPrior of {self.layer!r} has a covariance of size {d}, but its filters have {weight[0].numel()} weights")
        return weight.reshape(-1, d)

    def whiten(self, params: Params) -> Params:
        """Weights to independent standard normals."""
        z = {name: w * math.sqrt(self.precision) for name, w in params.items()}
        weight = params[self.layer]
        root = self._root(weight)
        z[self.layer] = torch.linalg.solve(root, self._filters(weight).double().T).T.reshape(weight.shape).to(weight.dtype)
        return z

    def unwhiten(self, params: Params) -> Params:
        """Independent standard normals to weights."""
        w = {name: z / math.sqrt(self.precision) for name, z in params.items()}
        z = params[self.layer]
        w[self.layer] = (self._filters(z).double() @ self._root(z)).reshape(z.shape).to(z.dtype)
        return w

    def log_prob(self, params: Params) -> Tensor:
        """Standard normal density of the whitened weights, less the log determinant of the map."""
        z = self.whiten(params)
        weight = params[self.layer]
        log_det = len(self._filters(weight)) * torch.linalg.slogdet(self._root(weight))[1].to(weight.dtype)
        others = sum(w.numel() for name, w in params.items() if name != self.layer)
        return GaussianPrior(1.0).log_prob(z) - log_det + 0.5 * others * math.log(self.precision)

    def sample(self, like: Params, rng: torch.Generator) -> Params:
        """Unwhitened standard normals."""
        return self.unwhiten({name: _normal(w, rng) for name, w in like.items()})


def _total(terms) -> Tensor:  # type: ignore[no-untyped-def]
    return torch.stack([*terms]).sum()


def _normal(like: Tensor, rng: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=rng, dtype=like.dtype, device=rng.device).to(like.device)


def _gamma(shape: float, like: Tensor, rng: torch.Generator) -> Tensor:
    concentration = torch.full(like.shape, shape, dtype=torch.float64, device=rng.device)
    return torch._standard_gamma(concentration, generator=rng).to(like.device, like.dtype)


def _each(like: Params, rng: torch.Generator, transform: Callable[[Tensor], Tensor]) -> Params:
    """Transform uniforms that are never 0 nor 1 (drawn in float64)."""
    drawn: Params = {}
    for name, w in like.items():
        u = torch.rand(w.shape, generator=rng, dtype=torch.float64, device=rng.device).clamp(1e-16, 1 - 1e-16)
        drawn[name] = transform(u).to(w.device, w.dtype)
    return drawn
