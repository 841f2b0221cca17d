"""Descent on batches of rows, for K unknowns of a linear model at once.

    L(z)  = 1/2 sum_i |eps_i - phi_i z|^2_(B_i) + 1/2 |z - theta_0|^2_A      gradient M z - Phi^T R e + A (z - theta_0)
    L'(z) = 1/2 sum_i |phi_i z|^2_(B_i) + 1/2 |z - A^-1 b|^2_A               gradient M z + A z - b
    dual:   (I + R^T Phi A^-1 Phi^T R) u = e - R^T Phi theta_0,  z = theta_0 + A^-1 Phi^T R u

L and L' differ by a constant; L' has the noise of all rows in b, so the gradient of a batch varies less (Antoran et al.
2023). The dual has an unknown for every output of every row, n r K numbers, and its gradient for a batch is exact for
those rows, so that it vanishes at the solution (Lin et al. 2024). All three use Nesterov's momentum and a geometric
average of iterates.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from caveat.engine.linear_model.features import RowBlock, apply_factor, apply_factor_transposed
from caveat.engine.linear_model.model import LinearModel, LinearSystem

__all__ = ["Descent", "Dual", "Pace", "Primal"]


@dataclass
class Pace:
    """How fast a descent moves."""

    step: float  # the step size, which is shortened on the way
    momentum: float
    averaging: float  # the weight of an iterate in the average
    batch_rows: int


class Descent(ABC):
    """A descent for K unknowns: where it is, and how it moves by a batch."""

    def __init__(self, model: LinearModel, system: LinearSystem, start: Tensor | None, pace: Pace) -> None:
        self.model, self.system, self.start, self.pace = model, system, start, pace
        self._best = torch.full((len(system.right),), math.inf, dtype=torch.float64, device=system.right.device)
        self._stale, self._shortened = 0, False  # looks since residuals last fell; whether the last look cut the step
        self._begin()

    @abstractmethod
    def _begin(self) -> None: ...

    @abstractmethod
    def _due(self) -> tuple[float, int]:
        """By which factor residuals should fall within how many looks; otherwise the step is too long."""

    @abstractmethod
    def move(self, block: RowBlock) -> None:
        """Take a step by the rows of a batch."""

    @abstractmethod
    def average(self) -> Tensor:
        """The unknowns, averaged over late iterates, [k, d]."""

    @abstractmethod
    def _tensors(self) -> Iterator[str]: ...

    def _part(self, block: RowBlock) -> float:
        """The share of a whole batch's rows that this one has."""
        return len(block.index) / min(self.pace.batch_rows, self.model.features.rows)

    def keep(self, columns: Tensor) -> None:
        """Go on with some of the unknowns."""
        self.system = self.system.take(columns)
        for name in ("_best", *self._tensors()):
            setattr(self, name, getattr(self, name)[columns])

    def judge(self, residuals: Tensor) -> Tensor:
        """Shorten the step if residuals [k] do not fall; if they explode, begin again and return infinity."""
        if not bool((residuals < 1e3).all()):
            self.model.check_finite()
            self.pace.step /= 4
            self._begin()
            return torch.full_like(residuals, math.inf)
        fall, patience = self._due()
        self._stale = 0 if self._shortened or residuals.norm() < fall * self._best.norm() else self._stale + 1
        self._shortened = self._stale == patience
        if self._shortened:
            self.pace.step /= 2
        if not self._stale:
            self._best = residuals
        return residuals


class Primal(Descent):
    """Descent on L or, if `reduced`, on L'."""

    def __init__(
        self, model: LinearModel, system: LinearSystem, start: Tensor | None, pace: Pace, reduced: bool
    ) -> None:
        self.reduced = reduced
        super().__init__(model, system, start, pace)

    def _due(self) -> tuple[float, int]:
        # Batches keep the iterates moving around the solution, in proportion to the step.
        return (0.9, 1) if self.pace.batch_rows < self.model.features.rows else (1.0, 10)

    def _begin(self) -> None:
        self.z = (self.system.prior if self.start is None else self.start).clone()
        self.mean, self.velocity = self.z.clone(), torch.zeros_like(self.z)

    def _tensors(self) -> Iterator[str]:
        yield from ("z", "mean", "velocity")
        if self.start is not None:
            yield "start"

    def move(self, block: RowBlock) -> None:
        """Take a step by the rows of a batch."""
        model, system, share = self.model, self.system, self.model.features.rows / len(block.index)
        ahead = self.z + self.pace.momentum * self.velocity
        factor = model.noise.factor(block)
        seen = apply_factor_transposed(factor, block.forward(ahead))
        if self.reduced:
            constant = system.right
        else:
            constant = model.precision * system.prior
            seen = seen if system.noise is None else seen - system.noise(block)
        gradient = share * block.backward(apply_factor(factor, seen)) + model.precision * ahead - constant
        # The last batch may have fewer rows and then takes a shorter step, so that every row counts alike.
        self.velocity.mul_(self.pace.momentum).sub_(gradient, alpha=self.pace.step * self._part(block))
        self.z += self.velocity
        self.mean.lerp_(self.z, self.pace.averaging)

    def average(self) -> Tensor:
        """The average of iterates, [k, d]."""
        return self.mean


class Dual(Descent):
    """Descent on the dual; the images Phi^T R u of u and of its velocity, [k, d], are updated along with them."""

    def _due(self) -> tuple[float, int]:
        return 1.0, 10  # no batch moves the solution, so residuals fall, if not at every look

    def _begin(self) -> None:
        features, right = self.model.features, self.system.right
        shape = (len(right), features.rows, self.model.noise.width)
        self.u, self.velocity, self.noise = right.new_zeros(shape), right.new_zeros(shape), right.new_zeros(shape)
        if self.system.noise is not None:  # stored, since u is as large
            for block in features.blocks():
                self.noise[:, block.index] = self.system.noise(block)
        if self.start is not None:  # at the solution, u = e - R^T Phi z
            for block in features.blocks():
                seen = apply_factor_transposed(self.model.noise.factor(block), block.forward(self.start))
                self.u[:, block.index] = self.noise[:, block.index] - seen
        self.image = self.model.pulled(lambda block: self.u[:, block.index])
        self.mean, self.image_velocity = self.image.clone(), torch.zeros_like(self.image)

    def _tensors(self) -> Iterator[str]:
        yield from ("u", "velocity", "noise", "image", "mean", "image_velocity")
        if self.start is not None:
            yield "start"

    def move(self, block: RowBlock) -> None:
        """Take a step by the rows of a batch."""
        model, momentum = self.model, self.pace.momentum
        share = self._part(block) * model.features.rows / len(block.index)
        factor = model.noise.factor(block)
        u = self.u[:, block.index] + momentum * self.velocity[:, block.index]
        z = self.system.prior + (self.image + momentum * self.image_velocity) / model.precision
        gradient = apply_factor_transposed(factor, block.forward(z)) + u - self.noise[:, block.index]
        change = gradient * (-self.pace.step * share)
        self.velocity.mul_(momentum)
        self.velocity[:, block.index] += change
        self.u += self.velocity
        self.image_velocity.mul_(momentum).add_(block.backward(apply_factor(factor, change)))
        self.image += self.image_velocity
        self.mean.lerp_(self.image, self.pace.averaging)

    def average(self) -> Tensor:
        """The unknowns [k, d] that belong to the averaged dual ones."""
        return self.system.prior + self.mean / self.model.precision
