"""Trajectories in native code: against autograd in float64, the integrator in torch, and a posterior in closed form."""

import math

import pytest
import torch
from torch import Tensor, nn

import caveat
from caveat import native
from caveat.engine.chains import hamiltonian
from caveat.engine.chains.coordinates import Coordinates
from caveat.engine.chains.hamiltonian import FusedStack, integrate
from caveat.engine.chains.log_posterior import LogPosterior, RowPieces
from caveat.task import Task

native_only = pytest.mark.skipif(native.library() is None, reason="no native kernels here")


def task_of(
    layers: tuple[int, ...], activation: type[nn.Module] = nn.SiLU, rows: int = 131, dtype: torch.dtype = torch.float64
) -> Task:
    torch.manual_seed(0)
    modules: list[nn.Module] = [nn.Flatten()]
    for i in range(len(layers) - 1):
        modules += [nn.Linear(layers[i], layers[i + 1]), activation()]
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(rows, layers[0], generator=rng, dtype=torch.float64).to(dtype)
    y = torch.randint(layers[-1], (rows,), generator=rng)
    prior = caveat.GaussianPrior({"1.*": 4.0, "*": 0.5})
    return Task(nn.Sequential(*modules[:-1]).to(dtype), (x, y), caveat.Categorical(), prior)


def fused(task: Task) -> FusedStack:
    stack = FusedStack.of(task.network.module, RowPieces(task.train, task.network).part())
    assert stack is not None
    return stack


