"""Channels that belong together are found in any module, and a narrow network is the wide one without the others."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from caveat.engine.channels.narrowing import (
    Channels,
    KeptChannels,
    entry_positions,
    kept_entries,
    narrow,
    narrow_params,
    widen_params,
)
from caveat.engine.channels.spaces import find_channels
from caveat.models import cnn_lstm, lenet5, mlp, resnet18, resnet20_frn

RNG = torch.Generator().manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=RNG, dtype=torch.float64)


class Custom(nn.Module):
    """A forward pass as a function of the module and its inputs; parts that are shapes become parameters."""

    def __init__(self, run: Callable[..., Tensor], **parts: nn.Module | tuple[int, ...]) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(torch.ones(part)) if isinstance(part, tuple) else part)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


class Scale(nn.Module):
    """One number a channel, in a shape of its own."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(shape))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Rms(nn.Module):
    """One number a channel, but all channels matter to each."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain / (x.square().mean(1, keepdim=True) + 1e-5).sqrt()


def sequence() -> nn.Module:
    def run(self: Any, x: Tensor) -> Tensor:
        h = F.max_pool1d(torch.relu(self.first(x)), 2)
        h = self.second(F.dropout(h, 0.0, self.training)).transpose(1, 2)  # [B, T, C]
        return self.head(torch.tanh(self.each(h)).mean(dim=1))

    return Custom(
        run, first=nn.Conv1d(3, 6, 3, stride=2), second=nn.Conv1d(6, 5, 2, dilation=2), each=nn.Linear(5, 7),
        head=nn.Linear(7, 2),
    )  # fmt: skip


def dense_block() -> nn.Module:
    def run(self: Any, x: Tensor) -> Tensor:
        one = self.one(x)
        both = torch.cat([x, one], 1)  # the inputs stay whole
        two = self.two(F.relu(self.norm(both)))
        return self.head(torch.cat((both, two), dim=1).flatten(1))

    return Custom(
        run, one=nn.Conv2d(3, 4, 1), norm=nn.BatchNorm2d(7), two=nn.Conv2d(7, 5, 3, padding=1), head=nn.Linear(192, 2)
    )


def squeeze_and_excite() -> nn.Module:
    def run(self: Any, x: Tensor) -> Tensor:
        h = self.act(self.stem(x))
        gate = torch.sigmoid(self.up(F.silu(self.down(h.mean((2, 3))))))
        return self.head(F.adaptive_avg_pool2d(h * gate[:, :, None, None], 1).view(x.size(0), -1))

    parts = {"down": nn.Linear(6, 3), "up": nn.Linear(3, 6), "head": nn.Linear(6, 2)}
    return Custom(run, stem=nn.Conv2d(3, 6, 3), act=nn.PReLU(6), **parts)


def depthwise() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 1), Scale(1, 4, 1, 1), nn.Conv2d(4, 8, 3, groups=4), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 5, 1), nn.InstanceNorm2d(5), nn.GroupNorm(5, 5), nn.Flatten(), nn.Linear(20, 2),
    )  # fmt: skip


def repeated() -> nn.Module:
    def run(self: Any, x: Tensor) -> Tensor:
        h = self.into(x)
        for _ in range(3):
            h = h + 0.5 * torch.tanh(self.again(h))
        return self.head(h)

    return Custom(run, into=nn.Linear(4, 6), again=nn.Linear(6, 6), head=nn.Linear(6, 2))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: mlp(8, 3, (5, 6)), (2, 4)),
    "lenet5": (lambda: lenet5(image_size=16), (1, 16, 16)),
    "resnet18": (lambda: resnet18(width=8), (3, 8, 8)),
    "resnet20_frn": (lambda: resnet20_frn(width=4), (3, 8, 8)),
    "sequence": (sequence, (3, 20)),
    "dense_block": (dense_block, (3, 4, 4)),
    "squeeze_and_excite": (squeeze_and_excite, (3, 6, 6)),
    "depthwise": (depthwise, (3, 4, 4)),
    "repeated": (repeated, (4,)),
}


def made(name: str) -> tuple[nn.Module, Tensor]:
    """A network whose every parameter and buffer is random, and inputs."""
    build, shape = NETWORKS[name]
    module = build().double()
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.ndim:
                tensor.copy_(normal(*tensor.shape) / tensor[0].numel() ** 0.5)
            if tensor.ndim == 1:
                tensor.abs_().add_(0.1)  # some are variances
    return module, normal(4, *shape)


def some(channels: Channels, share: float = 0.5) -> KeptChannels:
    counts = [max(1, round(share * width)) for width in channels.widths]
    widths = enumerate(zip(channels.widths, counts, strict=True))
    return {space: torch.randperm(width, generator=RNG)[:n].sort().values for space, (width, n) in widths}


def state(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_narrow_network_is_the_wide_one_without_the_other_channels(name: str, train: bool) -> None:
    module, x = made(name)
    before = copy.deepcopy(module.state_dict())
    channels = find_channels(module, x)
    for share in (0.3, 0.7):
        kept = some(channels, share)
        thin = narrow(module, channels, kept).train(train)
        module.train(train)
        wide = {n: v.detach().clone() for n, v in widen_params(state(thin), channels, kept).items()}
        torch.testing.assert_close(functional_call(module, wide, (x,)), thin(x), rtol=1e-9, atol=1e-9)
        assert all(torch.equal(a, b) for a, b in zip(module.state_dict().values(), before.values(), strict=True))


@pytest.mark.parametrize("name", NETWORKS)
def test_the_narrow_network_is_made_of_plain_smaller_layers(name: str) -> None:
    module, x = made(name)
    channels = find_channels(module, x)
    thin = narrow(module, channels, some(channels))
    for (path, old), (_, new) in zip(module.named_modules(), thin.named_modules(), strict=True):
        assert type(old) is type(new), path
        if isinstance(new, nn.Linear):
            rebuilt: nn.Module = nn.Linear(new.in_features, new.out_features, new.bias is not None)
        elif isinstance(new, nn.Conv1d | nn.Conv2d):
            rebuilt = type(new)(new.in_channels, new.out_channels, new.kernel_size, groups=new.groups)
        elif isinstance(new, nn.BatchNorm2d | nn.InstanceNorm2d):
            rebuilt = type(new)(new.num_features, affine=new.affine)
        elif isinstance(new, nn.GroupNorm):
            rebuilt = nn.GroupNorm(new.num_groups, new.num_channels)
        else:
            continue
        shapes = {n: t.shape for n, t in state(rebuilt).items() if n in state(new)}
        assert shapes == {n: t.shape for n, t in state(new).items()}, path
    loss = thin.train()(x).square().sum()
    loss.backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in thin.parameters())
    assert sum(p.numel() for p in thin.parameters()) < sum(p.numel() for p in module.parameters())


def test_spaces_of_a_residual_network() -> None:
    module, x = made("resnet18")
    channels = find_channels(module, x)
    # Each stage has its sum, and the hidden maps of its two blocks.
    assert channels.widths == (8, 8, 8, 16, 16, 16, 32, 32, 32, 64, 64, 64)
    writes = {name: channels.extents[name].axes[0] for name in channels.weights}
    stem = writes["stem.0.weight"][0].space
    assert {name for name, axis in writes.items() if axis and axis[0].space == stem} == {
        "stem.0.weight", "stages.0.0.body.3.weight", "stages.0.1.body.3.weight",
    }  # fmt: skip
    assert channels.extents["stem.0.weight"].axes[1] == ()
    assert channels.extents["head.weight"].axes[0] == ()
    assert channels.extents["stem.1.running_var"].absent == 1
    assert channels.whole == {"head": "they reach the network's outputs"}


def test_flattened_maps_and_depthwise_layers_have_blocks() -> None:
    channels = find_channels(*made("lenet5"))
    (segment,) = channels.extents["7.weight"].axes[1]
    assert (segment.width, segment.block) == (16, 4)
    channels = find_channels(*made("depthwise"))
    (segment,) = channels.extents["2.weight"].axes[0]
    assert (segment.width, segment.block) == (4, 2)
    thin = narrow(made("depthwise")[0], channels, {0: torch.tensor([1, 2, 3]), 1: torch.tensor([4])})
    assert isinstance(thin, nn.Sequential)
    assert repr(thin[2]) == "Conv2d(3, 6, kernel_size=(3, 3), stride=(1, 1), groups=3)"


def whole(run: Callable[..., Tensor], **parts: nn.Module | tuple[int, ...]) -> dict[str, str]:
    """Why the first of three linear layers keeps its outputs; the second's can be narrowed."""
    given = {"a": nn.Linear(4, 6), "b": nn.Linear(6, 8), "c": nn.Linear(8, 2)} | parts
    channels = find_channels(Custom(run, **given), torch.randn(3, 4))
    assert channels.widths == (8,)
    return channels.whole


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (lambda self, h: torch.softmax(h, 1), "softmax mixes them"),
        (lambda self, h: F.layer_norm(h, (6,)), "layer_norm needs all of them"),
        (lambda self, h: h.view(-1, 6), "view mixes them"),
        (lambda self, h: h[:, :3].repeat(1, 2), "getitem mixes them"),
        (lambda self, h: torch.cat(h.chunk(2, 1), 1), "chunk mixes them"),
        (lambda self, h: h.cumsum(1), "cumsum mixes them"),
        (lambda self, h: h * h.shape[1], "getattr_1 reads their number"),
        (lambda self, h: h / h.abs(), "truediv is not finite where a channel is zero"),
        (lambda self, h: h * self.scale, "mul needs all of them"),
        (lambda self, h: self.rms(h), "rms (Rms) mixes them"),
        (lambda self, h: self.group(h), "group (GroupNorm) mixes them"),
        (lambda self, h: self.linear(h), "linear (Own) has parameters that are not one number a channel"),
    ],
)
def test_steps_that_mix_channels_keep_them_whole(step: Callable[..., Tensor], why: str) -> None:
    class Own(nn.Linear):
        pass

    parts: dict[str, Any] = {"scale": (6,), "rms": Rms(6), "group": nn.GroupNorm(6 // 2, 6), "linear": Own(6, 6)}
    found = whole(lambda self, x: self.c(torch.relu(self.b(step(self, self.a(x))))), **parts)
    assert found["a"] == why


def test_layers_that_stay_whole_are_named() -> None:
    grouped = nn.Sequential(
        nn.Conv1d(2, 4, 1), nn.Conv1d(4, 4, 1, groups=2), nn.Conv1d(4, 6, 1), nn.Flatten(), nn.Linear(18, 1)
    )
    channels = find_channels(grouped, torch.randn(2, 2, 3))
    assert channels.widths == (6,)
    assert channels.whole["0"] == "1 reads them in 2 groups"
    assert channels.whole["1"] == "it reads inputs that stay whole in 2 groups"


def test_shared_weights_stay_whole() -> None:
    tied = mlp(4, 2, (4, 4, 6))
    tied[3].weight = tied[1].weight
    channels = find_channels(tied, torch.randn(2, 4))
    assert channels.weights == ("5.weight", "7.weight")
    assert channels.widths == (6,)
    shared = nn.Linear(6, 6)
    given = Custom(lambda self, x: self.d(self.c(self.s(self.s(self.a(x))))), a=nn.Linear(4, 6), s=shared, t=shared,
                   c=nn.Linear(6, 5), d=nn.Linear(5, 2))  # fmt: skip
    assert find_channels(given, torch.randn(3, 4)).whole["a"] == "s (Linear) has parameters that it shares"


@pytest.mark.parametrize(
    ("module", "x", "message"),
    [
        (nn.Linear(3, 2), torch.randn(2, 3), "Linear has no channels to remove \\(no hidden layer\\): use structure"),
        (nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1)), torch.randn(2, 3), "0: 1 .LayerNorm. needs"),
        (cnn_lstm(9, 2, 2, 2, 2), torch.ones(2, 9, dtype=torch.long), "cannot trace CNNLSTM .*control flow.*: use str"),
        (mlp(3, 2), torch.randn(2, 4), "Sequential, as traced by torch.fx, fails on these inputs .*shapes"),
    ],
)
def test_modules_without_channels_to_remove_are_refused(module: nn.Module, x: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_channels(module, x)


def test_a_weight_that_is_used_twice_is_refused() -> None:
    def run(self: Any, x: Tensor) -> Tensor:
        return F.linear(torch.relu(self.a(x)), self.a.weight.t())

    with pytest.raises(ValueError, match=r"Custom .*: use structure"):
        find_channels(Custom(run, a=nn.Linear(4, 6)), torch.randn(2, 4))


def test_values_go_to_the_narrow_network_and_back() -> None:
    module, x = made("dense_block")
    channels = find_channels(module, x)
    kept = some(channels)
    params = {name: p.detach() for name, p in module.named_parameters()}
    thin = narrow_params(params, channels, kept)
    assert all(torch.equal(thin[name], p) for name, p in narrow(module, channels, kept).named_parameters())
    wide = widen_params(thin, channels, kept)
    for name, index in kept_entries(channels, kept).items():
        if name in params:
            mask = torch.ones((), dtype=torch.bool)
            for axis, own in enumerate(index):
                n = params[name].shape[axis]
                there = torch.ones(n, dtype=torch.bool) if own is None else torch.isin(torch.arange(n), own)
                mask = mask[..., None] & there
            assert torch.equal(wide[name], torch.where(mask, params[name], 0))
    assert wide["head.bias"] is params["head.bias"]


@pytest.mark.parametrize("name", ["lenet5", "dense_block", "depthwise"])
def test_places_are_those_of_the_narrow_tensors(name: str) -> None:
    module, x = made(name)
    channels = find_channels(module, x)
    kept = some(channels)
    shapes = {"whole": (3, 2)} | {path: extent.shape for path, extent in channels.extents.items()}
    full = {path: normal(*shape) for path, shape in shapes.items()}
    flat, thin = (torch.cat([t.flatten() for t in own.values()]) for own in (full, narrow_params(full, channels, kept)))
    assert torch.equal(flat[entry_positions(kept_entries(channels, kept), shapes, x.device)], thin)


@pytest.mark.parametrize("bad", [[], [2, 1], [1, 1], [-1, 2], [3, 5]])
def test_a_choice_that_is_none_is_refused(bad: list[int]) -> None:
    channels = find_channels(mlp(3, 2, (5,)), torch.randn(2, 3))
    with pytest.raises(ValueError, match=r"kept\[0\].*at least one channel, in rising order, each below 5"):
        kept_entries(channels, {0: torch.tensor(bad, dtype=torch.long)})
    with pytest.raises(ValueError, match=r"kept has spaces \[0, 1\], the network has \[0\]"):
        kept_entries(channels, {0: torch.tensor([1]), 1: torch.tensor([1])})
