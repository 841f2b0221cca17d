"""The integrator of Hamiltonian dynamics: reversible, volume-preserving, second order; and its step-size adaptation."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import caveat
from caveat.engine.chains.coordinates import Coordinates
from caveat.engine.chains.hamiltonian import DualAveraging, integrate
from caveat.engine.chains.parallel_chains import ParallelChains
from caveat.engine.run import Run
from caveat.task import Task

every_split = pytest.mark.parametrize("parts", [1, 2, 3])


class Dynamics:
    """A small network's posterior: its energy, and where the integrator leads."""

    def __init__(self, parts: int = 1, dtype: torch.dtype = torch.float64) -> None:
        torch.manual_seed(0)
        rng = torch.Generator().manual_seed(1)
        x = torch.randn(12, 2, generator=rng, dtype=torch.float64).to(dtype)
        y = (x[:, :1] * x[:, 1:] > 0).to(dtype)
        module = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)).to(dtype)
        task = Task(module, (x, y), caveat.Bernoulli(), caveat.StudentTPrior(0.8, 5.0))
        self.coordinates = Coordinates.of(task.network, {})
        self.chains, self.parts = ParallelChains(task, Run(), 1, self.coordinates, parts=parts), parts
        _, self.log_posterior = self.chains.log_posteriors[0]
        self.gradient = partial(self.chains.gradient, self.log_posterior)

    def random(self, seed: int) -> Tensor:
        rng = torch.Generator().manual_seed(seed)
        dtype = self.coordinates.scale.dtype
        return torch.randn(1, self.coordinates.size, generator=rng, dtype=torch.float64).to(dtype)

    def energy(self, z: Tensor, momentum: Tensor) -> Tensor:
        likelihood, prior = self.chains.densities(self.log_posterior, z)
        return (-likelihood - prior + 0.5 * momentum.double().square().sum(1)).squeeze(0)

    def follow(self, z: Tensor, momentum: Tensor, step_size: float, steps: int) -> tuple[Tensor, Tensor]:
        first = self.gradient(z, 0)[1]
        z, momentum, _, _ = integrate(self.gradient, z, momentum, first, step_size, steps, self.parts)
        return z, momentum


@every_split
@pytest.mark.parametrize("steps", [1, 7])
def test_back_with_the_momentum_turned_is_where_it_began(parts: int, steps: int) -> None:
    dynamics = Dynamics(parts)
    z, momentum = dynamics.random(2), dynamics.random(3)
    there, with_momentum = dynamics.follow(z, momentum, 0.2, steps)
    assert float((there - z).abs().max()) > 0.1
    back, turned = dynamics.follow(there, -with_momentum, 0.2, steps)
    torch.testing.assert_close(back, z, rtol=0, atol=1e-12)
    torch.testing.assert_close(-turned, momentum, rtol=0, atol=1e-12)


@every_split
def test_volume_is_kept(parts: int) -> None:
    dynamics = Dynamics(parts)
    size = dynamics.coordinates.size
    point = torch.cat([dynamics.random(4), dynamics.random(5)], 1)
    columns = []
    for shift in 1e-5 * torch.eye(2 * size, dtype=torch.float64):
        ends = []
        for sign in (1, -1):
            z, momentum = (point + sign * shift).split(size, 1)
            ends.append(torch.cat(dynamics.follow(z, momentum, 0.3, 3), 1))
        columns.append((ends[0] - ends[1]).squeeze(0) / 2e-5)
    jacobian = torch.stack(columns, 1)
    assert float((jacobian - torch.eye(2 * size)).abs().max()) > 0.1  # the map is no identity
    assert abs(float(jacobian.det()) - 1) < 1e-6


@every_split
def test_energy_errors_shrink_with_the_square_of_the_step(parts: int) -> None:
    dynamics = Dynamics(parts)
    steps, errors = [5, 10, 20, 40], []
    for count in steps:
        found = []
        for seed in range(4):
            z, momentum = 0.5 * dynamics.random(10 + seed), dynamics.random(20 + seed)
            ends = dynamics.follow(z, momentum, 1.2 / count, count)
            found.append(abs(dynamics.energy(*ends) - dynamics.energy(z, momentum)))
        errors.append(torch.stack(found).mean())
    x, y = torch.log(1.2 / torch.tensor(steps).double()), torch.stack(errors).log()
    slope = float(((x - x.mean()) * y).sum() / (x - x.mean()).square().sum())
    assert 1.8 < slope < 2.2


