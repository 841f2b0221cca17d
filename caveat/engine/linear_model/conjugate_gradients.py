"""Preconditioned conjugate gradients for K unknowns at once.

Products of low precision limit what can be solved. Every step lowers f(z) = z^T H z / 2 - b^T z, as long as rounding
is negligible. When residuals that were recomputed show neither a lower f nor a smaller residual than before, an unknown
returns to where it was best and takes no further products, and the report says so.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from caveat.engine.linear_model.model import LinearModel, LinearSystem, inner
from caveat.engine.linear_model.nystrom import Nystrom, sketch
from caveat.engine.linear_model.solvers import FinishRule, ProductCounter, Progress, Solution, SolveReport, relative
from caveat.knobs import Count, NonNegativeInt, Positive, check_knobs

__all__ = ["ConjugateGradients", "PreparedGradients"]

TOO_COARSE = 0.03  # an error, relative to a sample, that rounding may leave


@dataclass(frozen=True)
class ConjugateGradients:
    """Conjugate gradients, preconditioned by a Nystrom sketch; scalars in float64."""

    rank: NonNegativeInt = 64  # of the sketch, which holds rank x d numbers; 0 does without
    at_once: Count = 64  # products that the sketch takes in one pass
    tolerance: Positive = 1e-3
    rest: Positive = 1e-2  # relative change of z^T M z in an iteration below which it counts as settled
    iterations: Count = 1000
    refresh: Count = 50  # iterations after which residuals are recomputed; in low precision take about 10

    def __post_init__(self) -> None:
        check_knobs(self)

    def prepare(
        self,
        model: LinearModel,
        seed: int = 0,
        stored: dict[str, Tensor] | None = None,
        counted: ProductCounter | None = None,
    ) -> "PreparedGradients":
        """Sketch the curvature, or take a sketch that was stored."""
        if stored is not None:
            return PreparedGradients(self, Nystrom(stored["vectors"], stored["values"]))
        # Without a sketch to precondition by, a small one says how large the curvature is.
        return PreparedGradients(self, sketch(model, self.rank or 4, seed, self.at_once, counted))


class PreparedGradients:
    """Conjugate gradients that are preconditioned by a sketch."""

    progress: Progress | None

    def __init__(self, knobs: ConjugateGradients, nystrom: Nystrom) -> None:
        self.knobs, self.nystrom, self.progress = knobs, nystrom, None
        self.top, self.preparation = float(nystrom.values[0]), float(len(nystrom.values))

    def tensors(self) -> dict[str, Tensor]:
        """The sketch."""
        return {"vectors": self.nystrom.vectors, "values": self.nystrom.values}

    def preconditioner(self, precision: Tensor) -> Callable[[Tensor], Tensor]:
        """The preconditioner of the sketch; without a rank, a copy of v."""
        return self.nystrom.preconditioner(precision) if self.knobs.rank else torch.clone

    def solve(self, model: LinearModel, system: LinearSystem, start: Tensor | None = None) -> Solution:
        """Solve for all unknowns from `start` [K, d], or from the system's prior where none is given."""
        knobs, precondition = self.knobs, self.preconditioner(model.precision)
        z = (system.prior if start is None else start).clone()
        solution = _conjugate_gradients(model, system.right, z, precondition, knobs, self.progress)
        if torch.finfo(z.dtype).eps * self.top < 0.01 * float(model.precision.min()):
            return solution
        return self._checked(model, system.right, solution, precondition, max(10 * knobs.tolerance, TOO_COARSE))

    def _checked(
        self,
        model: LinearModel,
        right: Tensor,
        solution: Solution,
        precondition: Callable[[Tensor], Tensor],
        most: float,
    ) -> Solution:
        """The solution with image and residual recomputed, and a warning if rounding leaves an error above `most`."""
        image, report = model.curvature(solution.z), solution.report
        residual = right - image - model.precision * solution.z
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
        return Solution(solution.z, image, report)


@dataclass
class _Live:
    """The k unknowns that are not finished; tensors are [k, d] unless stated."""

    columns: Tensor  # their numbers among all unknowns, [k]
    z: Tensor
    residual: Tensor
    direction: Tensor
    right: Tensor
    lowest: Tensor  # 2 f where it was lowest, [k]
    smallest: Tensor  # relative residual, [k]

    def keep(self, chosen: Tensor) -> None:
        """Go on with some of the unknowns."""
        for name, value in vars(self).items():
            setattr(self, name, value[chosen])

    def better(self, residual: Tensor) -> Tensor:
        """Which unknowns are better than ever before, [k], from relative residuals [k] that were recomputed."""
        twice = -inner(self.z, self.right + self.residual)
        improved = (twice < self.lowest) | (residual < self.smallest)
        self.lowest, self.smallest = self.lowest.minimum(twice), self.smallest.minimum(residual)
        return improved


def _conjugate_gradients(
    model: LinearModel,
    right: Tensor,
    z: Tensor,
    precondition: Callable[[Tensor], Tensor],
    knobs: ConjugateGradients,
    progress: Progress | None,
) -> Solution:
    """Solve, starting from z [K, d], which is overwritten: it holds the best of each unknown until that is finished."""
    image, report, finish = torch.empty_like(z), SolveReport(), FinishRule(knobs.tolerance, knobs.rest)
    columns, nothing = torch.arange(len(z), device=z.device), torch.full_like(z[:, 0], math.inf, dtype=torch.float64)
    live = _Live(columns, z.clone(), right - model.product(z), right, right, nothing, nothing)
    report.residuals, report.converged, report.vectors = nothing.clone(), True, len(z)
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
        stuck = torch.zeros_like(done)
        if report.iterations % knobs.refresh == 0:
            better = live.better(worst)
            z[live.columns[better]] = live.z[better]
            stuck = ~(better | done)
        if stuck.any():
            live.z[stuck] = z[live.columns[stuck]]
            live_image[stuck] = model.curvature(live.z[stuck])
            left = live.right[stuck] - live_image[stuck] - model.precision * live.z[stuck]
            residuals[stuck] = relative(inner(left, left), plain[live.columns[stuck]])
            report.vectors += len(left)
            report.stood_still = True
        report.residuals[live.columns] = residuals
        report.history.append((report.vectors, float(report.residuals.max())))
        if progress is not None:
            progress(report.passes, float(residuals.max()))
        over = done | stuck | (report.iterations >= knobs.iterations)
        if over.any():
            report.converged &= bool(done[over].all())
            z[live.columns[over]], image[live.columns[over]] = live.z[over], live_image[over]
            if over.all():
                return Solution(z, image, report)
            live.keep(~over)
            finish.keep(~over)
            ahead, new_slope, slope = ahead[~over], new_slope[~over], slope[~over]
        turn = (new_slope / slope).unsqueeze(1).to(z.dtype) if report.iterations else None
        live.direction = ahead if turn is None else ahead.addcmul_(turn, live.direction)
        slope = new_slope
        _advance(model, live, slope, report, knobs.refresh)


def _advance(model: LinearModel, live: _Live, slope: Tensor, report: SolveReport, refresh: int) -> None:
    """Step along the direction, to the lowest point on it."""
    product = model.product(live.direction)
    length = (slope / inner(live.direction, product)).unsqueeze(1).to(product.dtype)
    live.z.addcmul_(length, live.direction)
    report.iterations += 1
    report.vectors += len(live.z)
    if report.iterations % refresh:
        live.residual.addcmul_(length, product, value=-1)
    else:  # the recursion drifts away from the true residual
        live.residual = live.right - model.product(live.z)
        report.vectors += len(live.z)
