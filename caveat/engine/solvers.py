"""Solvers of H z = b for K unknowns at once: what they share, and preconditioned conjugate gradients.

    prepared = ConjugateGradients().prepare(model)         what does not depend on the prior: the Nystrom sketch
    solution = prepared.solve(model, system, start)        for any prior precision, from zero or a warm start

An unknown is finished when two things hold. Its residual is small, |b - H z| <= tolerance |b|, in the plain norm and in
that of the preconditioner, which is about the error's own: |r|_(P^-1) ~ |z - z*|_H. And z^T M z, its share of the
effective dimension, has come to rest: stopping early does not give a rough sample but one of a wider posterior.
Finished unknowns take no further products.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from caveat.engine.linear_model import LinearModel, System, inner
from caveat.engine.nystrom import Nystrom, sketch
from caveat.knobs import Count, NonNegativeInt, Positive, check_knobs

__all__ = ["ConjugateGradients", "Finish", "Prepared", "Progress", "Report", "Solution", "Solver", "relative"]

Progress = Callable[[float, float], None]  # passes so far, the largest residual
TOO_COARSE = 0.03  # an error, relative to a sample, that rounding may leave


@dataclass
class Report:
    """How a solve went."""

    iterations: int = 0
    vectors: float = 0.0  # products with H, of one vector and all rows
    residuals: Tensor = field(default_factory=lambda: torch.zeros(0))  # |b - H z| / |b|, [K]
    converged: bool = False
    history: list[tuple[float, float]] = field(default_factory=list)  # vectors so far, the largest residual
    warnings: list[str] = field(default_factory=list)

    @property
    def passes(self) -> float:
        """Passes over the data with all K unknowns; those with fewer count by their share."""
        return self.vectors / max(len(self.residuals), 1)


@dataclass(frozen=True)
class Solution:
    """The unknowns, and what is known of them."""

    z: Tensor  # [K, d]
    image: Tensor  # M z, [K, d]
    report: Report

    def effective_dimension(self, groups: tuple[int, ...] | None = None) -> Tensor:
        """Mean over the unknowns of z^T M z, in float64; of each group of consecutive parameters, [G], where given."""
        each = (self.z * self.image).sum(0, dtype=torch.float64) / len(self.z)
        return torch.stack([part.sum() for part in each.split(groups or len(each))])


class Prepared(Protocol):
    """A solver that knows a model's features and noise."""

    top: float  # about the largest eigenvalue of M
    preparation: float  # products that it took
    progress: Progress | None  # is told of passes so far and the largest residual

    def tensors(self) -> dict[str, Tensor]:
        """What it took them for, to be kept and given to `prepare` again."""

    def solve(
        self, model: LinearModel, system: System, start: Tensor | None = None, tolerance: float | None = None
    ) -> Solution:
        """Solve for all unknowns; the start is that of the prior's draws, the tolerance the solver's, unless given."""


class Solver(Protocol):
    """A way to solve, and its knobs."""

    def prepare(self, model: LinearModel, seed: int = 0, kept: dict[str, Tensor] | None = None) -> Prepared:
        """Find what serves every prior precision, or take what was kept."""


class Finish:
    """When an unknown is finished."""

    def __init__(self, tolerance: float, rest: float) -> None:
        self.tolerance, self.rest = tolerance, rest
        self._energy: Tensor | None = None  # z^T M z when last looked at

    def __call__(self, residual: Tensor, energy: Tensor) -> Tensor:
        """Which unknowns are, of relative residuals [k] (the largest of each) and z^T M z [k]."""
        solved = residual <= self.tolerance / 100  # nothing is left to move, as at a very good start
        if self._energy is not None:
            resting = (energy - self._energy).abs() <= self.rest * energy.abs()
            solved |= resting & (residual <= self.tolerance)
        self._energy = energy
        return solved

    def keep(self, columns: Tensor) -> None:
        """Go on with some of the unknowns."""
        self._energy = None if self._energy is None else self._energy[columns]


@dataclass(frozen=True)
class ConjugateGradients:
    """Conjugate gradients, preconditioned by a Nystrom sketch; scalars in float64."""

    rank: NonNegativeInt = 64  # of the sketch, which holds rank x d numbers; 0 does without
    at_once: Count = 64  # products of the sketch in a pass
    tolerance: Positive = 1e-3
    rest: Positive = 1e-2  # relative change of z^T M z in an iteration below which it has come to rest
    iterations: Count = 1000
    refresh: Count = 50  # iterations between residuals made anew; in low precision take about 10

    def __post_init__(self) -> None:
        check_knobs(self)

    def prepare(self, model: LinearModel, seed: int = 0, kept: dict[str, Tensor] | None = None) -> "PreparedGradients":
        """Sketch the curvature."""
        if kept is not None:
            return PreparedGradients(self, Nystrom(kept["vectors"], kept["values"]))
        # Without a sketch to precondition by, a small one says how large the curvature is.
        return PreparedGradients(self, sketch(model, self.rank or 4, seed, self.at_once))


