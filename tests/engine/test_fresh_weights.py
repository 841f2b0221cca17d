"""Fresh weights are drawn as the layers draw theirs, differ, and repeat."""

import pytest
import torch
from torch import Tensor, nn

from caveat.engine.fresh_weights import FreshWeights
from tests.network_modules import OwnWeight, network, rows


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


def test_what_no_initialiser_reaches_is_drawn_by_the_scale_that_it_came_with() -> None:
    class Tokens(nn.Module):
        """As vision transformers are built: tokens and positions of the module's own beside layers."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 30))
            self.cls_token, self.scale = nn.Parameter(0.02 * torch.randn(1, 1, 4000)), nn.Parameter(torch.ones(()))
            self.positions = nn.Parameter(3 + 0.5 * torch.randn(1, 5, 800))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.scale + self.cls_token.mean() + self.positions.mean()

    torch.manual_seed(0)
    draws = FreshWeights(network(Tokens()))
    assert draws.notes() == []
    one, two = draws(torch.Generator().manual_seed(0)), draws(torch.Generator().manual_seed(1))
    for name, mean, std in (("cls_token", 0, 0.02), ("positions", 3, 0.5)):
        assert not torch.equal(one[name], two[name])
        torch.testing.assert_close(one[name].mean(), torch.tensor(float(mean)), atol=4 * std / 4000**0.5, rtol=0)
        torch.testing.assert_close(one[name].std(), torch.tensor(float(std)), atol=0, rtol=0.1)
    assert not torch.equal(
        one["layer.parametrizations.weight.original1"], two["layer.parametrizations.weight.original1"]
    )
    assert float(one["scale"]) == 1
    (note,) = draws.notes()
    assert note.startswith("fresh values of cls_token, positions, layer.parametrizations.weight.original0 and 1 more")


def test_a_function_draws_what_it_draws_and_the_rest_stays() -> None:
    net = network(OwnWeight(), initialise=lambda module: nn.init.normal_(module.weight))
    one, two = (FreshWeights(net)(torch.Generator().manual_seed(seed)) for seed in (0, 1))
    assert not torch.equal(one["weight"], two["weight"])
    assert torch.equal(one["weight"], FreshWeights(net)(torch.Generator().manual_seed(0))["weight"])
    with pytest.raises(ValueError, match=r"no fresh values were drawn for weight: initialise= must draw"):
        FreshWeights(network(OwnWeight(), initialise=lambda module: None))(torch.Generator())
    both = nn.Sequential(nn.Linear(4, 2), OwnWeight())
    draws = FreshWeights(network(both, initialise=lambda module: module[0].reset_parameters()))
    assert torch.equal(draws(torch.Generator())["1.weight"], both[1].weight)
    assert draws.notes() == ["initialise= leaves 1.weight at the module's own values"]


def test_named_parameters_are_drawn_and_the_pretrained_trunk_stays() -> None:
    trunk = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    module = nn.Sequential(trunk, nn.Linear(6, 3))
    module(rows(8, 4))  # moves the running statistics
    draws = FreshWeights(network(module, initialise="1.*"))
    one, two = draws(torch.Generator().manual_seed(0)), draws(torch.Generator().manual_seed(1))
    assert one.keys() == dict(module.named_parameters()).keys()
    for name, value in module.named_parameters():
        assert torch.equal(one[name], value) == torch.equal(one[name], two[name]) == name.startswith("0.")
    assert draws.notes() == [
        "initialise= leaves 0.0.weight, 0.0.bias, 0.1.weight and 1 more at the module's own values"
    ]
    with pytest.raises(ValueError, match=r"initialise='head\.\*' matches none of the parameters"):
        network(module, initialise="head.*")


def test_constant_parameters_count_as_drawn() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.gain = nn.Linear(2, 2), nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.gain

    fresh = FreshWeights(network(Scaled()))(torch.Generator().manual_seed(0))
    assert torch.equal(fresh["gain"], torch.ones(2))
