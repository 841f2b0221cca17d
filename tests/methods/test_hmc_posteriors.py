"""HMC against closed forms: conjugate regression, priors that must come back, and calibration by simulation."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import caveat
from caveat.engine.chains import (
    HAMILTONIAN_STATS,
    Coordinates,
    DrawStore,
    HamiltonianSampler,
    ParallelChains,
)
from caveat.engine.chains.diagnostics import effective_sample_size
from caveat.engine.run import Run
from tests.methods.hmc_reference import assert_mean, assert_normal, flat_draws, without_data

# Conjugate regression: y = X theta + noise has a Gaussian posterior.

INPUTS = torch.tensor([[1.0, 0.3], [-0.7, 1.2], [0.4, -1.1], [-1.3, -0.2], [0.8, 0.9], [0.1, -0.6], [-0.2, 0.5]])
TARGETS = torch.tensor([[1.9], [-0.4], [1.5], [-1.7], [1.1], [1.4], [0.2]])
NOISE = 0.9
COVARIANCE = torch.tensor([[1.5, 0.6], [0.6, 0.5]], dtype=torch.float64)


GAUSSIANS: dict[str, tuple[Any, Tensor]] = {  # a prior, and its covariance of (weights, bias)
    "scalar": (caveat.GaussianPrior(0.8), torch.eye(3) / 0.8),
    "by layer": (caveat.GaussianPrior({"weight": 3.0, "bias": 0.2}), torch.diag(torch.tensor([1 / 3, 1 / 3, 5.0]))),
    "by weight": (
        caveat.GaussianPrior({"weight": torch.tensor([[0.3, 6.0]]), "*": 1.0}),
        torch.diag(torch.tensor([1 / 0.3, 1 / 6, 1.0])),
    ),
    "empcov": (
        caveat.EmpCovPrior("weight", COVARIANCE, alpha=0.7, epsilon=0.05, precision=2.0),
        torch.block_diag(0.7 * COVARIANCE + 0.05 * torch.eye(2).double(), torch.tensor([[0.5]])),
    ),
}


def regression(prior: str, dtype: torch.dtype) -> caveat.Task:
    torch.manual_seed(0)
    data = (INPUTS.to(dtype), TARGETS.to(dtype))
    return caveat.Task(nn.Linear(2, 1).to(dtype), data, caveat.Gaussian(noise=NOISE), GAUSSIANS[prior][0])


def closed_form(prior: str, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    design = torch.cat([INPUTS, torch.ones(len(INPUTS), 1)], 1).double()
    precision = design.T @ design / NOISE**2 + GAUSSIANS[prior][1].double().inverse()
    covariance = precision.inverse()
    mean = covariance @ design.T @ TARGETS.double().squeeze(1) / NOISE**2
    return mean, temperature * covariance


SHORT = caveat.HMC(chains=2, length=150, warmup=10, step_size=0.45, jitter=0.5)  # jitter: nothing is periodic


CONJUGATE: dict[str, tuple[str, torch.dtype, caveat.HMC]] = {
    "all by itself": ("scalar", torch.float64, caveat.HMC(chains=2, length=150, warmup=60, jitter=0.5)),
    "float32": ("scalar", torch.float32, SHORT),
    "precision by layer": ("by layer", torch.float64, dataclasses.replace(SHORT, step_size=0.18, trajectory=1.0)),
    "precision by weight": ("by weight", torch.float64, dataclasses.replace(SHORT, step_size=0.3)),
    "empcov": ("empcov", torch.float64, SHORT),
    "cold": ("scalar", torch.float64, dataclasses.replace(SHORT, temperature=0.2, step_size=0.2)),
    "warm": ("empcov", torch.float32, dataclasses.replace(SHORT, temperature=3.0, step_size=0.7)),
    "diagonal mass": ("by layer", torch.float32, caveat.HMC(2, 150, 100, jitter=0.5, mass="diagonal")),
    "two splits": ("scalar", torch.float64, dataclasses.replace(SHORT, splits=2, length=120)),
    "three splits": ("empcov", torch.float32, dataclasses.replace(SHORT, splits=3, length=100, step_size=0.55)),
    "from the prior": ("by weight", torch.float32, dataclasses.replace(SHORT, begin="prior", step_size=0.3)),
}


@pytest.mark.parametrize("case", CONJUGATE)
def test_conjugate_regression(case: str) -> None:
    prior, dtype, method = CONJUGATE[case]
    posterior = caveat.fit(regression(prior, dtype), method, progress=False)
    assert_normal(flat_draws(posterior), *closed_form(prior, method.temperature))


@pytest.mark.slow
@pytest.mark.parametrize("case", CONJUGATE)
def test_conjugate_regression_with_many_draws(case: str) -> None:
    prior, dtype, method = CONJUGATE[case]
    posterior = caveat.fit(regression(prior, dtype), dataclasses.replace(method, chains=4, length=1500), progress=False)
    assert_normal(flat_draws(posterior), *closed_form(prior, method.temperature))


def test_learned_noise_has_the_posterior_that_integration_gives() -> None:
    """A constant with unknown noise; the weight sees no input, so it keeps its prior."""
    y = torch.tensor([[0.3], [1.9], [-0.8], [2.2], [0.9], [1.4]], dtype=torch.float64)
    task = caveat.Task(nn.Linear(1, 1).double(), (torch.zeros_like(y), y), caveat.Gaussian(), caveat.GaussianPrior(4.0))
    posterior = caveat.fit(task, caveat.HMC(2, 300, 20, step_size=0.35, jitter=0.3), progress=False)
    draws = flat_draws(posterior)  # weight, bias, log noise
    bias = torch.linspace(-5, 6, 400, dtype=torch.float64).reshape(-1, 1)
    log_noise = torch.linspace(-4, 4, 400, dtype=torch.float64).reshape(1, -1)
    centre = float(y.std(correction=0).log()) - 1
    log_density = -2 * bias**2 - 0.5 * (log_noise - centre) ** 2 - len(y) * log_noise
    log_density = log_density - 0.5 * (y.reshape(-1, 1, 1) - bias).square().sum(0) * (-2 * log_noise).exp()
    weight = (log_density - log_density.max()).exp()
    weight = weight / weight.sum()

    def exactly(value: Tensor) -> float:
        return float((weight * value).sum())

    for found, value in ((draws[..., 1], bias), (draws[..., 2], log_noise)):
        assert_mean(found, exactly(value))
        assert_mean(found.square(), exactly(value**2))
    assert_mean(draws[..., 2].exp(), exactly(log_noise.exp()))
    assert_mean(draws[..., 0].square(), 0.25)
    variance = posterior.predict(torch.zeros(1, 1, dtype=torch.float64)).variance
    exact = exactly(bias**2) - exactly(bias) ** 2 + exactly((2 * log_noise).exp())
    assert abs(float(variance) / exact - 1) < 0.15


# No data: what comes back is the prior.


def normal(w: Tensor) -> Tensor:
    return torch.special.ndtr(w)


def laplace(w: Tensor) -> Tensor:
    return 0.5 - 0.5 * w.sign() * torch.expm1(-w.abs())


def student(w: Tensor) -> Tensor:
    """With four degrees of freedom."""
    squared = w**2 / (4 + w**2)
    return 0.5 + 0.75 * w.sign() * squared.sqrt() * (1 - squared / 3)


PRIORS: dict[str, tuple[Any, Callable[[Tensor], Tensor], dict[str, Any]]] = {  # prior, its distribution function, knobs
    "gaussian": (caveat.GaussianPrior(4.0), lambda w: normal(w / 0.5), {}),
    "laplace": (caveat.LaplacePrior(0.3), lambda w: laplace(w / 0.3), {"trajectory": 2.5}),
    "student": (caveat.StudentTPrior(0.4, 4.0), lambda w: student(w / 0.4), {"trajectory": 2.5}),
    "logistic": (caveat.LogisticPrior(0.3), lambda w: (w / 0.3).sigmoid(), {"trajectory": 3.0}),
    "mixture": (
        caveat.GaussianMixturePrior((0.4, 1.0), (1.0, 3.0)),
        lambda w: 0.25 * normal(w / 0.4) + 0.75 * normal(w),
        {"trajectory": 4.0, "step_size": 0.8},
    ),
}


def assert_uniform(values: Tensor) -> None:
    """Draws [chains, draws, P] of independent uniform numbers: the share below each of nine quantiles."""
    for share in (0.02, 0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9, 0.98):
        below = (values < share).double()
        count = values.shape[0] * values.shape[1]
        size = effective_sample_size(below)[0].clamp_max(count)
        error = (share * (1 - share) / size).sum().sqrt() / values.shape[2]  # of the mean over independent weights
        assert abs(float(below.mean()) - share) < 4 * float(error), f"{float(below.mean()):.4f} below the {share}"


@pytest.mark.parametrize(("name", "mass"), [*((name, "identity") for name in PRIORS), ("laplace", "diagonal")])
def test_without_data_the_prior_comes_back(name: str, mass: str) -> None:
    prior, cdf, knobs = PRIORS[name]
    knobs = {"trajectory": 2.0, "step_size": 0.6} if mass == "diagonal" else knobs
    warmup = 100 if mass == "diagonal" else 0
    method = caveat.HMC(2, 150, warmup, **{"step_size": 0.7, "jitter": 0.3} | knobs, mass=mass, begin="prior")  # type: ignore[arg-type]
    posterior = caveat.fit(without_data(prior), method, progress=False)
    assert posterior.info.diagnostics["acceptance"] < 0.999, "proposals that are never rejected show nothing"
    assert_uniform(cdf(flat_draws(posterior)))


def test_without_data_correlated_filters_come_back() -> None:
    covariance = torch.randn(5, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    covariance = covariance @ covariance.T
    prior = caveat.EmpCovPrior("weight", covariance, alpha=0.3, epsilon=0.02, precision=9.0)
    posterior = caveat.fit(without_data(prior), caveat.HMC(2, 150, 0, 0.7, jitter=0.3, begin="prior"), progress=False)
    exact = torch.block_diag(*[0.3 * covariance + 0.02 * torch.eye(5).double()] * 3, torch.eye(3).double() / 9)
    white = torch.linalg.solve(torch.linalg.cholesky(exact), flat_draws(posterior).unsqueeze(-1)).squeeze(-1)
    assert_uniform(normal(white))
    assert_mean(white.square().sum(-1), 18.0)


# Calibration: parameters from the prior, data from the parameters, and ranks among the posterior's draws.


def calibration_ranks(simulations: int, thin: int) -> Tensor:
    """Ranks [simulations, functionals] of the true values among 31 draws, evenly thinned, of a logistic regression.

    Ranks among draws that depend on each other are not uniform: neighbours are on opposite sides more often than not.
    """
    torch.manual_seed(0)
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(8, 2, generator=rng, dtype=torch.float64)
    method = caveat.HMC(1, 31 * thin, 12, step_size=0.6, jitter=0.5, begin="prior")
    found = []
    for simulation in range(simulations):
        truth = torch.randn(3, generator=rng, dtype=torch.float64)
        logits = x @ truth[:2] + truth[2]
        y = (torch.rand(8, generator=rng, dtype=torch.float64) < logits.sigmoid()).double()
        task = caveat.Task(nn.Linear(2, 1).double(), (x, y), caveat.Bernoulli())
        draws_of = flat_draws(caveat.fit(task, method, seed=simulation, progress=False))[0, ::thin]
        candidates = torch.cat([truth.unsqueeze(0), draws_of])
        outputs = candidates[:, :2] @ x.T + candidates[:, 2:]
        likelihood = -nn.functional.softplus(-(2 * y - 1) * outputs).sum(1)
        values = torch.stack([*candidates.T, likelihood, candidates.square().sum(1), outputs[:, 0]], 1)
        found.append((values[1:] < values[:1]).sum(0))
    return torch.stack(found)


def assert_calibrated(simulations: int, thin: int) -> None:
    ranks = calibration_ranks(simulations, thin)
    for functional, own in enumerate(ranks.T):
        bins = 4 if simulations < 100 else 16  # of the 32 ranks
        counts = torch.bincount(own // (32 // bins), minlength=bins).double()
        statistic = float(((counts - simulations / bins) ** 2 / (simulations / bins)).sum())
        chance = float(
            torch.special.gammaincc(torch.tensor((bins - 1) / 2), torch.tensor(statistic / 2))
        )  # chi-squared
        assert chance > 1e-3, f"functional {functional}: ranks {counts.tolist()}, chance {chance:.1e}"


def test_simulation_based_calibration() -> None:
    assert_calibrated(40, thin=1)


@pytest.mark.slow
def test_simulation_based_calibration_with_many_simulations() -> None:
    assert_calibrated(500, thin=4)


def geweke_draws(transitions: int, splits: int) -> Tensor:
    """Weight, bias and log noise [1, transitions, 3], each move of the chain followed by new targets given them."""
    torch.manual_seed(0)
    rng = torch.Generator().manual_seed(3)
    x, y = torch.tensor([[1.0], [-0.5]]), torch.tensor([[8.0], [-8.0]])
    task = caveat.Task(nn.Linear(1, 1), (x, y), caveat.Gaussian(), caveat.LaplacePrior(0.5))
    coordinates, run = Coordinates.of(task.network, task.hyper), Run(seed=5)
    method = caveat.HMC(1, transitions, 0, step_size=0.6, jitter=0.2, trajectory=1.5, splits=splits, begin="prior")
    store = DrawStore(run, torch.float32, coordinates, (1, transitions), HAMILTONIAN_STATS)
    with ParallelChains(task, run, 1, coordinates, parts=splits) as chains:
        sampler = HamiltonianSampler(method, chains, store, run)
        sampler.begin()
        for _ in range(transitions):
            sampler.iterate()
            weight, bias, log_noise = coordinates.weights(sampler.now.position)[0]
            for inputs, targets in chains.pieces.everything():  # the chain's own rows, in place
                noise = torch.randn(targets.shape, generator=rng) * log_noise.exp()
                targets.copy_(inputs * weight + bias + noise)
            sampler.place(sampler.now.position)
    assert bool((store.stats["acceptance_rate"] < 1).any())
    return torch.cat([stack.flatten(2) for stack in store.params.values()], 2).double()


def assert_marginals_are_the_prior(transitions: int, splits: int) -> None:
    weight, bias, log_noise = geweke_draws(transitions, splits).unbind(-1)
    centre = math.log(8.0) - 1  # the spread of the targets that the task was made with
    for uniform in (laplace(weight / 0.5), laplace(bias / 0.5), normal(log_noise - centre)):
        assert_mean(uniform, 0.5, least=25)
        assert_mean((uniform - 0.5).square(), 1 / 12, least=25)


def test_geweke_joint() -> None:
    assert_marginals_are_the_prior(900, splits=1)


@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, 2])
def test_geweke_joint_with_many_transitions(splits: int) -> None:
    assert_marginals_are_the_prior(12_000, splits)
