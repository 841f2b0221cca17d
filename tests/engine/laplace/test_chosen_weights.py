"""Chosen weights of a network: their values, their prior, where they lie, and how they are stored."""

import pytest
import torch
from torch import nn

import caveat
from caveat.engine.flat_weights import flat
from caveat.engine.laplace.chosen_weights import ChosenWeights, flat_prior

INDEX = torch.tensor([1, 5, 12, 13])  # two of 0.weight [4, 2], none of 0.bias [4], two of 2.weight [1, 4]; 2.bias none


def network() -> caveat.Network:
    torch.manual_seed(0)
    prior = caveat.GaussianPrior({"0.*": 0.5, "2.*": 2.0})
    return caveat.Network(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)), caveat.Gaussian(), prior)


def test_parameters_without_a_chosen_weight_are_left_out() -> None:
    whole = network()
    chosen = ChosenWeights.at(whole, INDEX)
    assert chosen.network.names == ("0.weight", "2.weight")
    assert len(chosen) == 4
    assert torch.equal(chosen.weights(whole.params()), flat(whole, whole.params())[INDEX])
    assert torch.equal(chosen.prior(whole.params()), torch.tensor([0.5, 0.5, 2.0, 2.0]))
    assert chosen.layer_counts() == {"0": 2, "2": 2}
    assert [(name, places.tolist()) for name, places in chosen.by_layer()] == [("0", [0, 1]), ("2", [2, 3])]


def test_moved_changes_the_chosen_weights_alone() -> None:
    whole, delta = network(), torch.tensor([1.0, 2.0, 3.0, 4.0])
    before = whole.params()
    after = ChosenWeights.at(whole, INDEX).moved(before, delta)
    difference = flat(whole, after) - flat(whole, before)
    torch.testing.assert_close(difference[INDEX], delta)
    assert int((difference != 0).sum()) == 4


@pytest.mark.parametrize("kind", ["entries", "layer", "all"])
def test_what_is_stored_comes_back(kind: str) -> None:
    whole = network()
    chosen = {
        "entries": ChosenWeights.at(whole, INDEX),
        "layer": ChosenWeights(whole.restricted(["2.weight", "2.bias"])),
        "all": ChosenWeights(whole),
    }[kind]
    entries = chosen.stored_entries(whole)
    assert (entries is None) == (kind == "all")
    back = ChosenWeights.stored(whole, entries)
    assert back.network.names == chosen.network.names
    assert torch.equal(back.weights(whole.params()), chosen.weights(whole.params()))
    delta = torch.randn(len(chosen), generator=torch.Generator().manual_seed(0))
    moved = [flat(whole, weights.moved(whole.params(), delta)) for weights in (chosen, back)]
    assert torch.equal(*moved)


def test_a_prior_that_is_not_gaussian_is_refused_with_advice() -> None:
    own = caveat.Network(nn.Linear(2, 1), caveat.Gaussian(), caveat.LaplacePrior())
    with pytest.raises(ValueError, match=r"this is a LaplacePrior: give the task prior=caveat.GaussianPrior"):
        flat_prior(own, own.params())
