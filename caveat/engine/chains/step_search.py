"""The step size that the curvature of a log density allows, found while chains burn in.

    H v ~ (g(theta) - g(theta + e v)) / e,   lambda = |H v|,   v <- H v / |H v|                      (power iteration)
    eta lambda = min(0.1 * 2 (1 + beta), 30 * 2 (1 - beta) B / (N - B))

The first bound keeps a chain at a tenth of the step at which it would run away, where the variance along the steepest
direction is 1.11 times what it should be. The second is for the noise of gradients from B of N rows. Were the rows of
a batch drawn afresh, it would be that of a temperature higher by eta lambda (N - B) / (2 B (1 - beta)) along that
direction and less along all others; since every row is seen once an epoch it is far less, and 30 was chosen by results
(docs/methods/sgmcmc.md). The curvature of regression has 1 / noise^2 in it, and learned noise falls by orders of
magnitude while a chain burns in, so that the curvature is measured every few steps; what counts is the largest one of
late. With the burn-in the search is over: draws are taken with one step size, since a step that goes on adapting to
where the chain is would bias them. Only where a chain meets a curvature of three times what it knew is its step made
smaller, for good: a chain whose burn-in was too short then stays stable.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from caveat.network import Params

__all__ = ["BURN_IN_STEPS", "STEPS_A_DRAW", "StepSearch", "share_of_stable_step", "warnings_of_steps"]

Gradient = Callable[[Tensor], Tensor]  # of a log density, [chains, P] at positions [chains, P]

BURN_IN_STEPS = 2000  # at least, however few rows there are, unless a method is told how many epochs
STEPS_A_DRAW = 50  # likewise
STEEPNESS = 0.1  # the step, as a share of that at which a chain runs away
BATCH_HEAT = 30.0  # by how much independent batches would heat the steepest direction at most, in units of T
CURVATURE_ROWS = 512  # that a curvature is measured on, or a batch if that has more
FIRST_ITERATIONS = 10  # of the power iteration, from a random direction; afterwards one is enough
FORGETTING = 0.95  # by which an earlier, larger curvature counts less from one measurement to the next
EVERY = 10  # steps from one measurement to the next, or a hundredth of the burn-in after its first steps
OFTEN = 500  # steps in which measurements are that frequent
EVERY_AFTERWARDS = 100  # steps, once the burn-in is over
TOLERANCE = 3.0  # by which the curvature may then be larger than it was, before the step is made smaller
TOO_STEEP = 0.5  # the share at which the variance along the steepest direction is twice what it should be
REACH = 1e-3  # of a finite difference, in units of the position's length


class StepSearch:
    """The step size eta of each chain: as given, or from the largest curvature that the chain met in its burn-in."""

    def __init__(self, given: float | None, momentum: float, rows: int, batch: int, burn_in_steps: int) -> None:
        """`given` is a step size that is used as it is; `batch` of the `rows` are seen by a step."""
        self.given, self.burn_in_steps, self.all_rows = given, burn_in_steps, rows
        self.allowed = STEEPNESS * 2 * (1 + momentum)  # of eta lambda
        if batch < rows:
            self.allowed = min(self.allowed, BATCH_HEAT * 2 * (1 - momentum) * batch / (rows - batch))
        self.rows = min(rows, max(batch, CURVATURE_ROWS))  # that a measurement takes

    def begin(self, direction: Tensor) -> None:
        """Start from random directions [chains, P], of any length."""
        self.turn(direction)
        self.curvature = torch.zeros(len(direction), dtype=torch.float64, device=direction.device)

    def turn(self, direction: Tensor) -> None:
        """Go on from other directions [chains, P], of any length: there are other coordinates now."""
        self.direction = direction / direction.norm(dim=1, keepdim=True)

    def due(self, step: int) -> bool:
        """Whether the curvature is to be measured before a step, counted from 0."""
        if self.given is not None:
            return False
        if step >= max(1, self.burn_in_steps):
            return step % EVERY_AFTERWARDS == 0
        return step % EVERY == 0 and (step < OFTEN or step % max(EVERY, self.burn_in_steps // 1000 * EVERY) == 0)

    def measure(self, gradient: Gradient, position: Tensor, which: slice, step: int, mass: Tensor | None) -> None:
        """Look at the curvature at positions [chains, P] of some chains before a step, in coordinates of unit mass."""
        iterations = FIRST_ITERATIONS if step == 0 else 1
        found, self.direction[which] = _steepest(gradient, position, self.direction[which], iterations, mass)
        known = self.curvature[which]
        if step < max(1, self.burn_in_steps):
            self.curvature[which] = torch.maximum(found, FORGETTING * known)
        else:
            self.curvature[which] = torch.where(found > TOLERANCE * known, found, known)

    def cost(self, steps: range) -> float:
        """Gradients of all rows that measurements before these steps take, of one chain."""
        iterations = (FIRST_ITERATIONS if step == 0 else 1 for step in steps if self.due(step))
        return sum(1 + n for n in iterations) * self.rows / self.all_rows

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


def warnings_of_steps(share: float, learning_rate: float, given: bool) -> list[str]:
    """What to say of steps that are such a share of those at which chains would run away."""
    if share <= TOO_STEEP:
        return []
    advice = "lower learning_rate" if given else "give a longer burn_in"
    return [
        f"steps are {share:.2g} of those at which chains run away, so that the posterior is far too wide along its "
        f"steepest direction: {advice} (the rate is {learning_rate:.2g})"
    ]


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
