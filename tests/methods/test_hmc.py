"""HMC against closed forms: posteriors that are known, priors that must come back, and runs that are cut short."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
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
    random_stream,
)
from caveat.engine.chains.diagnostics import effective_sample_size
from caveat.engine.cost import forward_flops
from caveat.engine.run import Run
from caveat.network import Params


def flat_draws(posterior: caveat.Posterior) -> Tensor:
    """All weights and noise of every draw, [chains, draws, P], float64."""
    return torch.cat([stack.flatten(2) for stack in posterior.state["params"].values()], 2).double()


def assert_mean(values: Tensor, expected: Tensor | float, tolerance: float = 4.0, least: int = 50) -> None:
    """The mean of draws [chains, draws, ...], within so many of its own Monte Carlo standard errors.

    Chains may be better than independent draws, but that is not relied on: an error as small as it says is by luck.
    """
    count = values.shape[0] * values.shape[1]
    size = effective_sample_size(values)[0].clamp_max(count)
    error = values.flatten(0, 1).std(0) / size.sqrt()
    assert float(size.min()) > least, f"only {float(size.min()):.0f} effective draws: the test says nothing"
    apart = ((values.mean((0, 1)) - expected) / error).abs()
    assert float(apart.max()) < tolerance, f"{float(apart.max()):.1f} standard errors from what is expected"


def assert_normal(draws: Tensor, mean: Tensor, covariance: Tensor) -> None:
    """Draws [chains, draws, P] have this mean and covariance: all first and second moments of what they whiten to."""
    root = torch.linalg.cholesky(covariance)
    white = torch.linalg.solve_triangular(root, (draws - mean).unsqueeze(-1), upper=False).squeeze(-1)
    assert_mean(white, 0.0)
    products = white.unsqueeze(-1) * white.unsqueeze(-2)
    assert_mean(products, torch.eye(len(mean), dtype=torch.float64), tolerance=4.5)


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


def without_data(prior: object) -> caveat.Task:
    """Targets whose log likelihood counts a billionth."""
    torch.manual_seed(0)
    x, y = torch.randn(4, 5), torch.tensor([0, 1, 2, 0])
    return caveat.Task(nn.Linear(5, 3), (x, y), caveat.Categorical(class_weights=(1e-9,) * 3), prior)  # type: ignore[arg-type]


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


# The warm-up and what is said about each draw.


@pytest.mark.parametrize("target", [0.65, 0.9])
def test_warmup_reaches_the_acceptance_that_it_aims_at(target: float) -> None:
    prior = caveat.GaussianPrior({"weight": torch.logspace(-1, 1, 15).reshape(3, 5), "*": 1.0})
    posterior = caveat.fit(without_data(prior), caveat.HMC(3, 50, 100, target_acceptance=target), progress=False)
    assert abs(posterior.info.diagnostics["acceptance"] - target) < 0.07
    steps = posterior.state["stats"]["step_size"]
    assert bool((steps == steps[0, 0]).all()), "the step size is kept after the warm-up"


def network_task(dtype: torch.dtype = torch.float32, likelihood: str = "Bernoulli", n: int = 20) -> caveat.Task:
    torch.manual_seed(0)
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(n, 3, generator=rng, dtype=torch.float64).to(dtype)
    signal = x[:, :1] - x[:, 1:2] * x[:, 2:]
    y = (
        (signal > 0).to(dtype)
        if likelihood == "Bernoulli"
        else signal
        if likelihood == "Gaussian"
        else signal.exp().round()
    )
    module = nn.Sequential(nn.Linear(3, 4), nn.SiLU(), nn.Linear(4, 1)).to(dtype)
    return caveat.Task(module, (x, y), getattr(caveat, likelihood)(), caveat.GaussianPrior(2.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_what_is_stored_of_each_draw(dtype: torch.dtype, temperature: float) -> None:
    task = network_task(dtype, "Gaussian")
    method = caveat.HMC(2, 40, 5, step_size=0.25, jitter=0.0, temperature=temperature)
    posterior = caveat.fit(task, method, seed=9, progress=False)
    stats, draws = posterior.state["stats"], flat_draws(posterior)
    assert {name: (value.dtype, tuple(value.shape)) for name, value in stats.items()} == {
        name: (kind, (2, 40)) for name, kind in HAMILTONIAN_STATS.items()
    }
    assert bool(((stats["acceptance_rate"] >= 0) & (stats["acceptance_rate"] <= 1)).all())
    assert bool((stats["n_steps"] == math.ceil(math.pi / 2 * math.sqrt(temperature) / 0.25)).all())
    assert bool((stats["step_size"] == 0.25).all())

    wide, coordinates = network_task(torch.float64, "Gaussian"), Coordinates.of(task.network, task.hyper)
    x, y = wide.train.everything()
    lp = torch.zeros(2, 40, dtype=torch.float64)
    for chain in range(2):
        for draw in range(40):
            params = {name: stack[chain, draw].double() for name, stack in posterior.state["params"].items()}
            log_noise = params.pop("hyper/log_noise")
            noise_prior = -0.5 * ((log_noise - task.hyper["log_noise"] + 1).square() + math.log(2 * math.pi)).sum()
            outputs = wide.network(params, x)
            likelihood = wide.network.likelihood.log_prob(outputs, y, wide.hyper | {"log_noise": log_noise}).sum()
            lp[chain, draw] = likelihood + wide.network.prior.log_prob(params) + noise_prior
    tolerance = 1e-9 if dtype == torch.float64 else 3e-5
    torch.testing.assert_close(stats["lp"], lp, rtol=0, atol=tolerance)  # differences of it decide what is accepted

    for chain in range(2):  # the energy is that of the draw before with its fresh momentum
        for draw in range(1, 40):
            momentum = torch.randn(coordinates.size, generator=random_stream(9, 5 + draw, chain), dtype=dtype)
            energy = -lp[chain, draw - 1] / temperature + 0.5 * momentum.double().square().sum()
            assert abs(float(stats["energy"][chain, draw] - energy)) < 2 * tolerance

    stayed = (draws.diff(dim=1) == 0).all(-1)
    assert torch.equal(stayed, stats["lp"].diff(dim=1) == 0), "a rejected proposal counts the old state again"
    chance = stats["acceptance_rate"][:, 1:]
    spread = math.sqrt(float((chance * (1 - chance)).sum()))
    assert abs(float((~stayed).sum() - chance.sum())) < 4 * spread + 1e-9
    assert int(stayed.sum()) > 0


def test_jitter_varies_the_length_of_trajectories() -> None:
    posterior = caveat.fit(network_task(), caveat.HMC(2, 60, 0, step_size=0.1, jitter=0.5), progress=False)
    n_steps = posterior.state["stats"]["n_steps"]
    assert int(n_steps.min()) >= math.ceil(0.5 * math.pi / 2 / 0.1)
    assert int(n_steps.max()) <= math.ceil(1.5 * math.pi / 2 / 0.1)
    assert len(n_steps.unique()) > 8
    assert posterior.info.gradient_evaluations >= int(n_steps.sum())


def test_cut_trajectories_of_the_warmup_are_said() -> None:
    method = caveat.HMC(1, 2, 2, step_size=0.1, trajectory=25.0, jitter=0.0)
    posterior = caveat.fit(network_task(), method, progress=False)
    assert any(
        "cut at 200 leapfrog steps; those of the draws had up to 250" in warning for warning in posterior.info.warnings
    )
    assert posterior.info.diagnostics["leapfrog_steps"] == 250


def test_divergences_are_rejected_counted_and_said() -> None:
    posterior = caveat.fit(network_task(likelihood="Poisson"), caveat.HMC(2, 60, 0, step_size=0.1), progress=False)
    stats, draws = posterior.state["stats"], flat_draws(posterior)
    count = int(stats["diverging"].sum())
    assert 0 < count < 120
    assert posterior.info.diagnostics["divergences"] == count
    assert any(f"{count} of 120 proposals diverged" in warning for warning in posterior.info.warnings)
    assert bool((stats["acceptance_rate"][stats["diverging"]] == 0).all())
    assert bool((draws.diff(dim=1) == 0).all(-1)[stats["diverging"][:, 1:]].all())
    assert bool(torch.isfinite(draws).all() & torch.isfinite(stats["lp"]).all())


@pytest.mark.parametrize(("threads", "dtype"), [(1, torch.float64), (2, torch.float32)])
def test_a_chain_is_the_same_alone_and_beside_others(threads: int, dtype: torch.dtype) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        task, knobs = network_task(dtype, n=200), {"length": 6, "warmup": 2, "step_size": 0.15}
        alone, beside = (caveat.fit(task, caveat.HMC(chains, **knobs), progress=False) for chains in (1, 3))  # type: ignore[arg-type]
    finally:
        torch.set_num_threads(before)
    assert torch.equal(flat_draws(alone)[0], flat_draws(beside)[0])
    assert not torch.equal(flat_draws(beside)[0], flat_draws(beside)[1])
    for name, value in alone.state["stats"].items():
        assert torch.equal(value[0], beside.state["stats"][name][0])


def test_predictions_use_every_draw_once_in_order() -> None:
    posterior = caveat.fit(network_task(), caveat.HMC(2, 5, 0, step_size=0.2), progress=False)
    x = torch.randn(3, 3)
    samples = posterior.predict(x).samples
    wanted = torch.stack([posterior.network(params, x) for params in posterior.sample(10)])
    assert samples.shape[0] == 10
    torch.testing.assert_close(posterior.predict(x).probs, wanted.sigmoid().mean(0))
    first = {name: stack[1, 0] for name, stack in posterior.state["params"].items()}
    torch.testing.assert_close(wanted[5], posterior.network(first, x))


def test_a_single_draw_has_no_diagnostics_and_is_no_trouble() -> None:
    posterior = caveat.fit(network_task(), caveat.HMC(1, 1, 0, step_size=0.1), progress=False)
    assert flat_draws(posterior).shape == (1, 1, 21)
    assert posterior.info.diagnostics["rhat_lp"] is posterior.info.diagnostics["e_bfmi"] is None


def test_batchnorm_is_kept_and_said() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
    module[1].running_mean.normal_()
    x, y = torch.randn(20, 3), torch.randint(2, (20, 1)).float()
    posterior = caveat.fit(caveat.Task(module, (x, y), caveat.Bernoulli()), caveat.HMC(1, 3, 0, 0.05), progress=False)
    assert any("BatchNorm layers keep the statistics" in warning for warning in posterior.info.warnings)
    params = {name: stack[0, 2] for name, stack in posterior.state["params"].items()}
    own = torch.func.functional_call(module.eval(), params, x)
    lp = -nn.functional.binary_cross_entropy_with_logits(own, y, reduction="sum").double()
    lp = lp + caveat.GaussianPrior().log_prob({name: w.double() for name, w in params.items()})
    assert abs(float(lp - posterior.state["stats"]["lp"][0, 2])) < 1e-4


# What goes wrong is said.


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"length": 0}, r"HMC\(length=0\)"),
        ({"chains": 0}, r"HMC\(chains=0\)"),
        ({"step_size": 0.0}, r"HMC\(step_size=0\.0\)"),
        ({"temperature": -1.0}, r"HMC\(temperature=-1\.0\)"),
        ({"jitter": 1.0}, r"HMC\(jitter=1\.0\)"),
        ({"mass": "dense"}, r"HMC\(mass='dense'\)"),
        ({"warmup": 10}, r"warmup=10\) is too short to find a step size: 20 iterations or more, or step_size="),
        ({"warmup": 50, "mass": "diagonal"}, r"warmup=50\) is too short to find a mass: 100 iterations or more"),
    ],
)
def test_knobs_that_make_no_sense(knobs: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        caveat.HMC(**knobs)


def test_a_step_size_that_diverges(tmp_path: Path) -> None:
    method = caveat.HMC(2, 100, 0, step_size=50.0)
    with pytest.raises(ValueError, match=r"diverged for 20 iterations, at a step size of 50: give a smaller step_size"):
        caveat.fit(network_task(), method, folder=tmp_path / "posterior", progress=False)
    assert not list(tmp_path.iterdir()), "nothing is left that could not be gone on from"


class Root(nn.Module):
    """Takes the root of a weight, which the module came with as 1 and its layer draws with either sign."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        nn.init.ones_(self.layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.layer.weight.sqrt().T + self.layer.bias


