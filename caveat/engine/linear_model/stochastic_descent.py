"""Solvers that move after every batch of rows, for data too large for many full passes.

What they descend on, L, L' or the dual, is in `descent`. Every few passes the residual of the averaged unknowns is
measured: who is finished leaves, and the step is halved where residuals no longer fall.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from caveat.engine.linear_model.descent import Descent, Dual, Pace, Primal
from caveat.engine.linear_model.features import Scaled
from caveat.engine.linear_model.model import LinearModel, System, inner
from caveat.engine.linear_model.nystrom import top_eigenvalue
from caveat.engine.linear_model.solvers import Counted, Finish, Progress, Report, Solution, relative
from caveat.knobs import Count, Positive, Share, check_knobs

__all__ = ["StochasticDescent"]


@dataclass(frozen=True)
class StochasticDescent:
    """Descent on batches of rows: of L, of L' ("reduced"), or of the dual, which keeps n r K numbers."""

    objective: Literal["plain", "reduced", "dual"] = "reduced"
    batch_rows: Count = 100
    step_size: Positive = 1.0  # times one over the largest curvature of a batch; shortened where needed
    momentum: Share = 0.9
    tolerance: Positive = 1e-2
    rest: Positive = 1e-2  # relative change of z^T M z between two looks below which it has come to rest
    passes: Count = 200
    look_every: Count = 5  # passes between two looks at the residual; a look is a pass too

    def __post_init__(self) -> None:
        check_knobs(self)

    def prepare(
        self,
        model: LinearModel,
        seed: int = 0,
        kept: dict[str, Tensor] | None = None,
        counted: Counted | None = None,
    ) -> "PreparedDescent":
        """Measure the curvature of some batches, which limits the step."""
        return PreparedDescent(self, model, seed, None if kept is None else float(kept["top"]), counted)


class PreparedDescent:
    """Descent with a known largest curvature of batches."""

    progress: Progress | None

    def __init__(
        self,
        knobs: StochasticDescent,
        model: LinearModel,
        seed: int,
        top: float | None,
        counted: Counted | None = None,
    ) -> None:
        self.knobs, self.seed, self.progress = knobs, seed, None
        self._rng = torch.Generator().manual_seed(seed)
        self._some = self._order(model.features.rows)[:4]
        self.top = self._steepest(model, counted) if top is None else top
        self.preparation = 10 * sum(len(index) for index in self._some) / model.features.rows

    def tensors(self) -> dict[str, Tensor]:
        """The largest curvature."""
        return {"top": torch.tensor(self.top, dtype=torch.float64)}

    def _steepest(self, model: LinearModel, counted: Counted | None = None) -> float:
        """The largest curvature that a batch stands for, among some batches."""
        rows, found = model.features.rows, 0.0
        for number, index in enumerate(self._some, 1):
            found = max(found, rows / len(index) * top_eigenvalue(model, self.seed, [index]))
            if counted is not None:
                counted(number, len(self._some))
        return found

    def _begun(self, model: LinearModel, system: System, start: Tensor | None) -> Descent:
        rows, knobs = model.features.rows, self.knobs
        averaging = min(1.0, 10 / (knobs.look_every * math.ceil(rows / knobs.batch_rows)))
        pace = Pace(knobs.step_size, knobs.momentum, averaging, knobs.batch_rows)
        if knobs.objective != "dual":
            pace.step /= self.top + float(model.precision.max())
            return Primal(model, system, start, pace, knobs.objective == "reduced")
        white = replace(model, features=Scaled(model.features, model.precision.rsqrt()))
        top = self.top / float(model.precision) if len(model.precision) == 1 else self._steepest(white)
        pace.step /= top + max(rows / knobs.batch_rows, 1.0)
        return Dual(model, system, start, pace)

    def _order(self, rows: int) -> list[Tensor]:
        return list(torch.randperm(rows, generator=self._rng).split(self.knobs.batch_rows))

    def preconditioner(self, precision: Tensor) -> Callable[[Tensor], Tensor]:
        """None."""
        return torch.clone

    def solve(self, model: LinearModel, system: System, start: Tensor | None = None) -> Solution:
        """Solve for all unknowns."""
        knobs, device = self.knobs, system.right.device
        self._rng.manual_seed(self.seed)  # a solve does not depend on those before it, so that it can be made again
        report, finish = Report(), Finish(knobs.tolerance, knobs.rest)
        report.residuals = torch.full((len(system.right),), math.inf, dtype=torch.float64, device=device)
        z, image = torch.empty_like(system.right), torch.empty_like(system.right)
        whole, left = inner(system.right, system.right), torch.arange(len(z), device=device)
        state = self._begun(model, system, start)
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

    def _pass(self, state: Descent, model: LinearModel, report: Report) -> None:
        for block in model.features.blocks([i.to(model.features.device) for i in self._order(model.features.rows)]):
            state.move(block)
            report.iterations += 1
        report.vectors += len(state.system.right)
