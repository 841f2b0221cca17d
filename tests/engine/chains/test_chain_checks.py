"""What a fit of chains says of itself, on draws that are known to be good or bad."""

import math

import pytest
import torch
from torch import Tensor, nn

import caveat
from caveat.engine.chains import ChainState, check_chains, convergence
from caveat.engine.run import Run


def task() -> caveat.Task:
    x = torch.linspace(-1, 1, 80, dtype=torch.float64)[:, None]
    y = 2 * x + 0.1 * torch.randn(80, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return caveat.Task(nn.Linear(1, 1).double(), (x, y), caveat.Gaussian())


def chains(number: int = 4, draws: int = 100, log_noise: float = math.log(0.1)) -> ChainState:
    """Independent draws around the truth."""
    rng = torch.Generator().manual_seed(1)

    def around(value: float, *shape: int) -> Tensor:
        return value + 0.01 * torch.randn(number, draws, *shape, generator=rng, dtype=torch.float64)

    params = {"weight": around(2, 1, 1), "bias": around(0, 1), "hyper/log_noise": around(log_noise, 1)}
    return ChainState(params, {"lp": around(-10.0)}, task().hyper)


def said(state: ChainState) -> tuple[list[str], dict[str, float | None]]:
    run = Run()
    return run.warnings, check_chains(state, task(), run)


def test_independent_draws_near_the_truth_are_nothing_to_speak_of() -> None:
    warnings, found = said(chains())
    assert not warnings
    assert found["rhat_predictions"] < 1.05
    assert found["ess_predictions"] > 200
    lp = convergence(chains().stats["lp"].unsqueeze(-1))
    assert (found["rhat_lp"], found["ess_lp"]) == (float(lp.rhat), float(lp.ess_bulk))
    assert not said(chains(number=1))[0]


def test_chains_that_are_apart_are_said() -> None:
    state = chains()
    state.params["weight"][1] += 0.05
    warnings, found = said(state)
    assert len(warnings) == 1
    assert "have not mixed: R-hat up to" in warnings[0]
    assert "(predictions)" in warnings[0]
    assert found["rhat_predictions"] > 1.5


def test_what_lies_between_chains_is_a_share_of_the_predictive_variance() -> None:
    """Biases of 0 and d in two halves of the chains: d^2 / 4 between them, beside the noise and the draws' width."""
    d, noise = 0.2, 0.1
    state = chains(log_noise=math.log(noise))
    state.params["bias"][:2] += d
    state.params["hyper/log_noise"].fill_(math.log(noise))
    warnings, found = said(state)
    x = torch.linspace(-1, 1, 50, dtype=torch.float64)
    within = 0.01**2 * (1 + x.square())
    between = d**2 / 4
    assert found["between_chains"] == pytest.approx(float((between / (between + within + noise**2)).mean()), rel=0.05)
    assert f"and {found['between_chains']:.1%} of the predictive variance lies between them" in warnings[0]
    assert said(chains())[1]["between_chains"] < 0.001
    assert said(chains(number=1))[1]["between_chains"] is None


def test_between_chains_of_classes() -> None:
    """Two chains that are sure of opposite labels: the whole variance is between them."""
    x = torch.tensor([[1.0], [-1.0]]).repeat(10, 1)
    network_task = caveat.Task(nn.Linear(1, 2), (x, (x[:, 0] > 0).long()), caveat.Categorical())
    weight = torch.tensor([[20.0], [-20.0]]) * torch.ones(2, 8, 1, 1)
    weight[1] *= -1
    state = ChainState({"weight": weight, "bias": torch.zeros(2, 8, 2)}, {"lp": torch.randn(2, 8)}, {})
    run = Run()
    assert check_chains(state, network_task, run)["between_chains"] == pytest.approx(1.0, abs=1e-6)


def test_a_single_chain_that_drifts_is_said() -> None:
    state = chains(number=1)
    state.params["bias"] += torch.linspace(0, 0.1, 100, dtype=torch.float64)[None, :, None]
    assert any("have not mixed" in warning for warning in said(state)[0])


def test_few_effective_draws_are_said() -> None:
    state = chains(draws=800)
    rng, walk = torch.Generator().manual_seed(2), [torch.zeros(4, dtype=torch.float64)]
    for _ in range(799):
        walk.append(0.993 * walk[-1] + 0.12 * torch.randn(4, generator=rng, dtype=torch.float64))
    state.stats["lp"][:] = torch.stack(walk, 1)
    warnings, found = said(state)
    assert found["ess_lp"] < 40
    assert any("(the log density)" in warning for warning in warnings)


def test_noise_that_hides_everything_is_said() -> None:
    warnings, _ = said(chains(log_noise=math.log(50.0)))
    assert len(warnings) == 1
    assert "worse than the marginal distribution of the targets" in warnings[0]


@pytest.mark.parametrize("draws", [1, 3])
def test_too_few_draws_for_any_diagnosis(draws: int) -> None:
    warnings, found = said(chains(draws=draws))
    assert not warnings
    assert found["rhat_lp"] is None
