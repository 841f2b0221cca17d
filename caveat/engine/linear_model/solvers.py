"""Solvers of H z = b for K unknowns at once: what they share.

    prepared = ConjugateGradients().prepare(model)         what does not depend on the prior: the Nystrom sketch
    solution = prepared.solve(model, system, start)        for any prior precision, from zero or a warm start

An unknown is finished when two things hold. Its residual is small, |b - H z| <= tolerance |b|, both in the plain norm
and in that of the preconditioner, which approximates the norm of the error: |r|_(P^-1) ~ |z - z*|_H. And z^T M z, its
share of the effective dimension, no longer changes: a solve that stops early gives samples of a wider posterior, not
just rough ones. Finished unknowns take no further products.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from caveat.engine.linear_model.model import LinearModel, LinearSystem

__all__ = [
    "FinishRule",
    "PreparedSolver",
    "ProductCounter",
    "Progress",
    "Solution",
    "SolveReport",
    "Solver",
    "relative",
]

Progress = Callable[[float, float], None]  # passes so far, the largest residual
ProductCounter = Callable[[int, int], None]  # products so far, of how many


@dataclass
class SolveReport:
    """How a solve went."""

    iterations: int = 0
    vectors: float = 0.0  # products with H, of one vector and all rows
    residuals: Tensor = field(default_factory=lambda: torch.zeros(0))  # |b - H z| / |b|, [K]
    converged: bool = False
    history: list[tuple[float, float]] = field(default_factory=list)  # vectors so far, the largest residual
    stood_still: bool = False  # whether some unknowns could not be improved, at the precision of the products
    warnings: list[str] = field(default_factory=list)

    @property
    def passes(self) -> float:
        """Passes over the data with all K unknowns; a pass with fewer unknowns counts by their share."""
        return self.vectors / max(len(self.residuals), 1)


@dataclass(frozen=True)
class Solution:
    """The unknowns, their images under M, and how the solve went."""

    z: Tensor  # [K, d]
    image: Tensor  # M z, [K, d]
    report: SolveReport

    def effective_dimension(self, groups: tuple[int, ...] | None = None) -> Tensor:
        """The mean over the unknowns of z^T M z, [G] in float64: one for each group of consecutive parameters.

        Without groups, G = 1.
        """
        each = (self.z * self.image).sum(0, dtype=torch.float64) / len(self.z)
        return torch.stack([part.sum() for part in each.split(groups or len(each))])


class PreparedSolver(Protocol):
    """A solver that is prepared for a model's features and noise, under any prior."""

    top: float  # about the largest eigenvalue of M
    preparation: float  # products that the preparation took
    progress: Progress | None  # called with the passes so far and the largest residual

    def tensors(self) -> dict[str, Tensor]:
        """What the preparation computed, to be stored and given to `prepare` again."""

    def preconditioner(self, precision: Tensor) -> Callable[[Tensor], Tensor]:
        """A function v [K, d] -> approximately H^-1 v, under a prior precision [d] or [1]."""

    def solve(self, model: LinearModel, system: LinearSystem, start: Tensor | None = None) -> Solution:
        """Solve for all unknowns from `start` [K, d], or from the system's prior where none is given."""


class Solver(Protocol):
    """A solver and its knobs."""

    def prepare(
        self,
        model: LinearModel,
        seed: int = 0,
        stored: dict[str, Tensor] | None = None,
        counted: ProductCounter | None = None,
    ) -> PreparedSolver:
        """Compute what serves every prior precision, or take what was stored; `counted` is called with each product."""


class FinishRule:
    """Decides when an unknown is finished."""

    def __init__(self, tolerance: float, rest: float) -> None:
        self.tolerance, self.rest = tolerance, rest
        self._energy: Tensor | None = None  # z^T M z when last looked at

    def __call__(self, residual: Tensor, energy: Tensor) -> Tensor:
        """Which unknowns are finished, from relative residuals [k] (the largest of each) and z^T M z [k]."""
        solved = residual <= self.tolerance / 100  # nothing is left to improve, as after a very good start
        if self._energy is not None:
            resting = (energy - self._energy).abs() <= self.rest * energy.abs()
            solved |= resting & (residual <= self.tolerance)
        self._energy = energy
        return solved

    def keep(self, columns: Tensor) -> None:
        """Go on with some of the unknowns."""
        self._energy = None if self._energy is None else self._energy[columns]


def relative(squares: Tensor, whole: Tensor) -> Tensor:
    """The root of a quotient of squares [k], zero where both squares are."""
    return torch.where(squares == 0, 0.0, squares / whole).sqrt()
