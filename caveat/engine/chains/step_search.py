"""The step size that the curvature of a log density allows, found while chains burn in.

    H v ~ (g(theta) - g(theta + e v)) / e,   lambda = |H v|,   v <- H v / |H v|                      (power iteration)
    eta lambda = min(0.1 * 2 (1 + beta), 0.5 * 2 (1 - beta) B / (N - B))

The first bound keeps a chain at a tenth of the step at which it would run away, where the variance along the steepest
direction is 1.11 times what it should be. The second is for the noise of gradients from B of N rows, which is that of
a temperature higher by about eta lambda (N - B) / (2 B (1 - beta)) along that direction. The curvature of regression
has 1 / noise^2 in it, and learned noise falls by orders of magnitude while a chain burns in, so that the curvature is
measured every few steps; what counts is the largest one of late. With the burn-in the search is over: draws are
taken with one step size, since a step that goes on adapting to where the chain is would bias them.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from caveat.network import Params

__all__ = ["StepSearch", "share_of_stable_step"]

Gradient = Callable[[Tensor], Tensor]  # of a log density, [chains, P] at positions [chains, P]

STEEPNESS = 0.1  # the step, as a share of that at which a chain runs away
BATCH_HEAT = 0.5  # by how much gradients from batches may heat the steepest direction, in units of the temperature
CURVATURE_ROWS = 512  # that a curvature is measured on, or a batch if that has more
FIRST_ITERATIONS = 10  # of the power iteration, from a random direction; afterwards one is enough
FORGETTING = 0.95  # by which an earlier, larger curvature counts less from one measurement to the next
EVERY = 10  # steps from one measurement to the next, or a hundredth of the burn-in after its first steps
OFTEN = 500  # steps in which measurements are that frequent
REACH = 1e-3  # of a finite difference, in units of the position's length


class StepSearch:
    """The step size eta of each chain: as given, or from the largest curvature that the chain met in its burn-in."""

    def __init__(self, given: float | None, momentum: float, rows: int, batch: int, burn_in_steps: int) -> None:
        """`given` is a step size that is used as it is; `batch` of the `rows` are seen by a step."""
        self.given, self.burn_in_steps = given, burn_in_steps
        self.allowed = STEEPNESS * 2 * (1 + momentum)  # of eta lambda
        if batch < rows:
            self.allowed = min(self.allowed, BATCH_HEAT * 2 * (1 - momentum) * batch / (rows - batch))
        self.rows = min(rows, max(batch, CURVATURE_ROWS))  # that a measurement takes

    def begin(self, direction: Tensor) -> None:
        """Start from random directions [chains, P], of any length."""
        self.direction = direction / direction.norm(dim=1, keepdim=True)
        self.curvature = torch.zeros(len(direction), dtype=torch.float64, device=direction.device)

    def due(self, step: int) -> bool:
        """Whether the curvature is to be measured before a step, counted from 0."""
        if self.given is not None or step > max(0, self.burn_in_steps - 1):
            return False
        return step % EVERY == 0 and (step < OFTEN or step % max(EVERY, self.burn_in_steps // 1000 * EVERY) == 0)

    def measure(self, gradient: Gradient, position: Tensor, which: slice, first: bool, mass: Tensor | None) -> None:
        """Look at the curvature at positions [chains, P] of some chains, in coordinates of unit mass."""
        iterations = FIRST_ITERATIONS if first else 1
        found, self.direction[which] = _steepest(gradient, position, self.direction[which], iterations, mass)
        self.curvature[which] = torch.maximum(found, FORGETTING * self.curvature[which])

    @property
    def step_size(self) -> Tensor:
        """The present step size of each chain, [chains] in float64."""
        if self.given is not None:
            return torch.full_like(self.curvature, self.given)
        return self.allowed / self.curvature

    def tensors(self) -> Params:
        """What a checkpoint keeps, [chains, ...]."""
        return {"direction": self.direction, "curvature": self.curvature}

    def restore(self, tensors: Params) -> None:
        """Go on from a checkpoint."""
        self.direction, self.curvature = tensors["direction"].clone(), tensors["curvature"].clone()


def share_of_stable_step(
    gradient: Gradient, position: Tensor, direction: Tensor, step_size: Tensor, momentum: float, mass: Tensor | None
) -> Tensor:
    """The step sizes [chains] as shares of those at which chains would run away from these positions [chains, P]."""
    direction = direction / direction.norm(dim=1, keepdim=True)
    curvature, _ = _steepest(gradient, position, direction, FIRST_ITERATIONS, mass)
    return step_size * curvature / (2 * (1 + momentum))


def _steepest(
    gradient: Gradient, position: Tensor, direction: Tensor, iterations: int, mass: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The largest absolute curvature [chains] in float64 and its direction [chains, P], from unit directions."""
    root = torch.ones_like(position) if mass is None else mass.sqrt()
    reach = REACH * (1 + position.norm(dim=1, keepdim=True))
    here = gradient(position)
    for _ in range(iterations):
        shift = direction / root
        distance = reach / shift.norm(dim=1, keepdim=True)
        product = (here - gradient(position + distance * shift)) / distance / root
        length = product.norm(dim=1, keepdim=True)
        direction = torch.where(length > 0, product / length, direction)
    return length[:, 0].double().clamp_min(1e-6), direction
