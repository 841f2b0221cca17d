"""A network with some of its channels removed, as a narrower network, and the way between the two.

    narrow W = W[rows of kept outputs, columns of kept inputs],      wide W = zero but for those entries

A removed channel has no outgoing weights in the wide network, so what it computes there reaches nothing: the wide and
the narrow network are one function. Channels that are added to each other or normalised together form a *space* and
are kept or removed together; `find_channels` finds the spaces of a module.
"""

import copy
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from caveat.network import Params

__all__ = [
    "SIZES",
    "Axis",
    "Channels",
    "Extent",
    "Index",
    "KeptChannels",
    "Segment",
    "axis_entries",
    "entry_positions",
    "gather",
    "kept_entries",
    "narrow",
    "narrow_params",
    "resize",
    "scatter",
    "shrink",
    "widen_params",
]  # fmt: skip

KeptChannels = dict[int, Tensor]  # for each space, the kept channels: sorted, int64, on the CPU
SIZES = ("num_features", "num_channels", "num_groups", "num_parameters")  # torch's names for a number of channels
Index = tuple[Tensor | None, ...]  # for each axis of a parameter, the kept entries; None for all of them


@dataclass(frozen=True)
class Segment:
    """A run of entries along an axis: `block` side by side for each channel of a space.

    A block is longer than one where a map was flattened (its positions) or a depthwise convolution makes several
    channels of one.
    """

    space: int | None  # None where no channel can be removed
    width: int  # channels, all of them
    block: int = 1


Axis = tuple[Segment, ...]  # segments in a row, as concatenation makes them; () where an axis knows no channels


@dataclass(frozen=True)
class Extent:
    """Which channels the axes of a parameter or buffer run over."""

    shape: tuple[int, ...]
    axes: tuple[Axis, ...]
    absent: float = 0.0  # the value for a channel that is not there


@dataclass(frozen=True)
class Channels:
    """The spaces of a module that can be narrowed, and what depends on them."""

    widths: tuple[int, ...]  # of each space
    extents: dict[str, Extent]  # of each parameter and buffer that becomes smaller
    weights: tuple[str, ...]  # those that are weights of linear and convolutional layers: axes are outputs, inputs, ...
    norms: dict[str, Axis]  # modules that act on each channel alone and know how many there are
    whole: dict[str, str]  # layers whose outputs cannot be narrowed, and why


def axis_entries(axis: Axis, kept: KeptChannels) -> Tensor:
    """The entries along an axis that belong to kept channels, [K]."""
    parts, start = [], 0
    for segment in axis:
        entries = torch.arange(segment.width) if segment.space is None else kept[segment.space].cpu()
        if segment.block > 1:
            entries = (entries[:, None] * segment.block + torch.arange(segment.block)).flatten()
        parts.append(entries + start if start else entries)
        start += segment.width * segment.block
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def kept_entries(channels: Channels, kept: KeptChannels, device: torch.device | str = "cpu") -> dict[str, Index]:
    """For each parameter and buffer that becomes smaller, the entries along each axis that stay."""
    if set(kept) != set(range(len(channels.widths))):
        raise ValueError(f"kept has spaces {sorted(kept)}, the network has {list(range(len(channels.widths)))}")
    for space, chosen in kept.items():
        width, given = channels.widths[space], chosen.tolist()
        if not given or given != sorted({*given}) or given[0] < 0 or given[-1] >= width:
            raise ValueError(f"kept[{space}]={given} must be at least one channel, in rising order, each below {width}")
    axes = {axis for layout in channels.extents.values() for axis in layout.axes if axis}
    entries = {axis: axis_entries(axis, kept).to(device) for axis in axes}  # many tensors share one
    return {name: tuple(entries.get(axis) for axis in layout.axes) for name, layout in channels.extents.items()}


def gather(values: Tensor, index: Index) -> Tensor:
    """The entries of a wide tensor that are kept."""
    for axis, entries in enumerate(index):
        if entries is not None:
            values = values.index_select(axis, entries.to(values.device))
    return values