def test_a_log_density_that_is_not_finite_where_chains_start() -> None:
    x, y = torch.randn(5, 3), torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0])
    said = r"where chain \d starts is not finite: log likelihood nan, log prior -[\d.]+; look at the likelihood"
    with pytest.raises(ValueError, match=said):
        caveat.fit(caveat.Task(Root(), (x, y), caveat.Bernoulli()), caveat.HMC(2, 5, 20), progress=False)


@dataclasses.dataclass(frozen=True)
class OnlyHere:
    """A density that is NaN all around the point 0.5."""

    def log_prob(self, params: Params) -> Tensor:
        away = torch.stack([(w != 0.5).any() for w in params.values()]).any()
        return torch.where(away, math.nan, sum(w.sum() for w in params.values()))


def test_a_log_density_that_is_nan_all_around() -> None:
    def at_a_half(module: nn.Module) -> None:
        for parameter in module.parameters():
            parameter.fill_(0.5)

    x, y = torch.randn(5, 3), torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0])
    task = caveat.Task(nn.Linear(3, 1), (x, y), caveat.Bernoulli(), OnlyHere(), initialise=at_a_half)
    with pytest.raises(ValueError, match=r"found no step size at which proposals are accepted.*may jump or be NaN"):
        caveat.fit(task, caveat.HMC(1, 5, 20), progress=False)


