"""Solvers that move after every batch of rows, for data too large for many full passes.

    L(z)  = 1/2 sum_i |eps_i - phi_i z|^2_(B_i) + 1/2 |z - theta_0|^2_A        gradient: Phi^T R (R^T Phi z - e) + A (z - theta_0)
    L'(z) = 1/2 sum_i |phi_i z|^2_(B_i) + 1/2 |z - A^-1 b|^2_A                 gradient: M z + A z - b
    dual:   (I + R^T Phi A^-1 Phi^T R) u = e - R^T Phi theta_0,  z = theta_0 + A^-1 Phi^T R u

L and L' differ by a constant; L' has the noise of all rows in b, so a batch leaves less to chance (Antoran et al. 2023).
The dual has an unknown for every output of every row, n r K numbers, and its gradient for a batch is exact for those
rows, so that it vanishes at the solution (Lin et al. 2024). All use Nesterov's momentum and a geometric average of
iterates; every few passes the average's residual is measured, and the step halved where it no longer falls.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from caveat.engine.features import Block, times, times_transposed
from caveat.engine.linear_model import LinearModel, System, inner
from caveat.engine.normals import standard_normals
from caveat.engine.solvers import Finish, Progress, Report, Solution, relative
from caveat.knobs import Count, Positive, Share, check_knobs

__all__ = ["StochasticDescent", "top_eigenvalue"]


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
    progress: Progress | None = None

    def __post_init__(self) -> None:
        check_knobs(self)

    def prepare(self, model: LinearModel, seed: int = 0) -> "PreparedDescent":
        """Measure the curvature of some batches, which limits the step."""
        return PreparedDescent(self, model, seed)


class PreparedDescent:
    """Descent with a known largest curvature of batches."""

    def __init__(self, knobs: StochasticDescent, model: LinearModel, seed: int) -> None:
        self.knobs, self.seed = knobs, seed
        self._rng = torch.Generator().manual_seed(seed)
        some = self._order(model.features.rows)[:4]
        share = [model.features.rows / len(index) for index in some]
        tops = [top_eigenvalue(model, seed, [index]) * s for index, s in zip(some, share, strict=True)]
        self.top, self.preparation = max(tops), 10 * sum(1 / s for s in share)

    def _order(self, rows: int) -> list[Tensor]:
        return list(torch.randperm(rows, generator=self._rng).split(self.knobs.batch_rows))

    def solve(self, model: LinearModel, system: System, start: Tensor | None = None) -> Solution:
        """Solve for all unknowns."""
        knobs, rows = self.knobs, model.features.rows
        report, finish = Report(), Finish(knobs.tolerance, knobs.rest)
        count = len(system.right)
        report.residuals = torch.full((count,), math.inf, dtype=torch.float64, device=system.right.device)
        z, image, left = torch.empty_like(system.right), torch.empty_like(system.right), torch.arange(count)
        kind = _Dual if knobs.objective == "dual" else _Primal
        steps = knobs.look_every * math.ceil(rows / knobs.batch_rows)
        state = kind(model, system, start, self.top, knobs, min(1.0, 50 / steps))
        whole = inner(system.right, system.right)
        halved = False  # at the last look; the shorter step is given the time between two looks to show its worth
        while True:
            for _ in range(knobs.look_every):
                self._pass(state, model, report)
            found = state.average()
            curved = model.curvature(found)
            report.vectors += len(found)
            residual = state.system.right - curved - model.precision * found
            residuals = relative(inner(residual, residual), whole[left])
            if not residuals.isfinite().all() or (residuals > 1e3).any():
                model.check_finite()
                state.restart()
                residuals = torch.full_like(residuals, math.inf)
            elif residuals.norm() > 0.9 * report.residuals[left].norm() and not halved:
                state.step /= 2
                halved = True
            else:
                halved = False
            done = finish(residuals, inner(found, curved))
            report.residuals[left] = residuals
            report.history.append((report.vectors, float(report.residuals.max())))
            if knobs.progress is not None:
                knobs.progress(report.passes, float(residuals.max()))
            z[left], image[left] = found, curved
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
        top: float,
        knobs: StochasticDescent,
        averaging: float,
    ) -> None:
        self.model, self.system, self.start, self.knobs, self.averaging = model, system, start, knobs, averaging
        self.top = top
        self.step = self._largest_step() * knobs.step_size
        self._begin()

    @abstractmethod
    def _largest_step(self) -> float: ...

    @abstractmethod
    def _begin(self) -> None: ...

    @abstractmethod
    def move(self, block: Block) -> None:
        """A step by the rows of a batch."""

    @abstractmethod
    def average(self) -> Tensor:
        """The unknowns, averaged over late iterates, [k, d]."""

    @abstractmethod
    def _tensors(self) -> Iterator[str]: ...

    def keep(self, columns: Tensor) -> None:
        """Go on with some of the unknowns."""
        self.system = self.system.take(columns)
        for name in self._tensors():
            setattr(self, name, getattr(self, name)[columns])

    def restart(self) -> None:
        """Begin again with a quarter of the step, after it was too long."""
        self.step /= 4
        self._begin()


class _Primal(_State):
    """Descent on L or L'."""

    def _largest_step(self) -> float:
        return 1 / (self.top + float(self.model.precision.max()))

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
        self.velocity.mul_(self.knobs.momentum).sub_(gradient, alpha=self.step)
        self.z += self.velocity
        self.mean.lerp_(self.z, self.averaging)

    def average(self) -> Tensor:
        """The average of iterates."""
        return self.mean


class _Dual(_State):
    """Descent on the dual; u and its velocity have an image Phi^T R u among the parameters that moves with them."""

    def _largest_step(self) -> float:
        share = max(self.model.features.rows / self.knobs.batch_rows, 1.0)
        return 1 / (self.top / float(self.model.precision.min()) + share)

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
        share = model.features.rows / len(block.index)
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


def top_eigenvalue(model: LinearModel, seed: int = 0, order: list[Tensor] | None = None, products: int = 10) -> float:
    """About the largest eigenvalue of M, or of the part of some rows, by power iteration from below."""
    features = model.features
    z = standard_normals(seed, "power", [0], torch.arange(features.size, device=features.device), features.dtype)
    value = 0.0
    for _ in range(products):
        z /= z.norm()
        blocks = features.blocks(None if order is None else [index.to(features.device) for index in order])
        z = sum((model.block_curvature(block, z) for block in blocks), start=torch.zeros_like(z))
        value = float(z.norm())
        if not value > 0:
            break
    return value
