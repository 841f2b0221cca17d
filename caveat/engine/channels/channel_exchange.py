"""Channels of a narrow network that is being trained, exchanged for others.

An update takes one pass, forward and back, of the wide network at the means: absent channels come with fresh incoming
weights and outgoing weights of zero, and those whose outgoing weights have the largest gradient are taken. Everything
else is as wide as the kept channels, and stays so: as many come as go.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from caveat.batches import Inputs
from caveat.engine.channels.choice import candidate_values, channel_scores, exchange_counts, growth_scores, swap, unflat
from caveat.engine.channels.narrowing import Channels, KeptChannels, entry_positions, kept_entries
from caveat.engine.distributed import Ranks
from caveat.engine.fresh_weights import FreshWeights
from caveat.engine.sparse import ActiveWeights, Schedule, StepBatch, Substitute, weight_name
from caveat.engine.training import Moments
from caveat.network import Network, Params

__all__ = ["ChannelExchange"]


class ChannelExchange:
    """Changes which channels a substitute's narrow network stands for.

    Args:
        network: the wide network.
        substitute: of the narrow network.
        weights: all weights of the narrow network's layers, flat, which are exchanged in place.
        channels: the spaces of the wide network.
        kept: the channels of each space to begin with.
        keep_scores: gives a score of every weight, [size], high for those to keep.
        schedule: when channels are exchanged, and which share.
        new_std: standard deviation of weights that come; the mean of their layer's unless given.
        seed: of the weights of channels that come.
        ranks: over which gradients are added up.
    """

    rows_of_each_rank = 1

    def __init__(
        self,
        network: Network,
        substitute: Substitute,
        weights: ActiveWeights,
        channels: Channels,
        kept: KeptChannels,
        keep_scores: Callable[[], Tensor],
        schedule: Schedule,
        *,
        new_std: float | None = None,
        seed: int = 0,
        ranks: Ranks | None = None,
    ) -> None:
        self.network, self.substitute, self.weights, self.channels = network, substitute, weights, channels
        self.kept, self.keep_scores, self.schedule = kept, keep_scores, schedule
        self.new_std, self.seed, self.ranks = new_std, seed, ranks or Ranks()
        self.updates = self.replaced = 0  # exchanges so far, and the channels that came
        self.sums: Params = {}  # one batch is all that an exchange looks at
        self._state = {"exchanges": torch.zeros(2, dtype=torch.int64)}
        self._state |= {f"kept.{space}": chosen.clone() for space, chosen in kept.items()}
        self._findings: _Findings | None = None  # where an exchange is under way
        module, wide = substitute.network.module, network.module
        self._wide_values = dict(wide.named_parameters()) | dict(wide.named_buffers())
        self._points = {name: p for name, p in module.named_parameters() if name in self._wide_values}
        self._buffers = dict(module.named_buffers())
        self._fresh_weights = FreshWeights(network.restricted(channels.extents))
        self._fresh(0)  # what has no initial values to draw says so now

    def begin(self, step: int, batch: StepBatch) -> None:
        """In a step before an exchange: find out what the choice of channels depends on, at the batch's loss.

        The choice is made after the step, which a device takes up meanwhile: nothing is waited for here.
        """
        if not self.schedule.due(step):
            return
        drop = exchange_counts(self.channels, self.kept, self.schedule.rate(step))
        if not any(drop.values()):
            return
        narrow = self._narrow_values(self.weights.mean.detach())
        wide = candidate_values(narrow, self.channels, self.kept, self._fresh(step))
        gains = growth_scores(
            self.channels, wide, lambda params: batch.loss(self.network(params, batch.x, train=True)), self.ranks
        )
        self._findings = _Findings(wide, drop, gains, self.keep_scores())

    def _choice(self) -> KeptChannels:
        """The channels that there are after the exchange."""
        assert self._findings is not None
        keep = channel_scores(self.channels, self.kept, self.substitute.layout.whole(self._findings.scores))
        return swap(self.channels, self.kept, self._findings.drop, keep, self._findings.gains)

    def _narrow_values(self, mean: Tensor) -> Params:
        """All values of the narrow network; buffers that have no channels are copied, as a pass writes into them."""
        buffers = {name: b if name in self.channels.extents else b.clone() for name, b in self._buffers.items()}
        points = {name: p.detach() for name, p in self._points.items()}
        return points | self.substitute.layout.whole(mean) | buffers

    def _fresh(self, step: int) -> Params:
        """Initial values of the wide network."""
        return self._wide_values | self._fresh_weights(torch.Generator().manual_seed(self.seed + step))

    @torch.no_grad()
    def finish(self, moments: Moments) -> bool:
        """After a step: choose which channels go and come, and exchange them, where it is time."""
        if self._findings is None:
            return False
        mean, log_std, layout = self.weights.mean, self.weights.log_std, self.substitute.layout
        wide, extents, chosen = self._findings.wide, self.channels.extents, self._choice()
        points = {name: p for name, p in self._points.items() if name in extents}
        buffers = {name: b for name, b in self._buffers.items() if name in extents}
        names = [*map(weight_name, layout.counts), *points, *buffers]
        before, now = self._positions({name: tuple(wide[name].shape) for name in names}, chosen, mean.device)
        # What stays has moved since the look; of the wide values, which are older, only those that come are taken.
        come = torch.cat([wide[name].flatten() for name in names])[now]
        _rearrange([mean, *points.values(), *buffers.values()], before, come)
        states = [(t, moments(t)) for t in (mean, *points.values())]
        for i in range(max(len(stored) for _, stored in states)):
            _rearrange([stored[i] if i < len(stored) else torch.zeros_like(t) for t, stored in states], before, 0.0)
        if log_std is not None:
            fills = self.weights.new_log_std(layout, self.new_std)
            parts = [fill.expand(n) for fill, n in zip(fills.unbind(), layout.counts.values(), strict=True)]
            _rearrange([log_std], before, torch.cat(parts).to(log_std))
            for moment in moments(log_std):
                _rearrange([moment], before, 0.0)
        self.replaced += sum(self._findings.drop.values())
        self.updates += 1
        self.kept, self._findings = chosen, None
        self._state["exchanges"].copy_(torch.tensor([self.updates, self.replaced]))
        for space, channels in chosen.items():
            self._state[f"kept.{space}"].copy_(channels)
        return True

    def state(self) -> Params:
        """How many exchanges there were, of how many channels, and the channels of each space."""
        return self._state

    def take_up(self) -> None:
        """Go on with the channels that `state` has now."""
        self.updates, self.replaced = self._state["exchanges"].tolist()
        self.kept = {space: self._state[f"kept.{space}"].clone() for space in self.kept}

    def flops(self, network: Network, example: Inputs) -> None:
        """As many channels come as go: the numbers of weights stay."""
        return None

    def _positions(
        self, shapes: dict[str, tuple[int, ...]], kept: KeptChannels, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Of all that is exchanged, flat, where each value of a new choice was before (-1: nowhere) and is wide."""
        old, new = (entry_positions(kept_entries(self.channels, k), shapes, device) for k in (self.kept, kept))
        known = torch.full((sum(map(math.prod, shapes.values())),), -1, dtype=torch.int32, device=device)
        known[old] = torch.arange(len(old), dtype=torch.int32, device=device)
        return known[new].long(), new


@dataclass(frozen=True)
class _Findings:
    """What was found out in a step, for the exchange after it."""

    wide: Params  # values to go on with
    drop: dict[int, int]  # how many channels of each space go
    gains: dict[int, Tensor]  # of each channel of a space, on the device
    scores: Tensor  # of all weights, flat; high for those to keep


def _rearrange(tensors: list[Tensor], before: Tensor, fresh: Tensor | float) -> None:
    """Give every entry of these tensors the value that was at its former position, or `fresh` where that is -1.

    `before` [size] has the former positions in all exchanged tensors, flat and one after the other. `tensors` may be
    the first of them alone: no value moves from one tensor to another.
    """
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    positions = before[: len(flat)]
    now = torch.where(positions < 0, fresh, flat[positions.clamp(min=0)])
    torch._foreach_copy_(tensors, unflat(now, [tensor.shape for tensor in tensors]))
