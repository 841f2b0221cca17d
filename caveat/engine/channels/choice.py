"""Which channels a narrow network has: how many, which to start with, and which to exchange as training goes on.

A channel of a space goes with its incoming and outgoing weights. Keeping a share s of every space leaves about s^2 of
the weights, so a density d takes about sqrt(d) of the channels.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from caveat.engine.channels.narrowing import Axis, Channels, KeptChannels, entry_positions, kept_entries
from caveat.engine.distributed import Ranks
from caveat.network import Params

__all__ = [
    "candidate_values",
    "channel_density",
    "channel_scores",
    "exchange_counts",
    "growth_scores",
    "random_channels",
    "swap",
    "unflat",
]  # fmt: skip

Counts = dict[int, int]  # channels of each space
Scores = dict[int, Tensor]  # one a channel, for each space


def channel_density(channels: Channels, kept: KeptChannels, sizes: Mapping[str, int] | None = None) -> float:
    """The share of the weights that is left with these channels.

    Args:
        sizes: of the weights that count, by name, narrowed or not; unless given, all narrowed ones count
    """
    counts = {space: len(chosen) for space, chosen in kept.items()}
    return _weights(channels, counts, sizes) / _weights(channels, dict(enumerate(channels.widths)), sizes)


def random_channels(
    channels: Channels,
    density: float,
    rng: torch.Generator,
    multiple: int = 1,
    sizes: Mapping[str, int] | None = None,
) -> KeptChannels:
    """Random channels, the same share of every space and at least one, so that about `density` of the weights is left.

    The share is found by bisection; then spaces take the next count, in order, where that comes nearer.
    `channel_density`, with the same `sizes`, tells the density that was reached. Counts are multiples of `multiple`, or
    all channels of a space that has fewer.
    """
    if not 0 < density <= 1:
        raise ValueError(f"density={density} must be above 0 and at most 1")
    widths = dict(enumerate(channels.widths))
    aim = density * _weights(channels, widths, sizes)

    def at(share: float) -> Counts:
        steps = {space: max(1, round(share * width / multiple)) for space, width in widths.items()}
        return {space: min(multiple * steps[space], width) for space, width in widths.items()}

    low, high = 0.0, 1.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (low, middle) if _weights(channels, at(middle), sizes) >= aim else (middle, high)
    counts = at(low)
    for space, count in at(high).items():
        more = counts | {space: count}
        if abs(_weights(channels, more, sizes) - aim) < abs(_weights(channels, counts, sizes) - aim):
            counts = more
    return {s: torch.randperm(width, generator=rng)[: counts[s]].sort().values for s, width in widths.items()}


def exchange_counts(channels: Channels, kept: KeptChannels, share: float) -> Counts:
    """How many channels of each space to exchange: about a share, never all, and no more than there are absent ones."""
    if not 0 <= share < 1:
        raise ValueError(f"share={share} of the channels to exchange must be at least 0 and below 1")
    widths = channels.widths
    counts = {space: len(chosen) for space, chosen in kept.items()}
    return {space: min(round(share * n), n - 1, widths[space] - n) for space, n in counts.items()}


def swap(channels: Channels, kept: KeptChannels, drop: Counts, keep_scores: Scores, add_scores: Scores) -> KeptChannels:
    """The channels after an exchange of the `drop[space]` of lowest score for absent ones of highest score.

    Channels that go cannot come back at once: their growth score is that of a channel with its weights still on.

    Args:
        drop: for each space, as from `exchange_counts`; spaces that are not in it stay as they are
        keep_scores: one for each kept channel, [K]
        add_scores: one for each channel of the space, [width]; those of kept channels are not looked at
    """
    new = dict(kept)
    add_scores = dict(zip(add_scores, _on_host([*add_scores.values()]), strict=True))
    for space, n in drop.items():
        present, width = kept[space].numpy(), channels.widths[space]
        if not 0 <= n <= min(len(present), width - len(present)):
            raise ValueError(
                f"drop[{space}]={n}, but space {space} has {len(present)} channels to remove and "
                f"{width - len(present)} to add"
            )
        absent = np.delete(np.arange(width), present)
        keep, add = keep_scores[space].cpu().double().numpy(), add_scores[space].numpy()
        if keep.shape != present.shape or add.shape != (width,):
            raise ValueError(
                f"space {space} takes {len(present)} keep scores and {width} add scores, "
                f"got {list(keep.shape)} and {list(add.shape)}"
            )
        if np.isnan(keep).any() or np.isnan(add[absent]).any():
            raise ValueError(f"scores of space {space} are not numbers: the loss or the weights are not finite")
        stay = present[keep.argsort(stable=True)[n:]]
        come = absent[(-add[absent]).argsort(stable=True)[:n]]
        new[space] = torch.from_numpy(np.sort(np.concatenate([stay, come])))
    return new


def channel_scores(channels: Channels, kept: KeptChannels, scores: Params) -> Scores:
    """For each kept channel of a space, the mean score of its incoming and outgoing weights, [K].

    Args:
        scores: of the narrow network's weights, by name; weights that are not in it do not count
    """
    counts = {space: len(chosen) for space, chosen in kept.items()}
    axes = [
        (scores[name], dimension, axis)
        for name in channels.weights
        if name in scores
        for dimension, axis in enumerate(channels.extents[name].axes)
        if axis
    ]
    sums = _on_host([_sums(values, dimension) for values, dimension, _ in axes])
    total = {space: torch.zeros(n, dtype=torch.float64) for space, n in counts.items()}
    weights = dict.fromkeys(counts, 0)  # a channel's; all of a space have as many
    for (values, _, axis), along_axis in zip(axes, sums, strict=True):
        for space, part, block in _by_channel(along_axis, axis, counts):
            total[space] += part
            weights[space] += values.numel() // len(along_axis) * block
    return {space: total[space] / max(n, 1) for space, n in weights.items()}


@torch.no_grad()
def candidate_values(params: Params, channels: Channels, kept: KeptChannels, fresh: Params) -> Params:
    """Wide values in which every absent channel is as it would come in: fresh incoming weights, zero outgoing ones.

    Fresh weights are larger by the root of how many times fewer inputs are added up. The function is that of the narrow
    network: nothing reads an absent channel. Its own normalisation is fresh too. Narrowed again to a new choice of
    channels, they are the values to go on with after an exchange.

    Args:
        params: of the narrow network, with or without its buffers
        fresh: wide values of the same names, such as initial ones
    """
    # All tensors as one, since on a GPU most operations take longer to launch than to do.
    shapes = {name: channels.extents[name].shape for name in params if name in channels.extents}
    flat = torch.cat([fresh[name].flatten() for name in shapes])
    wide = dict(zip(shapes, unflat(flat, shapes.values()), strict=True))
    index = kept_entries(channels, kept)
    factors, like = [], {}  # of the columns of weights that read channels, and the shapes that they act in
    for name, shape in shapes.items():
        if _inputs(name, channels) and (inputs := index[name][1]) is not None:
            factors.append(np.zeros(shape[1]))
            factors[-1][inputs.numpy()] = (shape[1] / len(inputs)) ** 0.5
            like[name] = (shape[1], *[1] * (len(shape) - 2))
    if factors:
        moved = torch.from_numpy(np.concatenate(factors)).to(flat.dtype).to(flat.device, non_blocking=True)
        torch._foreach_mul_([wide[name] for name in like], unflat(moved, like.values()))
    flat[entry_positions(index, shapes, flat.device)] = torch.cat([params[name].flatten() for name in shapes])
    # .data counts the writes to itself alone: a pass writes into buffers, and keeps weights for its way back.
    return params | {name: value.data.to(params[name].dtype) for name, value in wide.items()}


def growth_scores(
    channels: Channels, params: Params, loss: Callable[[Params], Tensor], ranks: Ranks | None = None
) -> Scores:
    """For each channel of each space, the norm of the loss's gradient in its outgoing weights, [width].

    One pass forward and back through the wide network at the values of `candidates`. An absent channel's incoming
    weights must be fresh and its outgoing ones zero: with zero outgoing weights the network's function is the narrow
    one's, and the gradient in them, (gradient of what reads the channel) x (the channel's activity), is the first-order
    gain of switching the channel on. Were the incoming weights zero as well, so would be the activity, and with it
    every gradient.

    Args:
        params: wide values, as `candidates` makes them
        loss: of wide values; `network(params, x, train=True)` inside it normalises absent channels by the batch and
            forgets the statistics
        ranks: over which the gradients are added up
    """
    names = [name for name in channels.weights if _inputs(name, channels)]
    weights = {name: params[name].detach().requires_grad_() for name in names}
    with torch.enable_grad():
        gradients = torch.autograd.grad(loss(params | weights), [*weights.values()], allow_unused=True)
    known = {name: gradient for name, gradient in zip(names, gradients, strict=True) if gradient is not None}
    squares = [*known.values()]
    (ranks or Ranks()).add(squares)
    total = next(iter(params.values())).new_zeros(sum(channels.widths))
    by_space = dict(enumerate(total.split(channels.widths)))  # views
    if squares:
        torch._foreach_mul_(squares, squares)
    for name, squared in zip(known, squares, strict=True):
        for space, part, _ in _by_channel(_sums(squared, 1), _inputs(name, channels), dict(enumerate(channels.widths))):
            by_space[space] += part
    return dict(enumerate(total.sqrt().split(channels.widths)))


def unflat(flat: Tensor, shapes: Iterable[tuple[int, ...]]) -> list[Tensor]:
    """Views of a flat tensor: the tensors of these shapes that lie in it one after the other."""
    shapes = [*shapes]
    parts = flat.split([math.prod(shape) for shape in shapes])
    # A view of one axis would be a step for nothing.
    return [part if len(shape) == 1 else part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _inputs(name: str, channels: Channels) -> Axis:
    """The axis of the channels that a layer's weight reads; empty for any other parameter."""
    return channels.extents[name].axes[1] if name in channels.weights else ()


