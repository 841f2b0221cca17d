"""A network's selected parameters as one vector, there and back."""

import torch
from torch import nn

import caveat
from caveat.engine.flat_weights import flat, flat_places, moved


def network() -> caveat.Network:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    return caveat.Network(module, caveat.Gaussian(), parameters=["2.*", "0.*"])


def test_places_follow_the_order_of_the_names_without_gaps() -> None:
    places = flat_places(network())
    assert list(places) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert list(places.values()) == [slice(0, 6), slice(6, 8), slice(8, 10), slice(10, 11)]


def test_the_vector_holds_each_parameter_in_its_place() -> None:
    own = network()
    params = own.params() | {"1.running_mean": torch.ones(2)}  # a buffer rides along, and is not a weight
    vector = flat(own, params)
    assert vector.shape == (own.n_parameters,)
    for name, place in flat_places(own).items():
        assert torch.equal(vector[place], params[name].flatten())


def test_moved_adds_to_the_selected_parameters_and_leaves_the_rest() -> None:
    own = network()
    params = own.params() | {"1.running_mean": torch.ones(2)}
    delta = torch.arange(11.0)
    result = moved(own, params, delta)
    torch.testing.assert_close(flat(own, result) - flat(own, params), delta)
    assert result["1.running_mean"] is params["1.running_mean"]
    assert torch.equal(flat(own, params), flat(own, own.params())), "the given ones stay"