def test_splits_do_not_change_where_small_steps_lead() -> None:
    ends = []
    for parts in (1, 2, 3):
        dynamics = Dynamics(parts)
        ends.append(torch.cat(dynamics.follow(dynamics.random(6), dynamics.random(7), 0.01, 40)))
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=2e-4)
    torch.testing.assert_close(ends[2], ends[0], rtol=0, atol=2e-4)


@every_split
def test_one_gradient_a_step_and_part_and_the_last_is_handed_on(parts: int) -> None:
    dynamics, calls = Dynamics(parts), []

    def counted(z: Tensor, part: int) -> tuple[Tensor, Tensor]:
        calls.append(part)
        return dynamics.gradient(z, part)

    z, momentum = dynamics.random(8), dynamics.random(9)
    before = z.clone(), momentum.clone()
    first = dynamics.gradient(z, 0)[1]
    end, _, likelihood, gradient = integrate(counted, z, momentum, first, 0.1, 4, parts)
    assert calls == [*range(1, parts), *reversed(range(parts))] * 4
    wanted = dynamics.gradient(end, 0)
    torch.testing.assert_close(likelihood, wanted[0], rtol=0, atol=0)
    torch.testing.assert_close(gradient, wanted[1], rtol=0, atol=0)
    assert torch.equal(z, before[0])  # a rejected proposal goes back there
    assert torch.equal(momentum, before[1])


def test_a_float32_network_has_a_sound_energy_difference() -> None:
    narrow, wide = Dynamics(dtype=torch.float32), Dynamics()
    for seed in range(10):
        z, momentum = narrow.random(seed), narrow.random(100 + seed)
        ends = narrow.follow(z, momentum, 0.1, 10)
        own = narrow.energy(*ends) - narrow.energy(z, momentum)
        exact = wide.energy(*(end.double() for end in ends)) - wide.energy(z.double(), momentum.double())
        assert own.dtype == torch.float64
        assert abs(float(own - exact)) < 5e-6


def test_a_harmonic_oscillator_is_followed_exactly_as_its_closed_form_says() -> None:
    """Leapfrog turns (z, p) by theta with cos(theta) = 1 - eps^2/2, on an ellipse with p^2 + z^2 (1 - eps^2/4)."""
    step, steps = 0.4, 9

    def gradient(z: Tensor, part: int) -> tuple[Tensor, Tensor]:
        return -0.5 * z.square().sum(1), -z

    z, momentum = torch.tensor([[1.3]], dtype=torch.float64), torch.tensor([[-0.4]], dtype=torch.float64)
    end, end_momentum, _, _ = integrate(gradient, z, momentum, -z, step, steps)
    angle, stretch = steps * math.acos(1 - step**2 / 2), math.sqrt(1 - step**2 / 4)
    torch.testing.assert_close(end, z * math.cos(angle) + momentum / stretch * math.sin(angle))
    torch.testing.assert_close(end_momentum, momentum * math.cos(angle) - z * stretch * math.sin(angle))


def test_dual_averaging_follows_its_equations() -> None:
    adaptation = DualAveraging.around(0.5, 0.8)
    accepted = [0.3, 0.9, 1.0, 0.7]
    error, average = 0.0, 0.0
    for t, acceptance in enumerate(accepted, 1):
        adaptation.update(acceptance)
        error = (1 - 1 / (t + 10)) * error + (0.8 - acceptance) / (t + 10)
        log_step = math.log(5.0) - math.sqrt(t) / 0.05 * error
        average = t**-0.75 * log_step + (1 - t**-0.75) * average
        assert math.isclose(adaptation.log_step, log_step, rel_tol=1e-12)
        assert math.isclose(adaptation.average, math.exp(average), rel_tol=1e-12)


@pytest.mark.parametrize("target", [0.6, 0.8, 0.95])
@pytest.mark.parametrize("start", [0.001, 30.0])
def test_dual_averaging_finds_the_step_of_the_wanted_acceptance(target: float, start: float) -> None:
    rng = torch.Generator().manual_seed(0)
    adaptation = DualAveraging.around(start, target)
    for _ in range(2000):  # acceptance falls as exp(-eps), with noise
        noise = 0.1 * float(torch.randn((), generator=rng))
        adaptation.update(min(1.0, max(0.0, math.exp(-math.exp(adaptation.log_step)) + noise)))
    assert abs(math.exp(-adaptation.average) - target) < 0.03
