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
