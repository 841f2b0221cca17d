"""Channels are exchanged: what stays keeps its values and moments; the network is the wide one without what went."""

import pytest
import torch
from torch import Tensor, nn

import caveat
from caveat import SSVI, Training
from caveat.engine.channels.channel_exchange import ChannelExchange
from caveat.engine.channels.choice import random_channels
from caveat.engine.channels.narrow_networks import narrow_network, sliced_network, stored_slices, widened
from caveat.engine.channels.narrowing import KeptChannels, kept_entries, narrow_params
from caveat.engine.channels.spaces import find_channels
from caveat.engine.run import Run
from caveat.engine.sparse import (
    ActiveWeights,
    Schedule,
    StepBatch,
    random_layout,
    sparse_layers,
    substitute_and_means,
)
from caveat.engine.training import Moments, steps_per_epoch
from caveat.engine.variational import (
    LayerPredictor,
    LayerState,
    LayerTraining,
)
from caveat.network import Network


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 6, 3, padding=1, bias=False),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(24, 3),
    ).double()


X = torch.randn(12, 2, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.arange(12) % 3


def exchange(spread: bool = True) -> tuple[ChannelExchange, Tensor, Tensor]:
    """With four and three channels of eight and six, and the flat means and log stds."""
    network = Network(module(), caveat.Categorical(), caveat.GaussianPrior(1.0))
    channels = find_channels(network.module, X)
    kept = random_channels(channels, 0.3, torch.Generator().manual_seed(1))
    narrow = narrow_network(network, channels, kept)
    layers = sparse_layers(narrow)
    layout = random_layout(layers, {name: g.size for name, g in layers.items()}, Run())
    substitute, mean = substitute_and_means(narrow, narrow_params(network.params(), channels, kept), layout)
    log_std = torch.randn(mean.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    weights = ActiveWeights(mean, log_std if spread else None)
    of = ChannelExchange(network, substitute, weights, channels, kept, lambda: mean.abs(), Schedule(2, 0.5, 0.75, 16))
    return of, mean, log_std


def looked(of: ChannelExchange) -> None:
    of.begin(1, StepBatch(X, lambda outputs: nn.functional.cross_entropy(outputs, Y), lambda: None))


def outputs(of: ChannelExchange, mean: Tensor) -> Tensor:
    of.substitute.use(mean)
    return of.substitute.network.evaluation_pass(X)


def wide_without(of: ChannelExchange, mean: Tensor, before: KeptChannels, gone: KeptChannels) -> Tensor:
    """The narrow network's function with the channels that went cut out of the wide network."""
    module_now = of.substitute.network.module
    rest = dict(module_now.named_parameters()) | dict(module_now.named_buffers())
    thin = {n: v.detach().clone() for n, v in rest.items()} | of.substitute.layout.whole(mean.clone())
    wide = widened(thin, of.network, stored_slices(of.channels, before))
    stay = {s: own[~torch.isin(own, gone[s])] for s, own in before.items()}
    cut = kept_entries(of.channels, stay)
    for name, index in cut.items():
        mask = torch.zeros_like(wide[name], dtype=torch.bool)
        grid = torch.meshgrid(
            *(
                torch.arange(n) if i is None else i
                for n, i in zip(wide[name].shape, (*index, None, None), strict=False)
            ),
            indexing="ij",
        )
        mask[grid] = True
        wide[name] = torch.where(mask, wide[name], torch.ones_like(wide[name]) * (name.endswith("running_var")))
    return of.network(wide, X)


def test_added_channels_do_nothing_until_they_are_trained() -> None:
    of, mean, _ = exchange()
    before = of.kept
    looked(of)
    new = of._choice()
    gone = {s: own[~torch.isin(own, new[s])] for s, own in before.items()}
    assert sum(len(own) for own in gone.values()) >= 2
    expected = wide_without(of, mean, before, gone)
    of.finish(lambda tensor: [])
    assert of.updates == 1
    assert of.replaced == sum(len(own) for own in gone.values())
    torch.testing.assert_close(outputs(of, mean), expected)


def test_what_stays_keeps_its_values_and_moments() -> None:
    of, mean, log_std = exchange()
    of.substitute.network.module.requires_grad_(True)
    old = kept_entries(of.channels, of.kept)
    layout = of.substitute.layout
    was, spread = layout.whole(mean.clone()), layout.whole(log_std.clone())
    momentum: dict[int, Tensor] = {}

    def moments(tensor: Tensor) -> list[Tensor]:
        return [momentum.setdefault(id(tensor), torch.randn_like(tensor) + 5)]

    kept_moments = layout.whole(moments(mean)[0].clone())
    looked(of)
    fills = of.weights.new_log_std(layout, None)
    of.finish(moments)
    new = kept_entries(of.channels, of.kept)
    now, spread_now, moments_now = layout.whole(mean), layout.whole(log_std), layout.whole(moments(mean)[0])
    seen = 0
    for place, name in enumerate(was):
        if name not in old:
            continue
        pairs = zip(old[name], new[name], strict=True)
        both = [torch.isin(n, o) if o is not None and n is not None else None for o, n in pairs]
        for o in range(now[name].shape[0]):
            for i in range(now[name].shape[1]):
                stays = (both[0] is None or bool(both[0][o])) and (len(both) < 2 or both[1] is None or bool(both[1][i]))
                if not stays:
                    assert torch.all(spread_now[name][o, i] == fills[place])
                    assert torch.all(moments_now[name][o, i] == 0)
                    continue
                seen += 1
                at = [_before(o, 0, old[name], new[name]), _before(i, 1, old[name], new[name])]
                assert torch.equal(now[name][o, i], was[name][at[0], at[1]])
                assert torch.equal(spread_now[name][o, i], spread[name][at[0], at[1]])
                assert torch.equal(moments_now[name][o, i], kept_moments[name][at[0], at[1]])
    assert seen


def test_norms_and_biases_keep_theirs_too() -> None:
    of, _, _ = exchange(spread=False)
    points = dict(of.substitute.network.module.named_parameters())
    buffers = dict(of.substitute.network.module.named_buffers())
    momentum = {id(t): torch.randn_like(t) for name, t in points.items() if name != "0.bias"}  # it has had no gradient
    old = kept_entries(of.channels, of.kept)
    tensors = {name: t for name, t in (points | buffers).items() if name in old}
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.copy_(torch.randn_like(tensor).abs())
    was = {name: t.detach().clone() for name, t in tensors.items()}
    kept_moments = {name: m.clone() for name, p in points.items() if (m := momentum.get(id(p))) is not None}
    looked(of)
    assert of._findings is not None
    come = narrow_params(of._findings.wide, of.channels, of._choice())
    with torch.no_grad():
        for name, tensor in tensors.items():
            was[name] += 1  # as a step between the two would
            tensor.add_(1)
    of.finish(lambda tensor: [momentum[id(tensor)]] if id(tensor) in momentum else [])
    new = kept_entries(of.channels, of.kept)
    assert set(tensors) == {"0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var"}
    for name, tensor in tensors.items():
        before, now = old[name][0], new[name][0]
        assert before is not None
        assert now is not None
        assert not torch.equal(before, now)
        for place, channel in enumerate(now.tolist()):
            at = (before == channel).nonzero()
            assert tensor[place] == (was[name][at[0, 0]] if len(at) else come[name][place])
            if name in kept_moments:
                expected = kept_moments[name][at[0, 0]] if len(at) else torch.zeros(())
                assert momentum[id(points[name])][place] == expected


def _before(place: int, axis: int, old: tuple[Tensor | None, ...], new: tuple[Tensor | None, ...]) -> int:
    if axis >= len(new) or (index := new[axis]) is None or (former := old[axis]) is None:
        return place
    return int((former == index[place]).nonzero())


def test_the_channels_of_largest_gain_come_and_those_of_lowest_score_go() -> None:
    from caveat.engine.channels.choice import candidate_values, channel_scores, growth_scores

    of, mean, _ = exchange()
    wide = candidate_values(of._narrow_values(mean), of.channels, of.kept, of._fresh(1))
    loss = lambda params: nn.functional.cross_entropy(of.network(params, X, train=True), Y)  # noqa: E731
    gains = growth_scores(of.channels, wide, loss)
    keep = channel_scores(of.channels, of.kept, of.substitute.layout.whole(mean.abs()))
    looked(of)
    new = of._choice()
    for space, own in of.kept.items():
        came = new[space][~torch.isin(new[space], own)]
        went = ~torch.isin(own, new[space])
        absent = torch.tensor([c for c in range(of.channels.widths[space]) if c not in own and c not in came])
        if len(came):
            assert gains[space][came].min() >= gains[space][absent].max()
            assert keep[space][went].max() <= keep[space][~went].min()


def test_times_of_exchanges() -> None:
    of, _, _ = exchange()
    assert [step for step in range(16) if of.schedule.due(step)] == [1, 3, 5, 7, 9]


def test_slices_make_the_network_again() -> None:
    of, _, _ = exchange()
    stored = stored_slices(of.channels, of.kept)
    again = sliced_network(of.network, stored)
    first = narrow_network(of.network, of.channels, of.kept)
    assert repr(again.module) == repr(first.module)
    torch.testing.assert_close(again(again.params(), X), first(first.params(), X))


@pytest.fixture(scope="module")
def fitted() -> caveat.Posterior:
    task = caveat.Task(module(), (X, Y), caveat.Categorical(), caveat.GaussianPrior(1.0))
    method = SSVI(structure="channel", density=0.3, interval=3, training=Training(epochs=20, batch_size=6))
    return caveat.fit(task, method, progress=False)


def test_draws_of_the_wide_network_are_outputs_of_the_narrow_one(fitted: caveat.Posterior) -> None:
    state, network = fitted.state, fitted.network
    narrow = LayerState.of(state).network(network)
    assert sum(p.numel() for p in narrow.module.parameters()) < 0.5 * sum(
        p.numel() for p in network.module.parameters()
    )
    (params,) = LayerPredictor(LayerState.of(state), network).draws(1, torch.Generator().manual_seed(3))
    index = stored_slices(find_channels(network.module, X), _kept(state))
    assert {k: v.tolist() for k, v in index.items()} == {k: v.tolist() for k, v in state["slices"].items()}
    thin = narrow_params(params, find_channels(network.module, X), _kept(state))
    torch.testing.assert_close(network(params, X), narrow(thin, X))


def _kept(state: caveat.State) -> KeptChannels:
    return {0: state["slices"]["0.weight/0"].long(), 1: state["slices"]["3.weight/0"].long()}


def test_counts_and_costs_are_those_of_the_narrow_network(fitted: caveat.Posterior) -> None:
    found = fitted.info.diagnostics
    assert 0.2 < found["density"] < 0.45
    assert found["exchanges"] > 3
    assert found["account"]["ratio"]["inference_flops"] < 0.6
    wide = sum(p.numel() for p in fitted.network.module.parameters() if p.ndim > 1)
    assert found["account"]["update_bytes"] == 2 * 8 * wide  # weights and gradients in float64
    largest = max(t.numel() for group in ("active", "rest") for t in fitted.state[group].values())
    assert largest < sum(p.numel() for p in fitted.network.module.parameters())


def test_as_many_weights_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, after_step = [], LayerTraining._after_step

    def spied(self: LayerTraining, moments: Moments) -> None:
        after_step(self, moments)
        assert isinstance(self.exchange, ChannelExchange)
        kept = tuple(len(own) for own in self.exchange.kept.values())
        counts.append((kept, len(self.mean), sum(p.numel() for p in self.substitute.network.module.parameters())))

    monkeypatch.setattr(LayerTraining, "_after_step", spied)
    task = caveat.Task(module(), (X, Y), caveat.Categorical(), caveat.GaussianPrior(1.0))
    method = SSVI(structure="channel", density=0.3, interval=2, training=Training(epochs=8, batch_size=6))
    found = caveat.fit(task, method, progress=False).info.diagnostics
    assert found["exchanges"] > 1
    assert len(counts) == 8 * steps_per_epoch(len(X), 6)
    assert len(set(counts)) == 1


def test_a_look_leaves_the_statistics_alone() -> None:
    of, _, _ = exchange()
    before = {name: buffer.clone() for name, buffer in of.substitute.network.module.named_buffers()}
    looked(of)
    for name, buffer in of.substitute.network.module.named_buffers():
        assert torch.equal(buffer, before[name]), name


def test_a_norm_that_could_not_be_made_again_is_refused_before_training() -> None:
    torch.manual_seed(0)
    normed = nn.Sequential(
        nn.Conv2d(2, 8, 3), nn.GroupNorm(8, 8, affine=False), nn.ReLU(), nn.Flatten(), nn.Linear(72, 3)
    )
    task = caveat.Task(normed.double(), (X, Y), caveat.Categorical())
    with pytest.raises(ValueError, match="cannot narrow a normalisation without parameters"):
        caveat.fit(task, SSVI(structure="channel", density=0.3, training=Training(epochs=1)), progress=False)


def test_a_parameter_without_initial_values_does_not_matter() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(6, dtype=torch.float64))
            self.body = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3)).double()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.body(x * self.scale)
            return out

    x = torch.randn(30, 6, dtype=torch.float64)
    method = SSVI(structure="channel", density=0.4, interval=2, training=Training(epochs=4, batch_size=10))
    found = caveat.fit(caveat.Task(Scaled(), (x, torch.arange(30) % 3), caveat.Categorical()), method, progress=False)
    assert found.info.diagnostics["exchanges"] > 0


