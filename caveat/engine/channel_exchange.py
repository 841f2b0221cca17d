"""Channels of a narrow network that is being trained, exchanged for others; and narrow networks from what was kept.

An update takes one pass, forward and back, of the wide network at the means: absent channels come with fresh incoming
weights and outgoing weights of zero, and those whose outgoing weights have the largest gradient are taken. Everything
else is as wide as the kept channels, and stays so: as many come as go.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from caveat.batches import Inputs
from caveat.engine.channel_choice import candidates, channel_scores, exchange_counts, growth_scores, swap
from caveat.engine.densities import replacement_rate
from caveat.engine.distributed import Ranks
from caveat.engine.narrowing import Channels, Index, Kept, narrow, places, scatter, shrink, slices
from caveat.engine.optimise import Moments
from caveat.engine.sparse_layers import Substitute, weight_name
from caveat.network import Network, Params

__all__ = ["ChannelExchange", "narrow_network", "of_slices", "stored_slices", "widened"]


@dataclass
class ChannelExchange:
    """Changes which channels a substitute's narrow network stands for."""

    network: Network  # the wide one
    substitute: Substitute  # of the narrow one
    channels: Channels
    kept: Kept
    keep_scores: Callable[[], Tensor]  # of all weights, flat; high for those to keep
    interval: int  # steps between updates
    initial: float  # share replaced at first
    stop: float  # share of training after which nothing is replaced
    steps: int  # of the whole training
    seed: int
    ranks: Ranks = field(default_factory=Ranks)
    replaced: int = 0  # channels so far
    updates: int = 0
    _wide: Params | None = None  # values to go on with, where an update is under way
    _new: Kept = field(default_factory=dict)

    def __post_init__(self) -> None:
        module, wide = self.substitute.network.module, self.network.module
        self._points, self._buffers = dict(module.named_parameters()), dict(module.named_buffers())
        self._own = dict(wide.named_parameters()) | dict(wide.named_buffers())
        self._fresh(0)  # what has no initial values to draw says so now

    def due(self, step: int) -> bool:
        """Whether channels are exchanged after this step, counted from 0."""
        progress = (step + 1) / self.steps
        return (step + 1) % self.interval == 0 and replacement_rate(progress, self.initial, self.stop) > 0

    @property
    def chosen(self) -> bool:
        """Whether it is chosen what goes after this step."""
        return self._wide is not None

    def look(self, step: int, mean: Tensor, x: Inputs, loss: Callable[[Tensor], Tensor]) -> None:
        """In a step after which it is time: choose what goes and what comes; `loss` is one of outputs."""
        share = replacement_rate((step + 1) / self.steps, self.initial, self.stop)
        drop = exchange_counts(self.channels, self.kept, share)
        if not any(drop.values()):
            return
        wide = candidates(self._thin(mean.detach()), self.channels, self.kept, self._fresh(step))
        gains = growth_scores(self.channels, wide, lambda params: loss(self.network(params, x, train=True)))
        self.ranks.add([*gains.values()])
        scores = self.substitute.layout.whole(self.keep_scores())
        keep = channel_scores(self.channels, self.kept, scores)
        self._wide, self._new = wide, swap(self.channels, self.kept, drop, keep, gains)

    def _thin(self, mean: Tensor) -> Params:
        """All values of the narrow network; buffers that have no channels are copied, as a pass writes into them."""
        wider, layout = self.channels.extents, self.substitute.layout
        thin = {name: p.detach() for name, p in self._points.items()} | layout.whole(mean)
        return thin | {name: b if name in wider else b.clone() for name, b in self._buffers.items()}

    def _fresh(self, step: int) -> Params:
        """Initial values of the wide network."""
        network = self.network.restricted(self.channels.extents)
        return self._own | network.fresh(torch.Generator().manual_seed(self.seed + step))

    @torch.no_grad()
    def finish(self, mean: Tensor, scales: dict[str, tuple[Tensor, Tensor]], moments: Moments) -> None:
        """After a step: exchange what was chosen.

        `mean` is flat and changed in place, as are the `scales`, which come with a value a layer for new weights.
        """
        assert self._wide is not None
        layout, wide, wider = self.substitute.layout, self._wide, self.channels.extents
        points = {name: p for name, p in self._points.items() if name in wider}
        buffers = {name: b for name, b in self._buffers.items() if name in wider}
        names = [*map(weight_name, layout.counts), *points, *buffers]
        before, now = self._places({name: tuple(wide[name].shape) for name in names}, mean.device)
        # What stays has moved since the look; of the wide values, which are older, only those that come are taken.
        come = torch.cat([wide[name].flatten() for name in names])[now]
        _carry([mean, *points.values(), *buffers.values()], before, come)
        states = [(t, moments(t)) for t in (mean, *points.values())]
        for i in range(max(len(own) for _, own in states)):
            _carry([own[i] if i < len(own) else torch.zeros_like(t) for t, own in states], before, 0.0)
        for flat, fills in scales.values():
            parts = [fill.expand(n) for fill, n in zip(fills.unbind(), layout.counts.values(), strict=True)]
            _carry([flat], before, torch.cat(parts).to(flat))
            for moment in moments(flat):
                _carry([moment], before, 0.0)
        self.replaced += sum(len({*self._new[s].tolist()} - {*own.tolist()}) for s, own in self.kept.items())
        self.updates += 1
        self.kept, self._wide, self._new = self._new, None, {}

    def _places(self, shapes: dict[str, tuple[int, ...]], device: torch.device) -> tuple[Tensor, Tensor]:
        """Of all that is exchanged, flat, where each value of the new choice was before (-1: nowhere) and is wide."""
        old, new = (places(slices(self.channels, k), shapes, device) for k in (self.kept, self._new))
        known = torch.full((sum(map(math.prod, shapes.values())),), -1, dtype=torch.int32, device=device)
        known[old] = torch.arange(len(old), dtype=torch.int32, device=device)
        return known[new].long(), new


