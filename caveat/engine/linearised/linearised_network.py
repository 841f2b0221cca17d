"""A linearised network as a Bayesian linear model: its noise, its offset, and its own posterior mean.

    h(theta, x) = f(w, x) + J(x) (theta - w),   theta ~ N(0, A^-1),   B_i the Fisher information of row i's outputs

B stays at f(w, x): the covariance of the samples, their effective dimension and the log determinant in the evidence are
those of the curvature at the trained weights w. The mean of the linear model is not w, where normalisation layers or
early stopping leave a gradient, and MacKay's update needs that mean. For Gaussian noise it solves a linear system of
the same matrix; for classes and counts it is the minimum of

    -sum_i log p(y_i | h(theta, x_i)) + |theta|^2_A / 2

by nonlinear conjugate gradients (Polak and Ribiere) with the solver's preconditioner: h is linear in theta, so that the
lowest point along a direction takes no further products. (Newton's method takes some thirty times as many: a network is
sure of its rows, its B says that they may be moved at no cost, and the first step breaks them all.) The derivative by
A of the minimum is |theta|^2 / 2 alone, so that a fixed point of the updates is a stationary point of the evidence,
exactly. Noise that is an output makes the likelihood no concave function, and with more weights than rows its maximum
is an exact fit without noise: there the likelihood is expanded to second order about f(w, x), with B for its curvature,
and the mean is that of least squares again.

A trained classifier is sure of most rows, and those have next to no information: half of it may be in a fiftieth of
them. Rows that hold a negligible share between them can be left out of the curvature, which makes the posterior wider
by about twice that share. The mean counts all rows: one that is surely wrong has no information, but a slope.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from caveat.engine.linear_model import (
    Features,
    LinearModel,
    LinearSystem,
    PreparedSolver,
    ScaledFeatures,
    Solution,
    Solve,
    inner,
    mean_beside_samples,
    regression_system,
)
from caveat.engine.linearised.fisher_noise import LikelihoodNoise
from caveat.engine.linearised.held_features import HeldFeatures
from caveat.engine.linearised.jacobian_features import NetworkFeatures
from caveat.likelihoods import Gaussian, HeteroscedasticGaussian

__all__ = ["LEAST_SQUARES", "NetworkModel", "mode"]

STEPS = 200  # towards the mean for an update of the precision, at most: the next goes on from there
WINDOW = 5
FLAT = 0.05  # the slope at the end of a step, in units of that at its beginning
LEAST_SQUARES = (Gaussian, HeteroscedasticGaussian)  # likelihoods whose mean is one linear system


@dataclass(frozen=True)
class NetworkModel:
    """A network's linear model, in coordinates theta / scale."""

    features: NetworkFeatures | HeldFeatures  # J, as it is
    noise: LikelihoodNoise
    weights: Tensor  # w, [d]
    scale: Tensor | None = None  # of each weight, [d]; zero leaves it out
    negligible: float = 0.0  # the share of the information that rows left out of the curvature may hold
    by_rows: "NetworkModel | None" = None  # with a coordinate for each output of each row, where these are few

    def way(self) -> dict[str, str]:
        """Which products ran, and why; for `info`."""
        rows = self.by_rows
        if rows is None:
            return self.features.way()
        return self.features.way() | {
            "matrix": f"over {rows.features.size:,} rows x outputs, by which systems are solved"
        }

    @cached_property
    def model(self) -> LinearModel:
        """The linear model in those coordinates, with the curvature at w; its prior is to be given."""
        features, noise = self.counted(self.noise)
        one = torch.ones(1, dtype=features.dtype, device=features.device)
        return LinearModel(self._inside(features), noise, one)

    def counted(self, noise: LikelihoodNoise) -> tuple[NetworkFeatures | HeldFeatures, LikelihoodNoise]:
        """The rows whose curvature counts. Least squares has its mean from the same sums, and there all rows do."""
        rows = None if isinstance(noise.likelihood, LEAST_SQUARES) else noise.informative(self.negligible)
        return (self.features, noise) if rows is None else (self.features.of(rows), noise.of(rows))

    def _inside(self, features: Features) -> Features:
        return features if self.scale is None else ScaledFeatures(features, self.scale)

    def inside(self, weights: Tensor) -> Tensor:
        """The coordinates of weights [..., d], zero for those that are left out."""
        return weights if self.scale is None else torch.where(self.scale > 0, weights / self.scale, 0.0)

    def outside(self, coordinates: Tensor) -> Tensor:
        """The weights that coordinates [..., d] stand for."""
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

    def solving(self, tolerance: float) -> tuple[Solve, Callable[[Tensor], float] | None]:
        """How samples and mean are found; and, for noise that is learned, how far predictions are from the targets.

        The tolerance is that of the precisions which are sought by it.
        """
        likelihood, noise = self.noise.likelihood, self.noise
        if not isinstance(likelihood, LEAST_SQUARES):
            return partial(self._with_mode, tolerance / 2), None
        # For Gaussian noise the slope is B (y - f), whatever the targets' units.
        slope, information = noise.slope(noise.outputs.flatten(1)), noise.information()
        residual = slope / information
        right = regression_system(self.model, residual + self.seen(self.weights))
        # Predictions are centred on f, not on the linear model's mean: the noise is that of their residuals.
        error = float(inner(slope, residual).sum())
        learned = isinstance(likelihood, Gaussian) and likelihood.noise is None
        return mean_beside_samples(right), (lambda _: error) if learned else None

    def _with_mode(
        self, resting: float, model: LinearModel, prepared: PreparedSolver, samples: LinearSystem, start: Tensor | None
    ) -> tuple[Solution, Tensor]:
        solution = prepared.solve(model, samples, None if start is None else start[:-1])
        first = self.inside(self.weights) if start is None else start[-1]
        mean, products, done = mode(self, model, prepared, first, resting)
        solution.report.vectors += products
        if not done:
            solution.report.warnings.append(
                f"the mean of the linear model had not come to rest after {STEPS} steps, so the prior precision may be "
                "off: give the solver a sketch of higher rank, or a precision of your own"
            )
        return solution, mean


