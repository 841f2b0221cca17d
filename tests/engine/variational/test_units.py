"""Units of networks: which there are, and that those that go leave the same function."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import caveat
from caveat.engine.run import Run
from caveat.engine.sparse import ActiveWeights, Substitute, WeightLayout, sparse_layers
from caveat.engine.variational.layer_posterior import LayerPredictor, LayerState, module_at
from caveat.engine.variational.layer_training import Trained
from caveat.engine.variational.noisy_training import scale_inputs
from caveat.engine.variational.pruning import pruned_network, remaining_units, remaining_weights, smaller_layout
from caveat.engine.variational.unit_noise import GaussianUnitNoise
from caveat.engine.variational.units import find_units
from caveat.models import lenet_caffe, resnet18
from caveat.network import Network


def network(module: nn.Module, **selected: Any) -> Network:
    return Network(module, caveat.Categorical(), **selected)


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(32, 12), nn.ReLU(), nn.Linear(12, 3),
    ).double()  # fmt: skip


X = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_the_units_of_lenet_are_channels_hidden_units_and_positions() -> None:
    own = network(lenet_caffe())
    units, why = find_units(own, sparse_layers(own), torch.randn(2, 1, 28, 28))
    assert units.names == {"0": 20, "3": 50, "7": 500, "inputs of 7": 800}
    assert why is None
    assert {name: tuple(of.shape) for name, of in units.of_inputs.items()} == {
        "3": (20, 1),
        "7": (800, 2),
        "9": (500, 1),
    }
    assert units.of_inputs["7"][17].tolist() == [20 + 1, 570 + 17], "the second channel's second position"


def test_channels_that_are_added_to_each_other_are_one_unit() -> None:
    own = network(resnet18(3, 10))
    units, _ = find_units(own, sparse_layers(own), torch.randn(2, 3, 32, 32))
    assert units.names["conv1" if "conv1" in units.names else next(iter(units.names))] == 64
    readers = [name for name, of in units.of_inputs.items() if int(of.min()) == 0]
    assert len(readers) >= 3, "all that read the residual stream"
    assert units.size < sum(len(of) for of in units.of_inputs.values())


def test_what_is_fixed_has_inputs_alone() -> None:
    own = network(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), parameters="2.*")
    units, why = find_units(own, sparse_layers(own), torch.randn(2, 4))
    assert units.names == {"inputs of 2": 6}
    assert why is not None
    assert "fixed" in why
    convolution = network(nn.Sequential(nn.Conv2d(1, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()))
    with pytest.raises(ValueError, match=r"no units that could be pruned.*VariationalDropout"):
        find_units(convolution, sparse_layers(convolution), torch.randn(2, 1, 5, 5))


def everything(own: Network) -> WeightLayout:
    layers = sparse_layers(own)
    return WeightLayout(layers, {n: g.size for n, g in layers.items()}, torch.zeros(0, dtype=torch.int32))


def tensors_of(weights: ActiveWeights) -> list[Tensor]:
    return [weights.mean] if weights.log_std is None else [weights.mean, weights.log_std]


def multiplied(keep_share: float, gaussian: bool) -> tuple[Tensor, Tensor, Tensor, Any, Run]:
    """Outputs of the wide network with zeros for units that go, of the narrow module and of the narrow draw."""
    own, run = network(small()), Run()
    layout = everything(own)
    units, _ = find_units(own, layout.geometries, X)
    rng = torch.Generator().manual_seed(3)
    scores = torch.rand(units.size, generator=rng, dtype=torch.float64)
    remaining = remaining_units(units, scores, 1 - keep_share, run)
    params = own.params()
    mean = layout.gathered({name: params[f"{name}.weight"] for name in layout.counts})
    numbers = 0.5 + torch.rand(units.size, generator=rng, dtype=torch.float64)
    noise = GaussianUnitNoise(numbers, torch.full_like(numbers, -torch.inf))
    substitute = Substitute(own, layout, params)
    multiply = scale_inputs(substitute, units)
    multiply(numbers * remaining.mask)
    substitute.use(mean)
    with torch.no_grad():
        expected = substitute.network.evaluation_pass(X)
    weights = ActiveWeights(mean, torch.full_like(mean, -40.0) if gaussian else None)
    thin = pruned_network(own, units, remaining, layout, weights, substitute.rest(), noise)
    trained = Trained(thin.layout, thin.weights.mean, thin.weights.log_std, thin.rest, {}, [])
    state = LayerState.of(thin.state(trained).tensors())
    module = module_at(state, own, None).eval()
    draw = next(LayerPredictor(state, own).draws(1, torch.Generator().manual_seed(0)))
    with torch.no_grad():
        return expected, module(X), own(draw, X), thin, run


@pytest.mark.parametrize("gaussian", [True, False])
@pytest.mark.parametrize("share", [1.0, 0.9, 0.5, 0.1])
def test_the_narrow_network_is_the_wide_one_without_the_units(share: float, gaussian: bool) -> None:
    expected, at_means, drawn, thin, run = multiplied(share, gaussian)
    torch.testing.assert_close(at_means, expected, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(drawn, expected, atol=1e-10, rtol=1e-10)
    assert bool(run.warnings) == (share < 0.2)
    stored = sum(t.numel() for t in (*tensors_of(thin.weights), thin.layout.indices, *thin.rest.values()))
    whole = (2 if gaussian else 1) * everything(network(small())).size
    assert stored < whole * (0.2 if share < 0.2 else 0.6 if share < 0.6 else 1.1)
    if share < 0.6:
        assert thin.network.module[0].out_channels < 6
        assert thin.network.module[1].num_features == thin.network.module[0].out_channels


@pytest.mark.parametrize("gaussian", [True, False])
def test_no_zeros_are_stored_where_few_inputs_go(gaussian: bool) -> None:
    expected, at_means, _, thin, _ = multiplied(0.9, gaussian)
    torch.testing.assert_close(at_means, expected, atol=1e-10, rtol=1e-10)
    inputs, stay = thin.network.module[7].in_features, len(thin.columns["7"])
    assert 0.8 * inputs < stay < inputs, "more weights stay than an index for each would be worth"
    assert thin.layout.counts["7"] == stay * thin.network.module[7].out_features
    assert all(bool(value.isfinite().all()) for value in tensors_of(thin.weights))
    assert bool(thin.weights.mean.all())
    state = thin.state(Trained(thin.layout, thin.weights.mean, None, thin.rest, {}, []))
    assert not len(state.tensors()["active"]["indices"])
    assert torch.equal(state.layout(thin.network).indices, thin.layout.indices)


def test_a_threshold_that_would_empty_a_layer_leaves_the_best_and_says_so() -> None:
    expected, at_means, drawn, thin, run = multiplied(-1.0, True)
    torch.testing.assert_close(at_means, expected, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(drawn, expected, atol=1e-10, rtol=1e-10)
    assert thin.network.module[0].out_channels == thin.network.module[3].out_channels == 1
    assert any("would have emptied the channels of 0" in w and "the best unit was kept" in w for w in run.warnings)


def test_a_channel_that_lost_every_position_goes() -> None:
    own, run = network(small()), Run()
    units, _ = find_units(own, everything(own).geometries, X)
    scores = torch.ones(units.size)
    first = units.inputs["7"]
    scores[first + 8 : first + 12] = 0  # the four positions of the third channel of the second convolution
    remaining = remaining_units(units, scores, 0.5, run)
    assert remaining.channels[1].tolist() == [0, 1, 3, 4, 5, 6, 7]
    assert len(remaining.channels[0]) == 6
    assert not run.warnings


def test_weights_that_stay() -> None:
    own, run = network(small()), Run()
    layout = everything(own)
    scores = torch.rand(layout.size, generator=torch.Generator().manual_seed(0))
    dict(layout.split(scores))["9"] *= 0.1
    keep = remaining_weights(layout, scores, 0.5, run)
    assert int(dict(layout.split(keep))["9"].sum()) == 1
    assert any("emptied 9: the best weight was kept" in w for w in run.warnings)
    few = smaller_layout(layout, keep)
    assert few.indices.dtype == torch.int32
    whole = few.whole(scores[keep])
    for name, part in layout.split(scores * keep):
        assert torch.equal(whole[f"{name}.weight"].flatten(), part)


def test_numbers_multiply_the_rows_that_are_read() -> None:
    own = network(small())
    layout = everything(own)
    units, _ = find_units(own, layout.geometries, X)
    substitute = Substitute(own, layout, own.params())
    multiply = scale_inputs(substitute, units)
    substitute.use(layout.gathered({name: own.params()[f"{name}.weight"] for name in layout.counts}))
    z = torch.rand(5, units.size, dtype=torch.float64)
    with torch.no_grad():
        multiply(z)
        together = substitute.network.evaluation_pass(X)
        for row in range(5):
            multiply(z[row])
            torch.testing.assert_close(substitute.network.evaluation_pass(X[row : row + 1])[0], together[row])