def test_too_narrow_a_network_says_which_density_it_reached() -> None:
    x = torch.randn(30, 6, dtype=torch.float64)
    module = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    method = SSVI(structure="channel", density=0.1, training=Training(epochs=1))
    found = caveat.fit(caveat.Task(module, (x, torch.arange(30) % 3), caveat.Categorical()), method, progress=False)
    assert any("come as near to density=0.1 as 0.25" in warning for warning in found.info.warnings)


def reached(module: nn.Module, x: Tensor, density: float) -> tuple[float, list[str], caveat.Posterior]:
    """The density of a short fit, and what it warns of about that."""
    torch.manual_seed(0)
    task = caveat.Task(module, (x, torch.arange(len(x)) % 3), caveat.Categorical())
    found = caveat.fit(task, SSVI(structure="channel", density=density, training=Training(epochs=1)), progress=False)
    return found.info.diagnostics["density"], [w for w in found.info.warnings if "come as near" in w], found


def normed(first: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, first), nn.LayerNorm(first), nn.Linear(first, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(),
        nn.Linear(40, 3),
    )  # fmt: skip


def test_the_density_is_that_of_all_layers_with_a_posterior() -> None:
    x = torch.randn(30, 6)
    density, said, found = reached(normed(8), x, 0.2)
    assert 0.19 < density < 0.21
    assert not said
    sizes = {name: p.numel() for name, p in found.network.module.named_parameters() if p.ndim > 1}
    assert density == len(found.state["active"]["mean"]) / sum(sizes.values())


