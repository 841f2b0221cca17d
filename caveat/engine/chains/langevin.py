"""One step of Langevin or Hamiltonian dynamics with friction, by a gradient that may be estimated from a batch.

    m <- beta m + sqrt(eta) g + sqrt(2 (1 - beta) T) M^(1/2) xi,   theta <- theta + sqrt(eta) M^(-1) m,   xi ~ N(0, I)

g is the gradient of the log density, eta the step size, T the temperature and M a diagonal mass. beta = 0 is SGLD
(Welling and Teh 2011), theta + eta g + sqrt(2 eta T) xi; beta > 0 is SGHMC (Chen et al. 2014). Along a direction of
curvature lambda, chains are stable while eta lambda < 2 (1 + beta), and full gradients give it the variance

    T / (lambda (1 - eta lambda / (2 (1 + beta))))     in place of     T / lambda.
"""

import math
from dataclasses import dataclass

from torch import Tensor

__all__ = ["LangevinDynamics"]


@dataclass(frozen=True)
class LangevinDynamics:
    """Dynamics with friction and with as much noise as the temperature asks for."""

    momentum: float  # beta: the share of the momentum that a step keeps; 0 is SGLD
    temperature: float  # T: divides the log density

    def step(
        self,
        position: Tensor,
        momentum: Tensor,
        gradient: Tensor,
        root_step_size: Tensor,
        noise: Tensor,
        mass: Tensor | None = None,
    ) -> None:
        """Move position and momentum in place, without a word to the host.

        All tensors are of one shape, `noise` is standard normal, and no `mass` is a mass of 1. `root_step_size` is
        sqrt(eta), [] or such as broadcasts to that shape.
        """
        if mass is not None:
            noise = noise * mass.sqrt()
        momentum.mul_(self.momentum).addcmul_(gradient, root_step_size)
        momentum.add_(noise, alpha=math.sqrt(2 * (1 - self.momentum) * self.temperature))
        position.addcmul_(momentum if mass is None else momentum / mass, root_step_size)