def entry_positions(index: dict[str, Index], shapes: dict[str, tuple[int, ...]], device: torch.device) -> Tensor:
    """Positions of kept entries in wide tensors of these names and shapes, flat and one after the other, [size].

    An entry is where its row (along the first axis) begins, and then where it is inside a row. Rows are few and gone
    through in numpy; all entries are found at once on the device, which takes longer to begin a step than to do it.
    """
    shared = {id(entries): entries for axes in index.values() for entries in axes if entries is not None}
    arrays = {key: entries.numpy() for key, entries in shared.items()}
    begins, insides, start = [], [], 0
    for name, shape in shapes.items():
        first, *rest = (*(arrays.get(id(entries)) for entries in index.get(name, ())), None)
        row = math.prod(shape[1:])
        inside = np.arange(row).reshape(shape[1:])
        for axis, entries in enumerate(rest):
            inside = inside if entries is None else inside.take(entries, axis)
        begins.append(start + row * (np.arange(shape[0]) if first is None else first))
        insides.append(inside.ravel())
        start += row * shape[0]
    rows_of_each, widths = np.array([*map(len, begins)]), np.array([*map(len, insides)])
    length = widths.repeat(rows_of_each)  # of each row
    shift = (widths.cumsum() - widths).repeat(rows_of_each) - (length.cumsum() - length)  # from an entry to its inside
    table = torch.from_numpy(np.concatenate([*begins, length, shift, *insides])).to(device, non_blocking=True)
    n, size = len(length), int(length.sum())
    starts, lengths, shifts, within = table.split([n, n, n, len(table) - 3 * n])
    row_of = torch.arange(n, device=device).repeat_interleave(lengths, output_size=size)
    return starts[row_of] + within[shifts[row_of] + torch.arange(size, device=device)]


def scatter(values: Tensor, index: Index, into: Tensor) -> Tensor:
    """A copy of the wide tensor `into` with these values at its kept entries."""
    return into.index_put(_mesh(index, values), values)


def narrow_params(params: Params, channels: Channels, kept: KeptChannels) -> Params:
    """The narrow network's values from those of the wide one; tensors without channels are passed on as they are."""
    index = kept_entries(channels, kept, next((value.device for value in params.values()), "cpu"))
    return {name: gather(value, index[name]) if name in index else value for name, value in params.items()}


def widen_params(params: Params, channels: Channels, kept: KeptChannels) -> Params:
    """Values for the wide network with which it computes what the narrow one does with `params`.

    Removed channels get zeros, and a running variance of one.
    """
    index, wide = kept_entries(channels, kept), {}
    for name, value in params.items():
        layout = channels.extents.get(name)
        if layout is not None:
            value = scatter(value, index[name], value.new_full(layout.shape, layout.absent))
        wide[name] = value
    return wide


def narrow(module: nn.Module, channels: Channels, kept: KeptChannels) -> nn.Module:
    """A narrower copy of a module: plain layers of smaller sizes, with the kept channels' values."""
    result = shrink(module, kept_entries(channels, kept))
    for name, axis in channels.norms.items():
        resize(result.get_submodule(name), sum(s.width * s.block for s in axis), len(axis_entries(axis, kept)))
    return result


def shrink(module: nn.Module, index: dict[str, Index]) -> nn.Module:
    """A copy of a module with some entries of its tensors; layers and norms that own one are told their new size."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    # The copy is told that these tensors are copied already: the wide ones are never written twice.
    memo = {id(tensors[name]): _cut(tensors[name], entries) for name, entries in index.items()}
    result: nn.Module = copy.deepcopy(module, memo)
    for name, entries in index.items():
        owner = result.get_submodule(name.rpartition(".")[0])
        if isinstance(owner, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            if name.endswith("weight"):
                _resize_layer(owner)
        elif entries[0] is not None:
            resize(owner, len(tensors[name]), len(entries[0]))
    return result


def resize(norm: nn.Module, before: int, now: int) -> None:
    """Tell a module that acts on each channel alone how many there are now."""
    for name in SIZES:
        if getattr(norm, name, None) == before:
            setattr(norm, name, now)


def _resize_layer(layer: nn.Module) -> None:
    assert isinstance(layer.weight, Tensor)
    outputs, inputs = layer.weight.shape[:2]
    if isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = outputs, inputs
    elif isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        if layer.groups > 1:  # depthwise: as many groups as inputs
            layer.groups = outputs * layer.in_channels // layer.out_channels
        layer.out_channels, layer.in_channels = outputs, inputs * layer.groups


def _cut(tensor: Tensor, index: Index) -> Tensor:
    values = gather(tensor.detach(), index)
    return nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values


def _mesh(index: Index, like: Tensor) -> tuple[Tensor, ...]:
    """Index tensors that pick the product of each axis's entries; axes after the last that is cut need none."""
    n = 1 + max((axis for axis, entries in enumerate(index) if entries is not None), default=0)
    everything = [torch.arange(size, device=like.device) for size in like.shape[:n]]
    pairs = zip(everything, index[:n], strict=True)
    parts = [of_axis if entries is None else entries.to(like.device) for of_axis, entries in pairs]
    return tuple(part.view(-1, *[1] * (n - 1 - axis)) for axis, part in enumerate(parts))