def test_layers_that_keep_the_density_high_are_named() -> None:
    """One channel in each of the others would be a bottleneck that saves nothing."""
    least = (2400 + 400 + 1 + 3) / (2400 + 16000 + 1600 + 120)
    with pytest.raises(
        ValueError, match=f"density=0.02 as {least:.3g}: .*unstructured.* or a higher density"
    ) as caught:
        reached(normed(400), torch.randn(30, 6), 0.02)
    assert "(0: 1 (LayerNorm) needs all of them)" in str(caught.value)


def test_layers_with_no_known_reason_are_named_too() -> None:
    class Encoded(nn.Module):  # torch's encoder is one step, with layers inside that have a posterior
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.TransformerEncoderLayer(6, 2, 64, batch_first=True)
            self.body = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.body(self.encoder(x[:, None])[:, 0])
            return out

    with pytest.raises(ValueError, match=r"\(encoder.linear1; encoder.linear2; encoder.self_attn.out_proj\)"):
        reached(Encoded(), torch.randn(30, 6), 0.1)


def test_a_narrowed_point_layer_does_not_count() -> None:
    circular = nn.Conv1d(2, 8, 3, padding=1, padding_mode="circular")
    module = nn.Sequential(circular, nn.ReLU(), nn.Conv1d(8, 24, 3), nn.ReLU(), nn.Flatten(), nn.Linear(96, 3))
    density, said, found = reached(module, torch.randn(30, 2, 6), 0.2)
    assert density == len(found.state["active"]["mean"]) / (24 * 24 + 288)
    assert 0.17 < density < 0.23
    assert not said
