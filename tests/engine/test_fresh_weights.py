"""Fresh weights are drawn as the layers draw theirs, differ from draw to draw, and repeat with the seed."""

import pytest
import torch
from torch import Tensor, nn

from caveat import Categorical, Network
from caveat.engine.fresh_weights import FreshWeights


class OwnWeight(nn.Module):
    """A parameter that no reset_parameters draws."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).reshape(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def network(module: nn.Module, **options) -> Network:
    return Network(module, Categorical(), **options)


def test_fresh_draws_as_the_layers_do_differ_and_repeat() -> None:
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    module(rows(8, 4))  # moves the running statistics
    nn.init.normal_(module[1].weight)
    net, state = network(module), torch.get_rng_state()
    rng = torch.Generator().manual_seed(7)
    one, two = FreshWeights(net)(rng), FreshWeights(net)(rng)
    again = FreshWeights(net)(torch.Generator().manual_seed(7))
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(one["0.weight"], two["0.weight"])
    assert one.keys() == again.keys() == {*net.names, "1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert torch.equal(one["1.weight"], torch.ones(6))
    assert torch.equal(one["1.running_mean"], torch.zeros(6))
    assert float(one["0.weight"].abs().max()) <= 0.5  # torch draws uniformly within 1 / sqrt(4)
    assert torch.equal(net.params()["0.weight"], module[0].weight)  # the network itself stays where it was


def test_fresh_leaves_frozen_layers_as_they_are() -> None:
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    module(rows(8, 4))
    module[:2].requires_grad_(False)
    fresh = FreshWeights(network(module))(torch.Generator().manual_seed(0))
    assert fresh.keys() == {"2.weight", "2.bias"}


def test_fresh_needs_a_way_to_draw() -> None:
    net = network(OwnWeight())
    with pytest.raises(ValueError, match=r"no fresh values could be drawn for weight.*pass initialise="):
        FreshWeights(net)(torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="no fresh values"):  # a filter may leave it to one parameter
        FreshWeights(network(nn.Sequential(nn.Linear(2, 2), OwnWeight()), parameters="1.*"))(torch.Generator())
    net = network(OwnWeight(), initialise=lambda module: nn.init.normal_(module.weight))
    one, two = (FreshWeights(net)(torch.Generator().manual_seed(seed)) for seed in (0, 1))
    assert not torch.equal(one["weight"], two["weight"])
    assert torch.equal(one["weight"], FreshWeights(net)(torch.Generator().manual_seed(0))["weight"])


def test_constant_parameters_count_as_drawn() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.gain = nn.Linear(2, 2), nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.gain

    fresh = FreshWeights(network(Scaled()))(torch.Generator().manual_seed(0))
    assert torch.equal(fresh["gain"], torch.ones(2))
