"""Solvers that move after every batch of rows, for data too large for many full passes.

    L(z)  = 1/2 sum_i |eps_i - phi_i z|^2_(B_i) + 1/2 |z - theta_0|^2_A      gradient M z - Phi^T R e + A (z - theta_0)
    L'(z) = 1/2 sum_i |phi_i z|^2_(B_i) + 1/2 |z - A^-1 b|^2_A               gradient M z + A z - b
    dual:   (I + R^T Phi A^-1 Phi^T R) u = e - R^T Phi theta_0,  z = theta_0 + A^-1 Phi^T R u

L and L' differ by a constant; L' has the noise of all rows in b, so a batch leaves less to chance (Antoran et al.
2023). The dual has an unknown for every output of every row, n r K numbers, and its gradient for a batch is exact for
those rows, so that it vanishes at the solution (Lin et al. 2024). All use Nesterov's momentum and a geometric average
of iterates; every few passes the average's residual is measured, and the step halved where it no longer falls.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from caveat.engine.features import Block, Scaled, times, times_transposed
from caveat.engine.linear_model import LinearModel, System, inner
from caveat.engine.nystrom import top_eigenvalue
from caveat.engine.solvers import Finish, Progress, Report, Solution, relative
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

    def prepare(self, model: LinearModel, seed: int = 0, kept: dict[str, Tensor] | None = None) -> "PreparedDescent":
        """Measure the curvature of some batches, which limits the step."""
        return PreparedDescent(self, model, seed, None if kept is None else float(kept["top"]))


class PreparedDescent:
    """Descent with a known largest curvature of batches."""

    progress: Progress | None

    def __init__(self, knobs: StochasticDescent, model: LinearModel, seed: int, top: float | None) -> None:
        self.knobs, self.seed, self.progress = knobs, seed, None
        self._rng = torch.Generator().manual_seed(seed)
        self._some = self._order(model.features.rows)[:4]
        self.top = self._steepest(model) if top is None else top
        self.preparation = 10 * sum(len(index) for index in self._some) / model.features.rows

    def tensors(self) -> dict[str, Tensor]:
        """The largest curvature."""
        return {"top": torch.tensor(self.top, dtype=torch.float64)}

    def _steepest(self, model: LinearModel) -> float:
        """The largest curvature that a batch stands for, among some batches."""
        rows = model.features.rows
        return max(rows / len(index) * top_eigenvalue(model, self.seed, [index]) for index in self._some)

    def _state(self, model: LinearModel, system: System, start: Tensor | None) -> "_State":
        rows, knobs = model.features.rows, self.knobs
        averaging = min(1.0, 10 / (knobs.look_every * math.ceil(rows / knobs.batch_rows)))
        if knobs.objective != "dual":
            step = 1 / (self.top + float(model.precision.max()))
            return _Primal(model, system, start, step * knobs.step_size, knobs, averaging)
        white = replace(model, features=Scaled(model.features, model.precision.rsqrt()))
        top = self.top / float(model.precision) if len(model.precision) == 1 else self._steepest(white)
        step = 1 / (top + max(rows / knobs.batch_rows, 1.0))
        return _Dual(model, system, start, step * knobs.step_size, knobs, averaging)

    def _order(self, rows: int) -> list[Tensor]:
        return list(torch.randperm(rows, generator=self._rng).split(self.knobs.batch_rows))

    def solve(
        self, model: LinearModel, system: System, start: Tensor | None = None, tolerance: float | None = None
    ) -> Solution:
        """Solve for all unknowns."""
        knobs, device = self.knobs, system.right.device
        self._rng.manual_seed(self.seed)  # a solve does not depend on those before it, so that it can be made again
        report, finish = Report(), Finish(knobs.tolerance if tolerance is None else tolerance, knobs.rest)
        report.residuals = torch.full((len(system.right),), math.inf, dtype=torch.float64, device=device)
        z, image = torch.empty_like(system.right), torch.empty_like(system.right)
        whole, left = inner(system.right, system.right), torch.arange(len(z), device=device)
        state = self._state(model, system, start)
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

    def _pass(self, state: "_State", model: LinearModel, report: Report) -> None:
        for block in model.features.blocks([i.to(model.features.device) for i in self._order(model.features.rows)]):
            state.move(block)
            report.iterations += 1
        report.vectors += len(state.system.right)


class _State(ABC):
    """Where a descent is; tensors of K unknowns."""

    def __init__(
        self,
        model: LinearModel,
        system: System,
        start: Tensor | None,
        step: float,
        knobs: StochasticDescent,
        averaging: float,  # the weight of an iterate in the average
    ) -> None:
        self.model, self.system, self.start, self.knobs = model, system, start, knobs
        self.step, self.averaging = step, averaging
        self._best = torch.full((len(system.right),), math.inf, dtype=torch.float64, device=system.right.device)
        self._stale, self._shortened = 0, False  # looks since residuals last fell; whether the last look cut the step
        self._begin()

    @abstractmethod
    def _begin(self) -> None: ...

    @abstractmethod
    def _due(self) -> tuple[float, int]:
        """By which factor residuals should have fallen after so many looks, or else the step is too long."""

    @abstractmethod
    def move(self, block: Block) -> None:
        """A step by the rows of a batch."""

    @abstractmethod
    def average(self) -> Tensor:
        """The unknowns, averaged over late iterates, [k, d]."""

    @abstractmethod
    def _tensors(self) -> Iterator[str]: ...

    def _part(self, block: Block) -> float:
        """Of a whole batch's rows."""
        return len(block.index) / min(self.knobs.batch_rows, self.model.features.rows)

    def keep(self, columns: Tensor) -> None:
        """Go on with some of the unknowns."""
        self.system = self.system.take(columns)
        for name in ("_best", *self._tensors()):
            setattr(self, name, getattr(self, name)[columns])

    def judge(self, residuals: Tensor) -> Tensor:
        """Shorten the step where residuals [k] say so, and begin again where they run away: those are infinite then."""
        if not bool((residuals < 1e3).all()):
            self.model.check_finite()
            self.step /= 4
            self._begin()
            return torch.full_like(residuals, math.inf)
        fall, patience = self._due()
        self._stale = 0 if self._shortened or residuals.norm() < fall * self._best.norm() else self._stale + 1
        self._shortened = self._stale == patience
        if self._shortened:
            self.step /= 2
        if not self._stale:
            self._best = residuals
        return residuals


