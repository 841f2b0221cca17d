"""Channels of a narrow network that is being trained, exchanged for others; and narrow networks from what was kept.

An update takes one pass, forward and back, of the wide network at the means: absent channels come with fresh incoming
weights and outgoing weights of zero, and those whose outgoing weights have the largest gradient are taken. Everything
else is as wide as the kept channels, and stays so: as many come as go.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from caveat.batches import Inputs
from caveat.engine.channel_choice import candidates, channel_scores, exchange_counts, growth_scores, swap
from caveat.engine.densities import replacement_rate
from caveat.engine.distributed import Ranks
from caveat.engine.narrowing import Channels, Index, Kept, carry, narrow, narrow_params, scatter, shrink, slices
from caveat.engine.optimise import Moments
from caveat.engine.sparse_layers import Layout, Substitute
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
        thin = self._thin(mean.detach())
        for name, buffer in self.substitute.network.module.named_buffers():
            thin[name] = buffer.clone()  # which the look would write into
        wide = candidates(thin, self.channels, self.kept, self._fresh(step))
        gains = growth_scores(self.channels, wide, lambda params: loss(self.network(params, x, train=True)))
        self.ranks.add([*gains.values()])
        scores = self.substitute.layout.whole(self.keep_scores())
        keep = channel_scores(self.channels, self.kept, scores)
        self._wide, self._new = wide, swap(self.channels, self.kept, drop, keep, gains)

    def _thin(self, mean: Tensor) -> Params:
        """All values of the narrow network."""
        module = self.substitute.network.module
        rest = dict(module.named_parameters()) | dict(module.named_buffers())
        return {name: value.detach() for name, value in rest.items()} | self.substitute.layout.whole(mean)

    def _fresh(self, step: int) -> Params:
        """Initial values of the wide network, wider where fewer inputs are added up."""
        network = self.network.restricted(self.channels.extents)
        fresh = self.network.buffers() | network.fresh(torch.Generator().manual_seed(self.seed + step))
        index = slices(self.channels, self.kept)
        for name in self.channels.weights:
            inputs = index[name][1] if len(index[name]) > 1 else None
            if inputs is not None:
                fresh[name] = fresh[name] * (fresh[name].shape[1] / len(inputs)) ** 0.5
        own = {name: p.detach() for name, p in self.network.module.named_parameters()}
        return own | fresh

    def finish(self, mean: Tensor, scales: dict[str, tuple[Tensor, Tensor]], moments: Moments) -> None:
        """After a step: exchange what was chosen.

        `mean` is flat and changed in place, as are the `scales`, which come with a value a layer for new weights.
        """
        assert self._wide is not None
        old, new = slices(self.channels, self.kept), slices(self.channels, self._new)
        thin, layout = self._thin(mean), self.substitute.layout
        # What has moved since the look stays: the wide values are those of before the step.
        here = slices(self.channels, self.kept, mean.device)
        wide = {n: scatter(v, here[n], self._wide[n]) if n in here else self._wide[n] for n, v in thin.items()}
        values = narrow_params(wide, self.channels, self._new)
        with torch.no_grad():
            before = _places(layout, old, new, mean.device)
            counts = torch.tensor([*layout.counts.values()], device=mean.device)
            nothing = mean.new_zeros(len(counts))
            kept = [(m, nothing) for t in (mean, *(s for s, _ in scales.values())) for m in moments(t)]
            for flat, fills in (*kept, *scales.values()):
                fill = fills.repeat_interleave(counts, output_size=layout.size).to(flat)
                flat.copy_(torch.where(before < 0, fill, flat[before.clamp(min=0)]))
            mean.copy_(layout.gathered({name: values[f"{name}.weight"] for name in layout.counts}))
            module = self.substitute.network.module
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                if name in old:
                    tensor.copy_(values[name])
                    for moment in moments(tensor):
                        moment.copy_(carry(moment, old[name], new[name], torch.zeros_like(moment)))
        self.replaced += sum(int((~torch.isin(self._new[s], own)).sum()) for s, own in self.kept.items())
        self.updates += 1
        self.kept, self._wide, self._new = self._new, None, {}


def _places(layout: Layout, old: dict[str, Index], new: dict[str, Index], device: torch.device) -> Tensor:
    """Where in a flat tensor each weight of a new choice of channels was before, [size]; -1 for those that are new."""
    parts = []
    for name, part in layout.split(torch.arange(layout.size, device=device)):
        index = f"{name}.weight"
        if index in old:
            value = part.view(layout.geometries[name].shape)
            part = carry(value, old[index], new[index], torch.full_like(value, -1)).flatten()
        parts.append(part)
    return torch.cat(parts)


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