def _carry(tensors: list[Tensor], before: Tensor, fresh: Tensor | float) -> None:
    """Have in tensors, flat and one after the other, what was at other places before; what is fresh where that is -1.

    They may be the first of those that `before` speaks of: no value moves from one tensor to another.
    """
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    own = before[: len(flat)]
    now = torch.where(own < 0, fresh, flat[own.clamp(min=0)]).split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_(tensors, [part.view(tensor.shape) for part, tensor in zip(now, tensors, strict=True)])


def narrow_network(network: Network, channels: Channels, kept: Kept) -> Network:
    """The network with the kept channels only."""
    return _with(network, narrow(network.module, channels, kept))


def stored_slices(channels: Channels, kept: Kept) -> Params:
    """Which entries of wide tensors there are, as a state keeps it: for each name and axis, int32."""
    index = slices(channels, kept)
    return {f"{n}/{axis}": own.int() for n, axes in index.items() for axis, own in enumerate(axes) if own is not None}


def _index(stored: Params) -> dict[str, Index]:
    found: dict[str, dict[int, Tensor]] = {}
    for key, own in stored.items():
        name, _, axis = key.rpartition("/")
        found.setdefault(name, {})[int(axis)] = own.long()
    return {name: tuple(axes.get(axis) for axis in range(max(axes) + 1)) for name, axes in found.items()}


def of_slices(network: Network, stored: Params) -> Network:
    """The narrow network that stored slices speak of."""
    return _with(network, shrink(network.module, _index(stored)))


def widened(params: Params, network: Network, stored: Params) -> Params:
    """Values of the wide network with which it computes what the narrow one does."""
    index = _index(stored)
    like = dict(network.module.named_parameters()) | dict(network.module.named_buffers())
    wide = {}
    for name, value in params.items():
        if name in index:
            absent = 1.0 if name.endswith("running_var") else 0.0
            value = scatter(value, index[name], value.new_full(like[name].shape, absent))
        wide[name] = value
    return wide


def _with(network: Network, module: nn.Module) -> Network:
    own = copy.copy(network)
    own.found, own.module = {}, module
    return own