class _Primal(_State):
    """Descent on L or L'."""

    def _due(self) -> tuple[float, int]:
        # Batches keep the iterates moving about the solution, as far as the step is long.
        return (0.9, 1) if self.knobs.batch_rows < self.model.features.rows else (1.0, 10)

    def _begin(self) -> None:
        self.z = (self.system.prior if self.start is None else self.start).clone()
        self.mean, self.velocity = self.z.clone(), torch.zeros_like(self.z)

    def _tensors(self) -> Iterator[str]:
        yield from ("z", "mean", "velocity")
        if self.start is not None:
            yield "start"

    def move(self, block: Block) -> None:
        """A step by the rows of a batch."""
        model, system, share = self.model, self.system, self.model.features.rows / len(block.index)
        ahead = self.z + self.knobs.momentum * self.velocity
        factor = model.noise.factor(block)
        seen = times_transposed(factor, block.forward(ahead))
        if self.knobs.objective == "reduced":
            constant = system.right
        else:
            constant = model.precision * system.prior
            seen = seen if system.noise is None else seen - system.noise(block)
        gradient = share * block.backward(times(factor, seen)) + model.precision * ahead - constant
        # A batch of fewer rows, the last, takes a shorter step: every row counts alike.
        self.velocity.mul_(self.knobs.momentum).sub_(gradient, alpha=self.step * self._part(block))
        self.z += self.velocity
        self.mean.lerp_(self.z, self.averaging)

    def average(self) -> Tensor:
        """The average of iterates."""
        return self.mean


class _Dual(_State):
    """Descent on the dual; u and its velocity have an image Phi^T R u among the parameters that moves with them."""

    def _due(self) -> tuple[float, int]:
        return 1.0, 10  # at the solution no batch moves it: residuals fall, if not every time

    def _begin(self) -> None:
        features, right = self.model.features, self.system.right
        shape = (len(right), features.rows, self.model.noise.width)
        self.u, self.velocity, self.noise = right.new_zeros(shape), right.new_zeros(shape), right.new_zeros(shape)
        if self.system.noise is not None:  # kept, since as much is kept anyway
            for block in features.blocks():
                self.noise[:, block.index] = self.system.noise(block)
        if self.start is not None:  # at the solution, u = e - R^T Phi z
            for block in features.blocks():
                seen = times_transposed(self.model.noise.factor(block), block.forward(self.start))
                self.u[:, block.index] = self.noise[:, block.index] - seen
        self.image = self.model.pulled(lambda block: self.u[:, block.index])
        self.mean, self.image_velocity = self.image.clone(), torch.zeros_like(self.image)

    def _tensors(self) -> Iterator[str]:
        yield from ("u", "velocity", "noise", "image", "mean", "image_velocity")
        if self.start is not None:
            yield "start"

    def move(self, block: Block) -> None:
        """A step by the rows of a batch."""
        model, momentum = self.model, self.knobs.momentum
        share = self._part(block) * model.features.rows / len(block.index)
        factor = model.noise.factor(block)
        u = self.u[:, block.index] + momentum * self.velocity[:, block.index]
        z = self.system.prior + (self.image + momentum * self.image_velocity) / model.precision
        gradient = times_transposed(factor, block.forward(z)) + u - self.noise[:, block.index]
        change = gradient * (-self.step * share)
        self.velocity.mul_(momentum)
        self.velocity[:, block.index] += change
        self.u += self.velocity
        self.image_velocity.mul_(momentum).add_(block.backward(times(factor, change)))
        self.image += self.image_velocity
        self.mean.lerp_(self.image, self.averaging)

    def average(self) -> Tensor:
        """The unknowns of the averaged dual ones."""
        return self.system.prior + self.mean / self.model.precision