def test_a_prior_that_cannot_be_sampled() -> None:
    x, y = torch.randn(5, 3), torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0])
    task = caveat.Task(nn.Linear(3, 1), (x, y), caveat.Bernoulli(), OnlyHere())  # type: ignore[arg-type]
    said = r"begin='prior' needs a prior that can be sampled, and OnlyHere cannot .*or use begin='layers'"
    with pytest.raises(ValueError, match=said):
        caveat.fit(task, caveat.HMC(1, 5, 20, begin="prior"), progress=False)


# Runs that are cut short.


@pytest.fixture
def interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a fit that was interrupted after draw 12 of 20."""
    keep = Run.checkpoint

    def stop(self: Run, carry: Any, note: dict[str, Any]) -> None:
        keep(self, carry, note)
        if note["iteration"] == 4 + 12:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Run, "checkpoint_due", lambda self: True)
        patch.setattr(Run, "checkpoint", stop)
        with pytest.raises(KeyboardInterrupt):
            caveat.fit(network_task(), caveat.HMC(2, 20, 4, 0.2), folder=tmp_path / "posterior", progress=False)
    return tmp_path / "posterior"


def test_draws_are_in_files_while_the_run_goes_on(interrupted: Path) -> None:
    partial = interrupted.with_name("posterior.partial")
    whole = caveat.fit(network_task(), caveat.HMC(2, 20, 4, 0.2), progress=False)
    for i, stack in enumerate(whole.state["params"].values()):
        array = numpy.load(partial / f"params-{i}.npy")
        assert array.shape == tuple(stack.shape)
        assert (array[:, :12] == stack[:, :12].numpy()).all()
        assert (array[:, 12:] == 0).all()
    assert (numpy.load(partial / "stats-lp.npy")[:, :12] == whole.state["stats"]["lp"][:, :12].numpy()).all()
    resumed = caveat.fit(network_task(), caveat.HMC(2, 20, 4, 0.2), folder=interrupted, progress=False)
    assert torch.equal(flat_draws(resumed), flat_draws(whole))
    assert not partial.exists()
    loaded = caveat.load(interrupted, network_task().network.module)
    assert torch.equal(flat_draws(loaded), flat_draws(whole))


def test_a_folder_without_one_of_its_files_is_refused(interrupted: Path) -> None:
    (interrupted.with_name("posterior.partial") / "params-0.npy").unlink()
    with pytest.raises(caveat.CorruptFile, match=r"params-0\.npy is missing, and with it draws that were made"):
        caveat.fit(network_task(), caveat.HMC(2, 20, 4, 0.2), folder=interrupted, progress=False)


def test_goes_on_whatever_weights_the_module_has(interrupted: Path) -> None:
    task = network_task()
    with torch.no_grad():
        for parameter in task.network.module.parameters():
            parameter.add_(1.0)
    whole = caveat.fit(network_task(), caveat.HMC(2, 20, 4, 0.2), progress=False)
    resumed = caveat.fit(task, caveat.HMC(2, 20, 4, 0.2), folder=interrupted, progress=False)
    assert torch.equal(flat_draws(resumed), flat_draws(whole))


def test_another_configuration_is_refused_and_the_draws_are_kept(interrupted: Path) -> None:
    partial = interrupted.with_name("posterior.partial")
    before = {path.name: path.read_bytes() for path in partial.iterdir()}
    for method in (caveat.HMC(2, 30, 4, 0.2), caveat.HMC(2, 20, 4, 0.1)):
        with pytest.raises(ValueError, match=r"\.partial holds an unfinished fit with other knobs of the method"):
            caveat.fit(network_task(), method, folder=interrupted, progress=False)
    with pytest.raises(ValueError, match="unfinished fit with another seed"):
        caveat.fit(network_task(), caveat.HMC(2, 20, 4, 0.2), seed=1, folder=interrupted, progress=False)
    with pytest.raises(ValueError, match="unfinished fit with another data"):
        caveat.fit(network_task(n=21), caveat.HMC(2, 20, 4, 0.2), folder=interrupted, progress=False)
    assert {path.name: path.read_bytes() for path in partial.iterdir()} == before


def test_a_fit_that_fails_keeps_the_draws_that_it_had(interrupted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partial = interrupted.with_name("posterior.partial")
    before = {path.name: path.read_bytes() for path in partial.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr("caveat.engine.chains.hamiltonian_sampler.DIVERGED", -1.0)  # every proposal, from now on
        patch.setattr("caveat.engine.chains.hamiltonian_sampler.HOPELESS", 1)
        with pytest.raises(ValueError, match="every proposal diverged"):
            caveat.fit(network_task(), caveat.HMC(2, 20, 4, 0.2), folder=interrupted, progress=False)
    assert {path.name: path.read_bytes() for path in partial.iterdir()} == before
    whole = caveat.fit(network_task(), caveat.HMC(2, 20, 4, 0.2), progress=False)
    resumed = caveat.fit(network_task(), caveat.HMC(2, 20, 4, 0.2), folder=interrupted, progress=False)
    assert torch.equal(flat_draws(resumed), flat_draws(whole))


def run_script(text: str, folder: Path, ranks: int = 1) -> str:
    """What a script that has this module as `here` prints, in one process or in several."""
    script = folder / "script.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nimport test_hmc as here\n{text}"
    )
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    done = subprocess.run(
        [sys.executable, *([*launcher, *meeting] if ranks > 1 else []), str(script), str(folder)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def long_run(folder: Path | None) -> caveat.Posterior:
    """Warm-up, a mass matrix, jitter, a trajectory that varies, and divergences."""
    method = caveat.HMC(2, 120, 100, trajectory=0.8, jitter=0.3, mass="diagonal", target_acceptance=0.45)
    return caveat.fit(network_task(likelihood="Poisson"), method, seed=3, folder=folder, progress=False)


def load_what_fits_need() -> None:
    """Import what is imported at first use, once for all processes that fork from this one."""
    task = network_task()
    forward_flops(task.network, task.network.params(), task.train.everything()[0])


KILLS = """
import json, os, random, signal, time
from pathlib import Path
from caveat.engine.run import Run

