"""Channels are chosen to a density, scored by their weights, and exchanged for those that would help most."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from caveat import Categorical, Network
from caveat.engine.channels.choice import (
    candidate_values,
    channel_density,
    channel_scores,
    exchange_counts,
    growth_scores,
    random_channels,
    swap,
)
from caveat.engine.channels.narrowing import Channels, KeptChannels, kept_entries, narrow, narrow_params
from caveat.engine.channels.spaces import find_channels
from caveat.engine.fresh_weights import FreshWeights
from caveat.models import lenet5, mlp, resnet18, resnet20_frn
from caveat.network import Params

RNG = torch.Generator().manual_seed(0)
Made = tuple[nn.Module, Tensor]


def images(side: int, channels: int = 3) -> Tensor:
    return torch.randn(4, channels, side, side, generator=RNG, dtype=torch.float64)


NETWORKS: dict[str, Callable[[], Made]] = {
    "mlp": lambda: (mlp(6, 3, (5, 4)).double(), torch.randn(4, 6, generator=RNG, dtype=torch.float64)),
    "lenet5": lambda: (lenet5(image_size=16).double(), images(16, 1)),
    "resnet18": lambda: (resnet18(width=4).double(), images(8)),
    "resnet20_frn": lambda: (resnet20_frn(width=4).double(), images(4)),
}


def test_the_share_of_channels_gives_the_density() -> None:
    module = resnet18()
    channels = find_channels(module, torch.randn(1, 3, 8, 8))
    weights = {name: p.detach() for name, p in module.named_parameters() if name in channels.weights}
    for density in (0.01, 0.05, 0.1, 0.5, 1.0):
        kept = random_channels(channels, density, torch.Generator().manual_seed(1))
        reached = channel_density(channels, kept)
        assert abs(reached / density - 1) < 0.02
        shares = [len(own) / width for own, width in zip(kept.values(), channels.widths, strict=True)]
        assert max(shares) - min(shares) <= 1.5 / min(channels.widths)
        assert abs(sum(shares) / len(shares) - density**0.5) < 0.03
        left = sum(p.numel() for p in narrow_params(weights, channels, kept).values())
        assert reached == left / sum(p.numel() for p in weights.values())


def test_layers_that_stay_whole_count_and_the_others_are_narrowed_further() -> None:
    module = nn.Sequential(
        nn.Linear(20, 10), nn.LayerNorm(10), nn.Linear(10, 100), nn.ReLU(), nn.Linear(100, 50), nn.ReLU(),
        nn.Linear(50, 2),
    )  # fmt: skip
    channels = find_channels(module, torch.randn(2, 20))
    sizes = {name: p.numel() for name, p in module.named_parameters() if p.ndim > 1}
    assert sizes["0.weight"] == 200
    for density in (0.1, 0.3, 0.6, 1.0):
        kept = random_channels(channels, density, torch.Generator().manual_seed(1), sizes=sizes)
        thin = narrow(module, channels, kept)
        left = sum(p.numel() for p in thin.parameters() if p.ndim > 1)
        assert channel_density(channels, kept, sizes) == left / sum(sizes.values())
        assert abs(left / sum(sizes.values()) / density - 1) < 0.05
    least = random_channels(channels, 0.01, RNG, sizes=sizes)
    assert [len(own) for own in least.values()] == [1, 1]


def test_weights_that_do_not_count_are_narrowed_all_the_same() -> None:
    module, x = NETWORKS["mlp"]()
    channels = find_channels(module, x)
    sizes = {"3.weight": 20, "5.weight": 12}
    kept = random_channels(channels, 0.5, RNG, sizes=sizes)
    first, second = (len(kept[space]) for space in (0, 1))
    assert channel_density(channels, kept, sizes) == (first * second + 3 * second) / 32
    assert abs(channel_density(channels, kept, sizes) - 0.5) < 0.1


def test_no_space_is_emptied_and_the_generator_decides() -> None:
    module, x = NETWORKS["mlp"]()
    channels = find_channels(module, x)
    assert [len(own) for own in random_channels(channels, 1e-6, RNG).values()] == [1, 1]
    one, other = (random_channels(channels, 0.3, torch.Generator().manual_seed(3)) for _ in range(2))
    assert all(torch.equal(one[space], other[space]) for space in one)
    for density in (0.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match=r"density=.* must be above 0 and at most 1"):
            random_channels(channels, density, RNG)


def test_counts_can_be_multiples() -> None:
    module, x = resnet18(width=32), images(8).float()
    channels = find_channels(module, x)
    for density in (0.05, 0.1, 0.3):
        kept = random_channels(channels, density, torch.Generator().manual_seed(0), multiple=8)
        assert all(len(own) % 8 == 0 for own in kept.values())
        assert abs(channel_density(channels, kept) - density) < 0.35 * density
    narrow_ones = random_channels(channels, 1e-6, RNG, multiple=64)
    assert [len(own) for own in narrow_ones.values()] == [min(64, width) for width in channels.widths]


def test_scores_are_means_over_a_channels_weights() -> None:
    module, x = NETWORKS["lenet5"]()
    channels = find_channels(module, x)
    kept = random_channels(channels, 0.3, RNG)
    wide = {n: torch.randn(p.shape, generator=RNG, dtype=torch.float64) for n, p in module.named_parameters()}
    found = channel_scores(channels, kept, narrow_params(wide, channels, kept))
    W, index = wide, kept_entries(channels, kept)
    second, third = index["3.weight"], index["7.weight"]
    for place, c in enumerate(kept[0]):
        own = torch.cat([W["0.weight"][c].flatten(), W["3.weight"][second[0], c].flatten()])
        torch.testing.assert_close(found[0][place], own.mean())
    for place, c in enumerate(kept[1]):
        own = torch.cat([W["3.weight"][c][second[1]].flatten(), W["7.weight"][third[0], 4 * c : 4 * c + 4].flatten()])
        torch.testing.assert_close(found[1][place], own.mean())
    alone = channel_scores(channels, kept, {"11.weight": narrow_params(wide, channels, kept)["11.weight"]})
    torch.testing.assert_close(alone[3], W["11.weight"][:, kept[3]].mean(0))
    assert not alone[0].any()


def test_the_lowest_go_and_the_best_absent_ones_come() -> None:
    channels = find_channels(*NETWORKS["mlp"]())
    kept = {0: torch.tensor([0, 2, 4]), 1: torch.tensor([1, 3])}
    keep = {0: torch.tensor([3.0, 1.0, 2.0]), 1: torch.zeros(2)}
    add = {0: torch.tensor([99.0, 1.0, 99.0, 2.0, 99.0]), 1: torch.zeros(4)}
    assert swap(channels, kept, {0: 1}, keep, add)[0].tolist() == [0, 3, 4]
    assert swap(channels, kept, {0: 2}, keep, add)[0].tolist() == [0, 1, 3]
    assert swap(channels, kept, {0: 0, 1: 2}, keep, add)[1].tolist() == [0, 2]
    assert kept[0].tolist() == [0, 2, 4]
    rounded = [{space: own.bfloat16() for space, own in scores.items()} for scores in (keep, add)]
    assert swap(channels, kept, {0: 1}, *rounded)[0].tolist() == [0, 3, 4]


def test_exchanges_that_cannot_be_are_refused() -> None:
    channels = find_channels(*NETWORKS["mlp"]())
    kept = {0: torch.tensor([0, 2, 4]), 1: torch.tensor([1, 3])}
    keep, add = {0: torch.ones(3), 1: torch.ones(2)}, {0: torch.ones(5), 1: torch.ones(4)}
    with pytest.raises(ValueError, match=r"drop\[0\]=3, but space 0 has 3 channels to remove and 2 to add"):
        swap(channels, kept, {0: 3}, keep, add)
    with pytest.raises(ValueError, match="space 0 takes 3 keep scores and 5 add scores"):
        swap(channels, kept, {0: 1}, add, keep)
    with pytest.raises(ValueError, match="scores of space 0 are not numbers"):
        swap(channels, kept, {0: 1}, keep | {0: torch.full((3,), torch.nan)}, add)
    with pytest.raises(ValueError, match="share=1 "):
        exchange_counts(channels, kept, 1)
    assert exchange_counts(channels, kept, 0.9) == {0: 2, 1: 1}
    assert exchange_counts(channels, kept, 0.3) == {0: 1, 1: 1}
    assert exchange_counts(channels, kept | {0: torch.arange(5)}, 0.3)[0] == 0


@pytest.mark.parametrize("name", ["mlp", "lenet5", "resnet18", "resnet20_frn"])
def test_absent_channels_are_scored_as_if_each_came_in_alone(name: str) -> None:
    module, x = NETWORKS[name]()
    network = Network(module, Categorical())
    channels = find_channels(module, x)
    kept = random_channels(channels, 0.3, RNG)
    thin = narrow(module, channels, kept).train()
    fresh = FreshWeights(network)(RNG)
    wide = candidate_values(dict(thin.named_parameters()), channels, kept, fresh)
    y = torch.arange(len(x)) % 3

    def loss(params: Params) -> Tensor:
        return nn.functional.cross_entropy(network(params, x, train=True), y)

    # Nothing reads an absent channel: the function is still the narrow network's.
    torch.testing.assert_close(network(wide, x, train=True), thin(x), rtol=1e-9, atol=1e-9)
    before = network.buffers()
    found = growth_scores(channels, wide, loss)
    assert all(torch.equal(value, before[n]) for n, value in network.buffers().items())
    rated = 0
    for space, width in enumerate(channels.widths):
        absent = [c for c in range(width) if c not in kept[space].tolist()]
        for c in absent[:2]:
            torch.testing.assert_close(found[space][c], reference(network, channels, kept, wide, space, c, (x, y)))
        rated += sum(float(found[space][c]) > 0 for c in absent)
    assert rated > 1  # not all: a ReLU may be off for every row


def reference(
    network: Network,
    channels: Channels,
    kept: KeptChannels,
    wide: Params,
    space: int,
    c: int,
    data: tuple[Tensor, Tensor],
) -> Tensor:
    """The norm for one channel, from a narrow network that has it and no other new one."""
    more = kept | {space: torch.cat([kept[space], torch.tensor([c])]).sort().values}
    module = narrow(network.module, channels, more).train()
    params = narrow_params(wide, channels, more)
    leaves = {n: p.detach().clone().requires_grad_() for n, p in params.items()}
    buffers = {n: b.clone() for n, b in module.named_buffers()}
    nn.functional.cross_entropy(functional_call(module, leaves | buffers, (data[0],)), data[1]).backward()
    total, place = torch.zeros((), dtype=torch.float64), int((more[space] == c).nonzero())
    for n in channels.weights:
        axis = channels.extents[n].axes[1]
        if axis and axis[0].space == space:
            columns = slice(place * axis[0].block, (place + 1) * axis[0].block)
            assert not leaves[n][:, columns].any()
            gradient = leaves[n].grad
            assert gradient is not None
            total += gradient[:, columns].square().sum()
    return total.sqrt()


def test_without_incoming_weights_no_gradient_says_anything() -> None:
    module, x = NETWORKS["mlp"]()
    network, channels = Network(module, Categorical()), find_channels(module, x)
    kept = random_channels(channels, 0.3, RNG)
    nothing = {name: torch.zeros_like(p) for name, p in network.params().items()}
    wide = candidate_values(narrow_params(network.params(), channels, kept), channels, kept, nothing)
    found = growth_scores(channels, wide, lambda params: network(params, x).square().sum())
    for space, own in kept.items():
        absent = torch.ones(channels.widths[space], dtype=torch.bool).index_fill(0, own, False)
        assert not found[space][absent].any()


def test_an_exchange_keeps_the_function_of_those_that_stay() -> None:
    module, x = NETWORKS["lenet5"]()
    network, channels = Network(module, Categorical()), find_channels(module, x)
    kept = random_channels(channels, 0.3, RNG)
    thin = narrow_params(network.params(), channels, kept)
    wide = candidate_values(thin, channels, kept, FreshWeights(network)(RNG))
    scores = channel_scores(channels, kept, {n: p.abs() for n, p in thin.items()})
    add = growth_scores(channels, wide, lambda params: network(params, x).square().sum())
    new = swap(channels, kept, exchange_counts(channels, kept, 0.5), scores, add)
    after = narrow_params(wide, channels, new)
    assert channel_density(channels, new) == channel_density(channels, kept)
    assert {n: p.shape for n, p in after.items()} == {n: p.shape for n, p in thin.items()}
    # What came in has no outgoing weights yet: leaving it out changes nothing.
    stayed = {s: own[torch.isin(own, kept[s])] for s, own in new.items()}
    short = narrow(module, channels, stayed)
    expected = functional_call(short, narrow_params(wide, channels, stayed), (x,))
    torch.testing.assert_close(functional_call(narrow(module, channels, new), after, (x,)), expected)
    assert any(len(stayed[s]) < len(new[s]) for s in new)