def positions(chains: int, size: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(2)
    z, momentum = torch.randn(2, chains, size, generator=rng, dtype=torch.float64)
    return 0.6 * z.to(dtype), momentum.to(dtype)


@native_only
@pytest.mark.parametrize("activation", [nn.ReLU, nn.SiLU, nn.Tanh])
@pytest.mark.parametrize(
    ("layers", "rows"), [((4, 3), 1), ((4, 5, 3), 7), ((17, 33, 9, 2), 131), ((64, 32, 10), 100), ((3, 8, 40), 97)]
)
@pytest.mark.parametrize(("chains", "threads"), [(1, 1), (3, 1), (1, 2), (2, 3)])
def test_gradient_is_that_of_autograd(
    activation: type[nn.Module], layers: tuple[int, ...], rows: int, chains: int, threads: int
) -> None:
    task = task_of(layers, activation, rows)
    coordinates = Coordinates.of(task.network, task.hyper)
    coordinates = coordinates.with_width(torch.linspace(0.2, 2, coordinates.size).double())
    log_posterior = LogPosterior(task.network, coordinates, chains, task.hyper, temperature=0.7)
    z, momentum = positions(chains, coordinates.size)
    _, _, likelihood, gradient = fused(task).follow(log_posterior, z, momentum, z, 0.1, 0, threads=threads)
    x, y = task.train.everything()
    for chain, place in enumerate(z):
        leaf = place.clone().requires_grad_()
        params = coordinates.split(coordinates.weights(leaf))
        value = task.network.likelihood.log_prob(task.network(params, x), y, task.hyper).sum()
        exact = torch.autograd.grad((value + task.network.prior.log_prob(params)) / 0.7, leaf)[0]
        torch.testing.assert_close(gradient[chain], exact, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(likelihood[chain], value.detach(), rtol=1e-13, atol=1e-12)


@native_only
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_trajectory_is_that_of_the_integrator(threads: int, dtype: torch.dtype, tolerance: float) -> None:
    task = task_of((6, 11, 4), nn.SiLU, 200, dtype)
    coordinates = Coordinates.of(task.network, task.hyper)
    log_posterior = LogPosterior(task.network, coordinates, 2, task.hyper)
    pieces = RowPieces(task.train, task.network)
    z, momentum = positions(2, coordinates.size, dtype)
    first = log_posterior.gradient(z, pieces.part())[1]
    before = (z.clone(), momentum.clone(), first.clone())
    ends = fused(task).follow(log_posterior, z, momentum, first, 0.02, 25, threads=threads)
    wanted = integrate(lambda at, _: log_posterior.gradient(at, pieces.part()), z, momentum, first, 0.02, 25)
    for end, expected in zip(ends, wanted, strict=True):
        torch.testing.assert_close(end, expected, rtol=tolerance, atol=tolerance)
    assert all(torch.equal(now, then) for now, then in zip((z, momentum, first), before, strict=True))


@native_only
def test_extreme_outputs_stay_right_and_nan_stays_nan() -> None:
    task = task_of((4, 5, 3), nn.SiLU, 9)
    coordinates = Coordinates.of(task.network, task.hyper)
    log_posterior = LogPosterior(task.network, coordinates, 1, task.hyper)
    z, momentum = positions(1, coordinates.size)
    for scale in (300.0, math.nan):
        place = z * scale
        _, _, likelihood, gradient = fused(task).follow(log_posterior, place, momentum, z, 0.1, 0)
        wanted = log_posterior.gradient(place, RowPieces(task.train, task.network).part())
        torch.testing.assert_close(likelihood, wanted[0], rtol=1e-12, atol=1e-12, equal_nan=True)
        torch.testing.assert_close(gradient, wanted[1], rtol=1e-10, atol=1e-10, equal_nan=True)


@native_only
@pytest.mark.parametrize("mass", ["identity", "diagonal"])
def test_a_chain_is_the_same_without_a_compiler(mass: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_of((4, 5, 3), nn.Tanh, 40)
    method = caveat.HMC(chains=3, length=5, warmup=100, mass=mass, step_size=0.05, trajectory=0.4)
    calls = []
    follow = FusedStack.follow
    monkeypatch.setattr(FusedStack, "follow", lambda *args, **how: calls.append(1) or follow(*args, **how))
    native_draws = caveat.fit(task, method, progress=False).state["params"]
    assert len(calls) >= 105, "the native code was not used"
    count = len(calls)
    monkeypatch.setattr(hamiltonian, "library", lambda: None)
    draws = caveat.fit(task, method, progress=False).state["params"]
    assert len(calls) == count
    for name, draw in draws.items():
        torch.testing.assert_close(native_draws[name], draw, rtol=1e-6, atol=1e-6)


@native_only
def test_draws_have_the_moments_of_a_posterior_in_closed_form() -> None:
    """Rows of zeros say nothing of the weights; the difference of two biases has a density of one dimension."""
    labels, precision = torch.tensor([1] * 14 + [0] * 6), 0.5
    task = Task(
        nn.Sequential(nn.Linear(2, 2)).double(),
        (torch.zeros(20, 2, dtype=torch.float64), labels),
        caveat.Categorical(),
        caveat.GaussianPrior(precision),
    )
    method = caveat.HMC(chains=4, length=4000, warmup=50, step_size=0.4, trajectory=1.6)
    params = caveat.fit(task, method, progress=False).state["params"]
    bias, weight = params["0.bias"].double(), params["0.weight"].double()
    grid = torch.linspace(-8, 8, 20_001, dtype=torch.float64)  # of b1 - b0, whose prior has the variance 2 / precision
    log_density = 14 * nn.functional.logsigmoid(grid) + 6 * nn.functional.logsigmoid(-grid) - precision * grid**2 / 4
    density = torch.softmax(log_density, 0)
    mean = (density * grid).sum()
    variance = (density * (grid - mean) ** 2).sum()
    difference = bias[..., 1] - bias[..., 0]
    assert abs(float(difference.mean() - mean)) < 0.03
    assert abs(float(difference.var() / variance) - 1) < 0.06
    assert abs(float(bias.sum(-1).var()) * precision / 2 - 1) < 0.06  # the sum is not seen either
    assert abs(float(weight.var()) * precision - 1) < 0.04
    assert abs(float(weight.mean())) < 0.03


@native_only
def test_what_the_native_code_does_not_compute_is_left_to_torch() -> None:
    task = task_of((4, 5, 3))
    rows = RowPieces(task.train, task.network).part()
    two = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.ReLU(), nn.Linear(5, 3)).double()
    last = nn.Sequential(nn.Linear(4, 3), nn.Tanh()).double()
    large = nn.Sequential(nn.Linear(4, 40_000), nn.Tanh(), nn.Linear(40_000, 3)).double()
    assert [FusedStack.of(module, rows) for module in (two, last, large)] == [None, None, None]
    linear = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)).double()
    stack = FusedStack.of(linear, rows)
    assert stack is not None
    assert stack.activations == (0, 0)
    laplace = Task(linear, task.train.everything(), caveat.Categorical(), caveat.LaplacePrior(0.7))
    assert not stack.serves(Coordinates.of(laplace.network, laplace.hyper))
    assert stack.serves(Coordinates.of(task.network, task.hyper))
    for likelihood in (caveat.Categorical(class_weights=(1.0, 2.0, 1.0)), caveat.Categorical(ignore_index=1)):
        other = Task(linear, task.train.everything(), likelihood)
        assert not LogPosterior.is_softmax_at_labels(other.network, other.train)
