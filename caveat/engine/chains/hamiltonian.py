"""Hamiltonian dynamics: a reversible integrator that preserves volume, and the adaptation of its step size.

    p <- p + eps/2 grad log p(z);  z <- z + eps p;  p <- p + eps/2 grad log p(z)          (leapfrog, L times)

With the rows in K parts this is the symmetric split of Neal (2011, section 5.5.1): kicks of length eps/2 by one part
after the other and then in reverse order, with a drift of eps/(2K) after each kick on the way there and before each
kick on the way back. K = 1 is leapfrog.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

__all__ = ["DualAveraging", "integrate"]

Gradient = Callable[[Tensor, int], tuple[Tensor, Tensor]]


def integrate(
    gradient: Gradient, z: Tensor, momentum: Tensor, first: Tensor, step_size: float, steps: int, parts: int = 1
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Follow the dynamics for so many steps from position z and a momentum, both [chains, P].

    `gradient(z, part)` returns log likelihood [chains] and gradient [chains, P] of one part; `first` is the gradient of
    part 0 at z. Returns position and momentum at the end, and part 0's log likelihood and gradient there.
    """
    half, drift = step_size / 2, step_size / (2 * parts)
    order = [*range(1, parts), *reversed(range(parts))]  # after part 0: there, and back again
    z, momentum = z.clone(), momentum.add(first, alpha=half)
    for step in range(steps):
        for i, part in enumerate(order):
            z.add_(momentum, alpha=2 * drift if i == parts - 1 else drift)  # two drifts meet at the turn
            value, gradient_here = gradient(z, part)
            kicks = 2 if part == 0 and step < steps - 1 else 1  # the last of this step and the first of the next
            momentum.add_(gradient_here, alpha=kicks * half)
    return z, momentum, value, gradient_here


@dataclass
class DualAveraging:
    """Finds the step size at which the acceptance is the target (Hoffman and Gelman 2014, section 3.2)."""

    log_step: float  # of the step size to try next
    centre: float  # towards which log step sizes are drawn
    target: float = 0.8
    error: float = 0.0  # running mean of target - acceptance
    log_average: float = 0.0
    count: int = 0

    @staticmethod
    def around(step_size: float, target: float) -> "DualAveraging":
        """Begin at a step size; tries are drawn towards ten times this."""
        return DualAveraging(math.log(step_size), math.log(10 * step_size), target)

    def update(self, acceptance: float) -> None:
        """Adapt to the acceptance probability of an iteration."""
        self.count += 1
        t, gamma, t0, kappa = self.count, 0.05, 10, 0.75
        self.error += (self.target - acceptance - self.error) / (t + t0)
        self.log_step = self.centre - math.sqrt(t) / gamma * self.error
        weight = t**-kappa
        self.log_average += weight * (self.log_step - self.log_average)

    @property
    def average(self) -> float:
        """The step size to use once the adaptation is over."""
        return math.exp(self.log_average)