class PreparedGradients:
    """Conjugate gradients with a sketch."""

    progress: Progress | None

    def __init__(self, knobs: ConjugateGradients, nystrom: Nystrom) -> None:
        self.knobs, self.nystrom, self.progress = knobs, nystrom, None
        self.top, self.preparation = float(nystrom.values[0]), float(len(nystrom.values))

    def tensors(self) -> dict[str, Tensor]:
        """The sketch."""
        return {"vectors": self.nystrom.vectors, "values": self.nystrom.values}

    def solve(
        self, model: LinearModel, system: System, start: Tensor | None = None, tolerance: float | None = None
    ) -> Solution:
        """Solve for all unknowns."""
        knobs = self.knobs if tolerance is None else replace(self.knobs, tolerance=tolerance)
        precondition = self.nystrom.preconditioner(model.precision) if self.knobs.rank else torch.clone
        z = (system.prior if start is None else start).clone()
        found = _conjugate_gradients(model, system.right, z, precondition, knobs, self.progress)
        if torch.finfo(z.dtype).eps * self.top < 0.01 * float(model.precision.min()):
            return found
        return self._looked_at_again(model, system.right, found, precondition, max(10 * knobs.tolerance, TOO_COARSE))

    def _looked_at_again(
        self, model: LinearModel, right: Tensor, found: Solution, precondition: Callable[[Tensor], Tensor], most: float
    ) -> Solution:
        """The solution of a system that the numbers may be too coarse for, with image and residual made anew."""
        image, report = model.curvature(found.z), found.report
        residual = right - image - model.precision * found.z
        report.vectors += len(right)
        report.residuals = relative(inner(residual, residual), inner(right, right))
        squares = inner(residual, precondition(residual)).clamp_min(0)
        error = float(relative(squares, inner(right, precondition(right))).max())
        if not error <= most:
            report.converged = False
            report.warnings.append(
                f"{str(right.dtype).removeprefix('torch.')} is too coarse for a prior precision of "
                f"{float(model.precision.min()):.2g} beside a curvature of {self.top:.2g}, and samples are off by some "
                f"{100 * error:.0f}%: use double precision, or a larger prior precision"
            )
        return Solution(found.z, image, report)


@dataclass
class _Live:
    """The unknowns that are not finished; all [k, d]."""

    columns: Tensor  # which they are, [k]
    z: Tensor
    residual: Tensor
    direction: Tensor
    right: Tensor

    def keep(self, chosen: Tensor) -> None:
        """Go on with some."""
        for name in ("columns", "z", "residual", "direction", "right"):
            setattr(self, name, getattr(self, name)[chosen])


def _conjugate_gradients(
    model: LinearModel,
    right: Tensor,
    z: Tensor,
    precondition: Callable[[Tensor], Tensor],
    knobs: ConjugateGradients,
    progress: Progress | None,
) -> Solution:
    """Solve in place of `z`."""
    image, report, finish = torch.empty_like(z), Report(), Finish(knobs.tolerance, knobs.rest)
    report.residuals = torch.zeros(len(z), dtype=torch.float64, device=z.device)
    live = _Live(torch.arange(len(z), device=z.device), z.clone(), right - model.product(z), right, right)
    report.vectors = len(z)
    plain, natural = inner(right, right), inner(right, precondition(right))
    slope = torch.zeros_like(plain)  # r^T P^-1 r of the iteration before
    while True:
        ahead = precondition(live.residual)
        new_slope = inner(live.residual, ahead)
        squares = inner(live.residual, live.residual)
        if not (new_slope + squares).isfinite().all():
            model.check_finite()
            raise ValueError(
                "conjugate gradients broke down: the features' products are not those of one matrix, or "
                f"{str(z.dtype).removeprefix('torch.')} is too coarse for them: use double precision"
            )
        residuals = relative(squares, plain[live.columns])
        worst = torch.maximum(residuals, relative(new_slope, natural[live.columns]))
        live_image = live.right - live.residual - model.precision * live.z
        done = finish(worst, inner(live.z, live_image))
        report.residuals[live.columns] = residuals
        report.history.append((report.vectors, float(report.residuals.max())))
        if progress is not None:
            progress(report.passes, float(residuals.max()))
        stopped = report.iterations >= knobs.iterations
        if stopped or done.any():
            z[live.columns], image[live.columns] = live.z, live_image
            if stopped or done.all():
                report.converged = bool(done.all())
                return Solution(z, image, report)
            live.keep(~done)
            finish.keep(~done)
            ahead, new_slope, slope = ahead[~done], new_slope[~done], slope[~done]
        turn = (new_slope / slope).unsqueeze(1).to(z.dtype) if report.iterations else None
        live.direction = ahead if turn is None else ahead.addcmul_(turn, live.direction)
        slope = new_slope
        _advance(model, live, slope, report, knobs.refresh)


def _advance(model: LinearModel, live: _Live, slope: Tensor, report: Report, refresh: int) -> None:
    """A step along the direction, to the lowest point on it."""
    product = model.product(live.direction)
    length = (slope / inner(live.direction, product)).unsqueeze(1).to(product.dtype)
    live.z.addcmul_(length, live.direction)
    report.iterations += 1
    report.vectors += len(live.z)
    if report.iterations % refresh:
        live.residual.addcmul_(length, product, value=-1)
    else:  # the recursion drifts away from what it stands for
        live.residual = live.right - model.product(live.z)
        report.vectors += len(live.z)


def relative(squares: Tensor, whole: Tensor) -> Tensor:
    """The root of a quotient of squares, zero where both are."""
    return torch.where(squares == 0, 0.0, squares / whole).sqrt()
