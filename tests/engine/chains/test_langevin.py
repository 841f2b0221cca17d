"""The step of SGLD and SGHMC against its equations, with the same noise."""

import pytest
import torch

from caveat.engine.chains import LangevinDynamics


@pytest.mark.parametrize("with_mass", [False, True])
def test_a_step_is_that_of_the_equations(with_mass: bool) -> None:
    position, momentum, gradient = torch.randn(3, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    noise = torch.randn(7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mass = torch.linspace(0.5, 2, 7, dtype=torch.float64) if with_mass else torch.ones(7, dtype=torch.float64)
    eta, beta, temperature = 0.02, 0.7, 0.3
    new_momentum = beta * momentum + eta**0.5 * gradient + (2 * (1 - beta) * temperature * mass).sqrt() * noise
    new_position = position + eta**0.5 * new_momentum / mass
    root = torch.tensor(eta, dtype=torch.float64).sqrt()
    LangevinDynamics(beta, temperature).step(position, momentum, gradient, root, noise, mass if with_mass else None)
    torch.testing.assert_close(momentum, new_momentum)
    torch.testing.assert_close(position, new_position)


def test_without_momentum_it_is_langevin() -> None:
    position, gradient = torch.randn(2, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    noise = torch.randn(7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted = position + 0.02 * gradient + (2 * 0.02) ** 0.5 * noise
    momentum = torch.full_like(position, 3.0)  # of which nothing is left
    root = torch.tensor(0.02, dtype=torch.float64).sqrt()
    LangevinDynamics(0.0, 1.0).step(position, momentum, gradient, root, noise)
    torch.testing.assert_close(position, wanted)
