"""Channels of a narrow network that is being trained, exchanged for others.

An update takes one pass, forward and back, of the wide network at the means: absent channels come with fresh incoming
weights and outgoing weights of zero, and those whose outgoing weights have the largest gradient are taken. Everything
else is as wide as the kept channels, and stays so: as many come as go.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from caveat.batches import Inputs
from caveat.engine.channels.choice import candidate_values, channel_scores, exchange_counts, growth_scores, swap, unflat
from caveat.engine.channels.narrowing import Channels, KeptChannels, entry_positions, kept_entries
from caveat.engine.distributed import Ranks
from caveat.engine.sparse import Substitute, replacement_rate, weight_name
from caveat.engine.training import Moments
from caveat.fresh_weights import FreshWeights
from caveat.network import Network, Params

__all__ = ["ChannelExchange"]


@dataclass
class ChannelExchange:
    """Changes which channels a substitute's narrow network stands for."""

    network: Network  # the wide one
    substitute: Substitute  # of the narrow one
    channels: Channels
    kept: KeptChannels
    keep_scores: Callable[[], Tensor]  # of all weights, flat; high for those to keep
    interval: int  # steps between updates
    initial: float  # share replaced at first
    stop: float  # share of training after which nothing is replaced
    steps: int  # of the whole training
    seed: int
    ranks: Ranks = field(default_factory=Ranks)
    replaced: int = 0  # channels so far
    updates: int = 0
    _seen: "_Seen | None" = None  # where an update is under way

    def __post_init__(self) -> None:
        module, wide = self.substitute.network.module, self.network.module
        self._own = dict(wide.named_parameters()) | dict(wide.named_buffers())
        self._points = {name: p for name, p in module.named_parameters() if name in self._own}
        self._buffers = dict(module.named_buffers())
        self._fresh_weights = FreshWeights(self.network.restricted(self.channels.extents))
        self._fresh(0)  # what has no initial values to draw says so now

    def due(self, step: int) -> bool:
        """Whether channels are exchanged after this step, counted from 0."""
        progress = (step + 1) / self.steps
        return (step + 1) % self.interval == 0 and replacement_rate(progress, self.initial, self.stop) > 0

    @property
    def chosen(self) -> bool:
        """Whether there is a choice to make after this step."""
        return self._seen is not None

    def look(self, step: int, mean: Tensor, x: Inputs, loss: Callable[[Tensor], Tensor]) -> None:
        """In a step after which it is time: find out what a choice takes; `loss` is one of outputs.

        The choice is made after the step, which a device takes up meanwhile: nothing is waited for here.
        """
        share = replacement_rate((step + 1) / self.steps, self.initial, self.stop)
        drop = exchange_counts(self.channels, self.kept, share)
        if not any(drop.values()):
            return
        wide = candidate_values(self._thin(mean.detach()), self.channels, self.kept, self._fresh(step))
        gains = growth_scores(self.channels, wide, lambda p: loss(self.network(p, x, train=True)), self.ranks)
        self._seen = _Seen(wide, drop, gains, self.keep_scores())

    def _choice(self) -> KeptChannels:
        """What there is after the exchange."""
        assert self._seen is not None
        keep = channel_scores(self.channels, self.kept, self.substitute.layout.whole(self._seen.scores))
        return swap(self.channels, self.kept, self._seen.drop, keep, self._seen.gains)

    def _thin(self, mean: Tensor) -> Params:
        """All values of the narrow network; buffers that have no channels are copied, as a pass writes into them."""
        buffers = {name: b if name in self.channels.extents else b.clone() for name, b in self._buffers.items()}
        points = {name: p.detach() for name, p in self._points.items()}
        return points | self.substitute.layout.whole(mean) | buffers

    def _fresh(self, step: int) -> Params:
        """Initial values of the wide network."""
        return self._own | self._fresh_weights(torch.Generator().manual_seed(self.seed + step))

    @torch.no_grad()
    def finish(self, mean: Tensor, scales: dict[str, tuple[Tensor, Tensor]], moments: Moments) -> None:
        """After a step: choose what goes and what comes, and exchange it.

        `mean` is flat and changed in place, as are the `scales`, which come with a value a layer for new weights.
        """
        assert self._seen is not None
        layout, wide, wider, new = self.substitute.layout, self._seen.wide, self.channels.extents, self._choice()
        points = {name: p for name, p in self._points.items() if name in wider}
        buffers = {name: b for name, b in self._buffers.items() if name in wider}
        names = [*map(weight_name, layout.counts), *points, *buffers]
        before, now = self._places({name: tuple(wide[name].shape) for name in names}, new, mean.device)
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
        self.replaced += sum(self._seen.drop.values())
        self.updates += 1
        self.kept, self._seen = new, None

    def _places(
        self, shapes: dict[str, tuple[int, ...]], kept: KeptChannels, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Of all that is exchanged, flat, where each value of a new choice was before (-1: nowhere) and is wide."""
        old, new = (entry_positions(kept_entries(self.channels, k), shapes, device) for k in (self.kept, kept))
        known = torch.full((sum(map(math.prod, shapes.values())),), -1, dtype=torch.int32, device=device)
        known[old] = torch.arange(len(old), dtype=torch.int32, device=device)
        return known[new].long(), new


@dataclass(frozen=True)
class _Seen:
    """What was found out in a step, for the exchange after it."""

    wide: Params  # values to go on with
    drop: dict[int, int]  # how many channels of each space go
    gains: dict[int, Tensor]  # of each channel of a space, on the device
    scores: Tensor  # of all weights, flat; high for those to keep


def _carry(tensors: list[Tensor], before: Tensor, fresh: Tensor | float) -> None:
    """Have in tensors, flat and one after the other, what was at other places before; what is fresh where that is -1.

    They may be the first of those that `before` speaks of: no value moves from one tensor to another.
    """
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    own = before[: len(flat)]
    now = torch.where(own < 0, fresh, flat[own.clamp(min=0)])
    torch._foreach_copy_(tensors, unflat(now, [tensor.shape for tensor in tensors]))
