"""The state of chains: what is stored comes back, and what is no such state is refused."""

import pytest
import torch
from torch import nn

import caveat
from caveat.engine.chains import ChainState
from caveat.network import Network
from caveat.storage import State


def stored() -> State:
    weights = torch.arange(24.0).reshape(2, 3, 1, 4)
    return {"params": {"weight": weights}, "stats": {"lp": torch.zeros(2, 3)}, "hyper": {"log_noise": torch.ones(1)}}


def test_what_is_stored_comes_back() -> None:
    state = stored()
    again = ChainState.of(state).tensors()
    assert [*again] == ["params", "stats", "hyper"]  # the order of the groups in files
    assert again == state


def test_draws_come_chain_by_chain() -> None:
    network = Network(nn.Linear(4, 1, bias=False), caveat.Gaussian())
    draws = ChainState.of(stored()).draws(network, 6, torch.Generator())
    assert [float(draw["weight"][0, 0]) for draw in draws] == [0, 4, 8, 12, 16, 20]


@pytest.mark.parametrize("group", ["params", "stats", "hyper"])
def test_a_state_without_a_group_is_refused(group: str) -> None:
    state = stored()
    del state[group]
    with pytest.raises(caveat.CorruptFile, match=f"not the state of chains: it has no group '{group}'"):
        ChainState.of(state)


def test_a_state_without_log_densities_is_refused() -> None:
    state = stored()
    del state["stats"]["lp"]
    with pytest.raises(caveat.CorruptFile, match="no draws, or no log density of each"):
        ChainState.of(state)


def test_chains_of_different_lengths_are_refused() -> None:
    state = stored()
    state["params"]["bias"] = torch.zeros(2, 2, 1)
    with pytest.raises(caveat.CorruptFile, match=r"2 chains of 3 draws: bias is of shape \[2, 2, 1\]"):
        ChainState.of(state)
