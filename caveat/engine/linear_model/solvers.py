"""Solvers of H z = b for K unknowns at once: what they share.

    prepared = ConjugateGradients().prepare(model)         what does not depend on the prior: the Nystrom sketch
    solution = prepared.solve(model, system, start)        for any prior precision, from zero or a warm start

An unknown is finished when two things hold. Its residual is small, |b - H z| <= tolerance |b|, in the plain norm and in
that of the preconditioner, which is about the error's own: |r|_(P^-1) ~ |z - z*|_H. And z^T M z, its share of the
effective dimension, has come to rest: stopping early does not give a rough sample but one of a wider posterior.
Finished unknowns take no further products.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from caveat.engine.linear_model.model import LinearModel, System

__all__ = ["Counted", "Finish", "Prepared", "Progress", "Report", "Solution", "Solver", "relative"]

Progress = Callable[[float, float], None]  # passes so far, the largest residual
Counted = Callable[[int, int], None]  # products so far, of how many


@dataclass
class Report:
    """How a solve went."""

    iterations: int = 0
    vectors: float = 0.0  # products with H, of one vector and all rows
    residuals: Tensor = field(default_factory=lambda: torch.zeros(0))  # |b - H z| / |b|, [K]
    converged: bool = False
    history: list[tuple[float, float]] = field(default_factory=list)  # vectors so far, the largest residual
    stood_still: bool = False  # some unknowns, at the limit of what the products' digits allow
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

    def preconditioner(self, precision: Tensor) -> Callable[[Tensor], Tensor]:
        """About H^-1 v for v [K, d] under a prior."""

    def solve(self, model: LinearModel, system: System, start: Tensor | None = None) -> Solution:
        """Solve for all unknowns; the start is that of the prior's draws unless given."""


class Solver(Protocol):
    """A way to solve, and its knobs."""

    def prepare(
        self,
        model: LinearModel,
        seed: int = 0,
        kept: dict[str, Tensor] | None = None,
        counted: Counted | None = None,
    ) -> Prepared:
        """Find what serves every prior precision, or take what was kept; `counted` hears of each product."""


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


def relative(squares: Tensor, whole: Tensor) -> Tensor:
    """The root of a quotient of squares, zero where both are."""
    return torch.where(squares == 0, 0.0, squares / whole).sqrt()