here.load_what_fits_need()
calls = [0]
def due(self):  # kept every third iteration: in the fit itself that is every ten seconds
    calls[0] += 1
    return self.folder is not None and calls[0] % 3 == 0
Run.checkpoint_due = due

folder = Path(sys.argv[1]) / "posterior"
kept = Path(f"{folder}.partial") / "checkpoint.json"
def reached():
    return json.loads(kept.read_text())["note"]["iteration"] if kept.exists() else 0

rng, kills, total = random.Random(7), 0, 220
while True:
    child = os.fork()  # torch is loaded and idle: a new process without waiting for it
    if child == 0:
        here.long_run(folder)
        os._exit(0)
    wanted = (kills - 1 + rng.random()) / 10 * total if kills < 10 else float("inf")
    while reached() < wanted and os.waitpid(child, os.WNOHANG) == (0, 0):
        time.sleep(0.001)
    if kills == 10:
        break
    time.sleep(rng.random() * 0.03)
    os.kill(child, signal.SIGKILL)  # fails where it has ended by itself, which it must not
    os.waitpid(child, 0)
    kills += 1
print(kills)
"""


def test_killed_ten_times_it_is_as_if_it_never_was(tmp_path: Path) -> None:
    whole = long_run(None)
    assert 0 < whole.info.diagnostics["divergences"] < 240
    assert run_script(KILLS, tmp_path).strip() == "10"
    resumed = caveat.load(tmp_path / "posterior", network_task(likelihood="Poisson").network.module)
    for group, tensors in whole.state.items():
        for name, value in tensors.items():
            assert torch.equal(resumed.state[group][name], value), f"{group} {name}"
    assert resumed.info.diagnostics == whole.info.diagnostics
    assert resumed.info.gradient_evaluations == whole.info.gradient_evaluations


SHARED = {  # chains over the ranks, and the rows where the chains cannot be shared out
    "chains": caveat.HMC(2, 5, 100, mass="diagonal", trajectory=0.5),
    "rows": caveat.HMC(3, 10, 4, step_size=0.1, splits=2, jitter=0.2),  # few: rounding grows by every trajectory
}

RANKS = """
from pathlib import Path
import torch
for name, method in here.SHARED.items():
    folder = Path(sys.argv[1]) / name
    posterior = here.caveat.fit(here.network_task(torch.float64, "Gaussian"), method, folder=folder, progress=False)
    assert posterior.predict(torch.zeros(2, 3, dtype=torch.float64)).samples.isfinite().all()
