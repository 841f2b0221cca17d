"""A linearised network as a Bayesian linear model: its noise, its offset, and its own posterior mean.

    h(theta, x) = f(w, x) + J(x) (theta - w),   theta ~ N(0, A^-1),   B_i the Fisher information of row i's outputs

B stays at f(w, x): the covariance of the samples, their effective dimension and the log determinant in the evidence are
those of the curvature at the trained weights w. The mean of the linear model is not w, where normalisation layers or
early stopping leave a gradient, and MacKay's update needs that mean. For Gaussian noise it solves a linear system of
the same matrix; for classes and counts it is the minimum of

    -sum_i log p(y_i | h(theta, x_i)) + |theta|^2_A / 2

by Newton's method, whose own B is at h(theta, x), with conjugate gradients for each step and a search along it. The
derivative by A of the minimum is |theta|^2 / 2 alone, so that a fixed point of the updates is a stationary point of the
evidence, exactly. Noise that is an output makes the likelihood no concave function, and with more weights than rows its
maximum is an exact fit without noise: there the likelihood is expanded to second order about f(w, x), with B for its
curvature, and the mean is that of least squares again.

A trained classifier is sure of most rows, and those have next to no information: half of it may be in a fiftieth of
them. Rows that hold a negligible share between them can be left out of the curvature, which makes the posterior wider
by about twice that share. The mean counts all rows: one that is surely wrong has no information, but a slope.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from caveat.engine.features import Block, Features, Scaled
from caveat.engine.linear_model import LinearModel, System, inner, regression_system
from caveat.engine.mackay import Solve, together
from caveat.engine.network_features import NetworkFeatures
from caveat.engine.solvers import Prepared, Solution
from caveat.likelihoods import Gaussian, HeteroscedasticGaussian, Hyper, Likelihood
from caveat.likelihoods.protocol import DiagonalFisher

__all__ = ["LEAST_SQUARES", "LikelihoodNoise", "NetworkModel", "newton"]

STEPS = 5  # of Newton's method for an update of the precision, at most: the next goes on from there
RESTING = 1e-2  # a step this short, next to the mean, is the last
INEXACT = 3e-2  # the relative residual of a step: what is left of the error by the last
LEAST_SQUARES = (Gaussian, HeteroscedasticGaussian)  # likelihoods whose mean is one linear system
PIECE = 8192  # rows whose likelihood is looked at together


class LikelihoodNoise:
    """The Fisher information of a likelihood at given outputs of all rows, as factors."""

    def __init__(self, likelihood: Likelihood, hyper: Hyper, outputs: Tensor, targets: Tensor) -> None:
        self.likelihood, self.hyper = likelihood, hyper
        self.outputs, self.targets = outputs, targets  # [n, ...] each
        first = self._factor(outputs[:1], targets[:1])
        self.width = first.shape[-1] if first.ndim < 5 else math.prod(first.shape[i] for i in (1, 3, 4))

    def factor(self, block: Block) -> Tensor:
        """Those of the block's rows."""
        return self._factor(self.outputs[block.index], self.targets[block.index])

    def information(self) -> Tensor:
        """B of all rows where it is diagonal, [n, m]."""
        return torch.cat([self._factor(h, y).square() for h, y in self._pieces(self.outputs)])

    def of(self, rows: Tensor) -> "LikelihoodNoise":
        """Of some of the rows."""
        return LikelihoodNoise(self.likelihood, self.hyper, self.outputs[rows], self.targets[rows])

    def informative(self, negligible: float) -> Tensor | None:
        """The rows without those that hold a share of all information between them; None where these are few."""
        every = self._pieces(self.outputs)
        traces = torch.cat([self._factor(h, y).flatten(1).double().square().sum(1) for h, y in every])
        least = traces.argsort()
        dropped = least[: int((traces[least].cumsum(0) <= negligible * traces.sum()).sum())]
        if not 0.05 * len(traces) <= len(dropped) < len(traces):
            return None
        kept = torch.ones_like(traces, dtype=torch.bool)
        kept[dropped] = False
        return kept.nonzero().squeeze(1)

    def at(self, outputs: Tensor) -> "LikelihoodNoise":
        """The same at other outputs, [n, m]."""
        return LikelihoodNoise(self.likelihood, self.hyper, outputs.view_as(self.outputs), self.targets)

    def _factor(self, outputs: Tensor, targets: Tensor) -> Tensor:
        factor = self.likelihood.fisher_factor(outputs, targets, self.hyper)  # [B, ..., c, q]
        if isinstance(self.likelihood, DiagonalFisher):
            return factor.diagonal(dim1=-2, dim2=-1).flatten(1)
        if factor.ndim == 3:
            return factor
        axis = self.likelihood.output_axis % outputs.ndim
        before, after = math.prod(outputs.shape[1:axis]), math.prod(outputs.shape[axis + 1 :])
        return factor.reshape(len(factor), before, after, *factor.shape[-2:]).permute(0, 1, 3, 4, 2)

    def log_likelihood(self, outputs: Tensor) -> float:
        """Of all rows at outputs [n, m], summed in float64."""
        total = 0.0
        with torch.no_grad():
            for h, y in self._pieces(outputs):
                total += float(self.likelihood.log_prob(h, y, self.hyper).sum(dtype=torch.float64))
        return total

    def slope(self, outputs: Tensor) -> Tensor:
        """The log likelihood's derivative by outputs [n, m]."""
        found = []
        for h, y in self._pieces(outputs):
            with torch.enable_grad():
                leaf = h.detach().requires_grad_()
                total = self.likelihood.log_prob(leaf, y, self.hyper).sum()
            found.append(torch.autograd.grad(total, leaf)[0].flatten(1))
        return torch.cat(found)

    def _pieces(self, outputs: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(outputs.view_as(self.outputs).split(PIECE), self.targets.split(PIECE), strict=True)


@dataclass(frozen=True)
class NetworkModel:
    """A network's linear model, in coordinates theta / scale."""

    features: NetworkFeatures  # J, as it is
    noise: LikelihoodNoise
    weights: Tensor  # w, [d]
    scale: Tensor | None = None  # of each weight, [d]; zero leaves it out
    negligible: float = 0.0  # the share of the information that rows left out of the curvature may hold

    @cached_property
    def model(self) -> LinearModel:
        """The linear model in those coordinates, with the curvature at w; its prior is to be given."""
        features, noise = self.counted(self.noise)
        one = torch.ones(1, dtype=features.dtype, device=features.device)
        return LinearModel(self._inside(features), noise, one)

    def counted(self, noise: LikelihoodNoise) -> tuple[NetworkFeatures, LikelihoodNoise]:
        """The rows whose curvature counts. Least squares has its mean from the same sums, and there all rows do."""
        rows = None if isinstance(noise.likelihood, LEAST_SQUARES) else noise.informative(self.negligible)
        return (self.features, noise) if rows is None else (self.features.of(rows), noise.of(rows))

    def with_curvature(self, model: LinearModel, noise: LikelihoodNoise) -> LinearModel:
        """The model with the curvature at other outputs."""
        features, noise = self.counted(noise)
        return replace(model, features=self._inside(features), noise=noise)

    def _inside(self, features: Features) -> Features:
        return features if self.scale is None else Scaled(features, self.scale)

    def inside(self, weights: Tensor) -> Tensor:
        """Coordinates of weights, zero for those that are left out."""
        return weights if self.scale is None else torch.where(self.scale > 0, weights / self.scale, 0.0)

    def outside(self, coordinates: Tensor) -> Tensor:
        """Weights of coordinates."""
        return coordinates if self.scale is None else coordinates * self.scale

    def seen(self, weights: Tensor) -> Tensor:
        """J weights at all rows, [n, m]."""
        return torch.cat([block.forward(weights.unsqueeze(0))[0] for block in self.features.blocks()])

    def pulled(self, values: Tensor) -> Tensor:
        """J^T values for values of all rows [n, m], in the coordinates, [d]."""
        total = torch.zeros_like(self.weights)
        for block in self._inside(self.features).blocks():
            total += block.backward(values[block.index].unsqueeze(0))[0]
        return total

    def solving(self) -> tuple[Solve, Callable[[Tensor], float] | None]:
        """How samples and mean are found; and, for noise that is learned, how far predictions are from the targets."""
        likelihood, noise = self.noise.likelihood, self.noise
        if not isinstance(likelihood, LEAST_SQUARES):
            return self._newton, None
        # For Gaussian noise the slope is B (y - f), whatever the targets' units.
        slope, information = noise.slope(noise.outputs.flatten(1)), noise.information()
        residual = slope / information
        right = regression_system(self.model, residual + self.seen(self.weights))
        # Predictions are centred on f, not on the linear model's mean: the noise is that of their residuals.
        error = float(inner(slope, residual).sum())
        learned = isinstance(likelihood, Gaussian) and likelihood.noise is None
        return together(right), (lambda _: error) if learned else None

    def _newton(
        self, model: LinearModel, prepared: Prepared, samples: System, start: Tensor | None
    ) -> tuple[Solution, Tensor]:
        found = prepared.solve(model, samples, None if start is None else start[:-1])
        first = self.inside(self.weights) if start is None else start[-1]
        mean, vectors, done = newton(self, model, prepared, first, STEPS)
        found.report.vectors += vectors
        if not done:
            found.report.warnings.append(
                "Newton's method did not come to rest at the mean of the linear model, so the prior precision may be "
                "off: give the solver a lower tolerance, or a precision of your own"
            )
        return found, mean


def newton(
    network: NetworkModel, model: LinearModel, prepared: Prepared, theta: Tensor, steps: int = 30
) -> tuple[Tensor, float, bool]:
    """The mean [d] under the model's prior from an earlier one, the products that it took, and whether it is found."""
    noise, precision = network.noise, model.precision
    h = noise.outputs.flatten(1) + network.seen(network.outside(theta) - network.weights)

    def value(h: Tensor, theta: Tensor) -> float:
        return 0.5 * float(inner(theta * precision, theta)) - noise.log_likelihood(h)

    now, vectors = value(h, theta), 1.0
    for _ in range(steps):
        gradient = precision * theta - network.pulled(noise.slope(h))
        own = network.with_curvature(model, noise.at(h))
        nothing = torch.zeros_like(theta).unsqueeze(0)
        solution = prepared.solve(own, System.of(own, -gradient.unsqueeze(0)), nothing, INEXACT)
        step = solution.z[0]
        ahead, fall = network.seen(network.outside(step)), float(inner(gradient, step))
        vectors += solution.report.vectors + 2
        length = 2.0
        while True:
            length /= 2
            there = theta + length * step, h + length * ahead
            then = value(there[1], there[0])
            # Rounding of the sum may hide a fall at the very end.
            if then <= now + 1e-4 * length * fall + 1e-7 * abs(now):
                break
            if length < 1e-6:
                return theta, vectors, False
        (theta, h), now = there, then
        moved, size = float(inner(precision * step, step)), float(inner(precision * theta, theta))
        if length == 1 and moved <= RESTING**2 * size:
            return theta, vectors, True
    return theta, vectors, False
