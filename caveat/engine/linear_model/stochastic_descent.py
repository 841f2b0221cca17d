"""A solver that moves after every batch of rows, for data too large for many full passes.

The objectives L, L' and the dual are in `descent`. Every few passes the residual of the averaged unknowns is measured:
unknowns that are finished drop out, and the step is halved if residuals no longer fall.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from caveat.engine.linear_model.descent import Descent, Dual, Pace, Primal
from caveat.engine.linear_model.features import ScaledFeatures
from caveat.engine.linear_model.model import LinearModel, LinearSystem, inner
from caveat.engine.linear_model.nystrom import top_eigenvalue
from caveat.engine.linear_model.solvers import FinishRule, ProductCounter, Progress, Solution, SolveReport, relative
from caveat.knobs import Count, Positive, Share, check_knobs

__all__ = ["StochasticDescent"]


@dataclass(frozen=True)
class StochasticDescent:
    """Descent by batches of rows: on L ("plain"), on L' ("reduced"), or on the dual, which stores n r K numbers."""

    objective: Literal["plain", "reduced", "dual"] = "reduced"
    batch_rows: Count = 100
    step_size: Positive = 1.0  # in units of 1 / (largest curvature of a batch); shortened where needed
    momentum: Share = 0.9
    tolerance: Positive = 1e-2
    rest: Positive = 1e-2  # relative change of z^T M z between two looks below which it counts as settled
    passes: Count = 200
    look_every: Count = 5  # passes between two measurements of the residual, each of which is a pass too

    def __post_init__(self) -> None:
        check_knobs(self)

    def prepare(
        self,
        model: LinearModel,
        seed: int = 0,
        stored: dict[str, Tensor] | None = None,
        counted: ProductCounter | None = None,
    ) -> "PreparedDescent":
        """Measure the curvature of some batches, which limits the step, or take what was stored."""
        return PreparedDescent(self, model, seed, None if stored is None else float(stored["top"]), counted)


class PreparedDescent:
    """Descent for a model whose largest curvature of a batch is known."""

    progress: Progress | None

    def __init__(
        self,
        knobs: StochasticDescent,
        model: LinearModel,
        seed: int,
        top: float | None,
        counted: ProductCounter | None = None,
    ) -> None:
        self.knobs, self.seed, self.progress = knobs, seed, None
        self._rng = torch.Generator().manual_seed(seed)
        self._some = self._order(model.features.rows)[:4]
        self.top = self._steepest(model, counted) if top is None else top
        self.preparation = 10 * sum(len(index) for index in self._some) / model.features.rows

    def tensors(self) -> dict[str, Tensor]:
        """The largest curvature, []."""
        return {"top": torch.tensor(self.top, dtype=torch.float64)}

    def _steepest(self, model: LinearModel, counted: ProductCounter | None = None) -> float:
        """The largest curvature, scaled to all rows, of some batches."""
        rows, largest = model.features.rows, 0.0
        for number, index in enumerate(self._some, 1):
            largest = max(largest, rows / len(index) * top_eigenvalue(model, self.seed, [index]))
            if counted is not None:
                counted(number, len(self._some))
        return largest

    def _begin(self, model: LinearModel, system: LinearSystem, start: Tensor | None) -> Descent:
        rows, knobs = model.features.rows, self.knobs
        averaging = min(1.0, 10 / (knobs.look_every * math.ceil(rows / knobs.batch_rows)))
        pace = Pace(knobs.step_size, knobs.momentum, averaging, knobs.batch_rows)
        if knobs.objective != "dual":
            pace.step /= self.top + float(model.precision.max())
            return Primal(model, system, start, pace, knobs.objective == "reduced")
        white = replace(model, features=ScaledFeatures(model.features, model.precision.rsqrt()))
        top = self.top / float(model.precision) if len(model.precision) == 1 else self._steepest(white)
        pace.step /= top + max(rows / knobs.batch_rows, 1.0)
        return Dual(model, system, start, pace)

    def _order(self, rows: int) -> list[Tensor]:
        return list(torch.randperm(rows, generator=self._rng).split(self.knobs.batch_rows))

    def preconditioner(self, precision: Tensor) -> Callable[[Tensor], Tensor]:
        """There is none: the function returns a copy of v."""
        return torch.clone

    def solve(self, model: LinearModel, system: LinearSystem, start: Tensor | None = None) -> Solution:
        """Solve for all unknowns from `start` [K, d], or from the system's prior where none is given."""
        knobs, device = self.knobs, system.right.device
        self._rng.manual_seed(self.seed)  # so that a solve does not depend on those before it and can be repeated
        report, finish = SolveReport(), FinishRule(knobs.tolerance, knobs.rest)
        report.residuals = torch.full((len(system.right),), math.inf, dtype=torch.float64, device=device)
        z, image = torch.empty_like(system.right), torch.empty_like(system.right)
        whole, left = inner(system.right, system.right), torch.arange(len(z), device=device)
        state = self._begin(model, system, start)
        while True:
            for _ in range(knobs.look_every):
                self._pass(state, model, report)
            z[left] = state.average()
            image[left] = model.curvature(z[left])
            report.vectors += len(left)
            residual = state.system.right - image[left] - model.precision * z[left]
            residuals = state.judge(relative(inner(residual, residual), whole[left]))
            done = finish(residuals, inner(z[left], image[left]))
            report.residuals[left] = residuals
            report.history.append((report.vectors, float(report.residuals.max())))
            if self.progress is not None:
                self.progress(report.passes, float(residuals.max()))
            report.converged = bool(done.all())
            if report.converged or report.passes >= knobs.passes:
                return Solution(z, image, report)
            if done.any():
                left = left[~done]
                finish.keep(~done)
                state.keep(~done)

    def _pass(self, state: Descent, model: LinearModel, report: SolveReport) -> None:
        for block in model.features.blocks([i.to(model.features.device) for i in self._order(model.features.rows)]):
            state.move(block)
            report.iterations += 1
        report.vectors += len(state.system.right)
