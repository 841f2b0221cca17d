"""HMC's warm-up, what is stored of each draw, and what is refused."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import caveat
from caveat.engine.chains import HAMILTONIAN_STATS, Coordinates, hamiltonian_sampler, random_stream
from caveat.engine.chains.diagnostics import effective_sample_size
from caveat.network import Params
from tests.methods.hmc_reference import flat_draws, network_task, without_data

# The warm-up and what is said about each draw.


@pytest.mark.parametrize("target", [0.65, 0.9])
def test_warmup_reaches_the_acceptance_that_it_aims_at(target: float) -> None:
    prior = caveat.GaussianPrior({"weight": torch.logspace(-1, 1, 15).reshape(3, 5), "*": 1.0})
    posterior = caveat.fit(without_data(prior), caveat.HMC(3, 50, 100, target_acceptance=target), progress=False)
    assert abs(posterior.info.diagnostics["acceptance"] - target) < 0.07
    steps = posterior.state["stats"]["step_size"]
    assert bool((steps == steps[0, 0]).all()), "the step size is kept after the warm-up"


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


def test_chains_that_have_not_mixed_are_said_by_the_fit() -> None:
    method = caveat.HMC(3, 30, 0, step_size=0.002, trajectory=0.01)  # hardly leaves where it began
    info = caveat.fit(network_task(), method, progress=False).info
    assert any("the chains have not mixed: R-hat up to" in warning for warning in info.warnings)
    assert info.diagnostics["rhat_predictions"] > 1.5
    assert info.diagnostics["ess_predictions"] < 30


def test_a_mixture_prior_is_crossed_whatever_its_narrowest_part() -> None:
    prior = caveat.GaussianMixturePrior((0.1, 1.0), (0.2, 0.8))
    posterior = caveat.fit(without_data(prior), caveat.HMC(2, 100, 40), progress=False)
    drawn = flat_draws(posterior)
    assert float(effective_sample_size(drawn)[0].median()) > 60
    assert float(drawn.square().mean().sqrt()) == pytest.approx(math.sqrt(0.8), rel=0.15)


def test_inputs_of_a_million_are_refused_in_time() -> None:
    torch.manual_seed(0)
    x = 1e6 * torch.randn(50, 2)
    task = caveat.Task(
        nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), (x, x[:, :1] / 1e6), caveat.Gaussian()
    )
    with pytest.raises(ValueError, match=r"inputs here are up to [23]\.\d+e\+06.*[Ss]tandardise"):
        caveat.fit(task, caveat.HMC(2, 400, 40), progress=False)


def test_trajectories_that_would_not_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hamiltonian_sampler, "LONGEST", 2)
    with pytest.raises(ValueError, match=r"every draw would take \d+ leapfrog steps.*Standardise the inputs"):
        caveat.fit(network_task(), caveat.HMC(2, 400, 40), progress=False)
    caveat.fit(network_task(), caveat.HMC(1, 2, 0, step_size=0.2), progress=False)  # a step size that was given is used


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