def mode(
    network: NetworkModel, model: LinearModel, prepared: PreparedSolver, theta: Tensor, resting: float
) -> tuple[Tensor, float, bool]:
    """The mean [d] under the model's prior from an earlier one, the products that it took, and whether it is found.

    It is where |mean|^2_A, and what is minimised, have moved by less than a part `resting` of it in `WINDOW` steps.
    """
    noise, precision = network.noise, model.precision
    precondition = prepared.preconditioner(precision)
    h = noise.outputs.flatten(1) + network.seen(network.outside(theta) - network.weights)
    gradient = direction = torch.zeros_like(theta)
    steepness = math.inf  # g^T P^-1 g of the step before
    trail: list[tuple[float, float]] = []  # what is minimised, and |theta|^2_A
    for number in range(STEPS):
        before, gradient = gradient, precision * theta - network.pulled(noise.slope(h))
        ahead = precondition(gradient.unsqueeze(0)).squeeze(0)
        turn = max(0.0, _dot(gradient - before, ahead) / steepness)
        direction = turn * direction - ahead
        if _dot(direction, gradient) >= 0:
            direction = -ahead
        steepness = _dot(gradient, ahead)
        if not steepness > 0:
            return theta, number + 2.0, True
        outputs = network.seen(network.outside(direction))
        length = _lowest(noise, h, outputs, _dot(precision * theta, direction), _dot(precision * direction, direction))
        theta, h = theta + length * direction, h + length * outputs
        size = _dot(precision * theta, theta)
        if not size > 0:  # the data say nothing, and zero is where the prior has it
            return theta, number + 2.0, True
        trail.append((0.5 * size - noise.log_likelihood(h), size))
        if prepared.progress is not None:
            prepared.progress(number + 1.0, math.sqrt(steepness / size))
        if number >= WINDOW:
            fallen, moved = (old - new for old, new in zip(trail[-1 - WINDOW], trail[-1], strict=True))
            if abs(moved) <= resting * size and fallen <= resting * size:
                return theta, number + 2.0, True
    return theta, STEPS + 1.0, False


def _lowest(noise: LikelihoodNoise, h: Tensor, ahead: Tensor, linear: float, quadratic: float) -> float:
    """Where -log p(h + t ahead) + linear t + quadratic t^2 / 2 is about lowest, by false position in its slope."""

    def slope(t: float) -> float:
        return linear + quadratic * t - _dot(noise.slope(h + t * ahead), ahead)

    first = slope(0.0)
    low, high, low_slope, high_slope = 0.0, 1.0, first, slope(1.0)
    while high_slope < 0:
        low, high, low_slope = high, 4 * high, high_slope
        high_slope = slope(high)
    t, there, side = high, high_slope, 0
    for _ in range(40):
        if abs(there) <= FLAT * abs(first):
            break
        t = (low * high_slope - high * low_slope) / (high_slope - low_slope)
        there = slope(t)
        # The end that stays twice counts half (Illinois), or the other would creep.
        if there < 0:
            low, low_slope, high_slope = t, there, high_slope / (2 if side < 0 else 1)
        else:
            high, high_slope, low_slope = t, there, low_slope / (2 if side > 0 else 1)
        side = -1 if there < 0 else 1
    return t


def _dot(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum(dtype=torch.float64))