def _sums(values: Tensor, dimension: int) -> Tensor:
    """Sums over all dimensions but one, [n]."""
    return values.sum([d for d in range(values.ndim) if d != dimension])


def _by_channel(sums: Tensor, axis: Axis, counts: Counts) -> Iterator[tuple[int, Tensor, int]]:
    """For each space along an axis: the sum of each of its `counts` channels, [K], and how many entries one has."""
    entries = [(s.width if s.space is None else counts[s.space]) * s.block for s in axis]
    for segment, part in zip(axis, sums.split(entries) if len(axis) > 1 else (sums,), strict=True):
        if segment.space is not None:
            block = segment.block
            yield segment.space, part if block == 1 else part.view(-1, block).sum(1), block


def _on_host(parts: list[Tensor]) -> tuple[Tensor, ...]:
    """Tensors of one axis on the CPU in float64 (numpy knows no bfloat16); a device is waited for once."""
    return torch.cat(parts).cpu().double().split([len(part) for part in parts]) if parts else ()


def _weights(channels: Channels, counts: Counts, whole: Mapping[str, int] | None) -> int:
    """How many weights there are with `counts` channels; `whole` has the sizes of those that count."""
    total = 0
    for name in channels.weights if whole is None else whole:
        layout = channels.extents.get(name)
        if layout is None:
            assert whole is not None
            total += whole[name]
            continue
        sizes = [
            sum((s.width if s.space is None else counts[s.space]) * s.block for s in axis) if axis else n
            for axis, n in zip(layout.axes, layout.shape, strict=True)
        ]
        total += math.prod(sizes)
    return total
