"""One step of Langevin or Hamiltonian dynamics with friction, by a gradient that may be estimated from a batch.

    m <- beta m + sqrt(eta) g + sqrt(2 (1 - beta) T) M^(1/2) xi,   theta <- theta + sqrt(eta) M^(-1) m,   xi ~ N(0, I)

g is the gradient of the log density, eta the step size, T the temperature and M a diagonal mass. beta = 0 is SGLD
(Welling and Teh 2011), theta + eta g + sqrt(2 eta T) xi; beta > 0 is SGHMC (Chen et al. 2014).
"""

import math
from dataclasses import dataclass

import torch
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
        step_size: float,
        rng: torch.Generator,
        mass: Tensor | None = None,
    ) -> None:
        """Move position and momentum in place; all tensors are of one shape, and no `mass` is a mass of 1."""
        noise = torch.randn(position.shape, generator=rng, dtype=position.dtype, device=position.device)
        if mass is not None:
            noise *= mass.sqrt()
        momentum.mul_(self.momentum).add_(gradient, alpha=math.sqrt(step_size))
        momentum.add_(noise, alpha=math.sqrt(2 * (1 - self.momentum) * self.temperature))
        position.add_(momentum if mass is None else momentum / mass, alpha=math.sqrt(step_size))