"""


def test_ranks_share_chains_or_rows_and_give_the_same_draws(tmp_path: Path) -> None:
    run_script(RANKS, tmp_path, ranks=2)
    for name, method in SHARED.items():
        alone = caveat.fit(network_task(torch.float64, "Gaussian"), method, progress=False)
        shared = caveat.load(tmp_path / name, network_task(torch.float64, "Gaussian").network.module)
        for group, tensors in alone.state.items():
            for key, value in tensors.items():
                torch.testing.assert_close(shared.state[group][key], value, rtol=1e-9, atol=1e-9, msg=f"{name} {key}")
        if name == "chains":
            assert torch.equal(flat_draws(shared), flat_draws(alone))
        assert shared.info.gradient_evaluations == alone.info.gradient_evaluations


MEMORY = """
import json, os, threading, time
from pathlib import Path
import torch
from torch import nn

here.load_what_fits_need()

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

def peak(name, length, trajectory):
    \"\"\"The most anonymous memory while a network of 130,000 weights is fitted, in kilobytes.\"\"\"
    reading, writing = os.pipe()
    if os.fork() == 0:
        most, ended = [0], [False]
        def watch():
            while not ended[0]:
                most[0] = max(most[0], anonymous())
                time.sleep(0.002)
        watcher = threading.Thread(target=watch)
        watcher.start()
        x, y = torch.randn(4, 500), torch.tensor([0.0, 1.0, 1.0, 0.0])
        module = nn.Sequential(nn.Linear(500, 260), nn.Tanh(), nn.Linear(260, 1))
        method = here.caveat.HMC(1, length, 0, step_size=0.02, trajectory=trajectory)
        task = here.caveat.Task(module, (x, y), here.caveat.Bernoulli())
        here.caveat.fit(task, method, folder=Path(sys.argv[1]) / name, progress=False)
        ended[0] = True
        watcher.join()
        os.write(writing, str(most[0]).encode())
        os._exit(0)
    os.wait()
    return int(os.read(reading, 100))

print(json.dumps([peak("few", 10, 0.02), peak("many", 110, 0.02), peak("long", 10, 0.6)]))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux says how much memory is anonymous")
def test_memory_does_not_grow_with_draws_nor_with_trajectories(tmp_path: Path) -> None:
    few, many, long = json.loads(run_script(MEMORY, tmp_path))
    draws = 100 * 130_000 * 4 / 1024  # kilobytes that the others take
    assert abs(many - few) < 0.2 * draws
    assert abs(long - few) < 0.2 * draws
