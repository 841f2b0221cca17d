"""Units of a network that stay or go as one, by one number that multiplies what layers read of them.

    w_oi = z_{g(i)} v_oi,   z_g of a channel of a space, of an input of a linear layer, or the product of both

A channel (`engine.channels`) that is multiplied by zero wherever it is read reaches nothing, whatever normalisation or
residual connection lies between: it can be taken out of the network. Inputs of a linear layer that are no such channels
one to one (the network's own, or the positions of a flattened map) have numbers of their own; where one is zero, that
column of the weight is.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from caveat.batches import Inputs
from caveat.engine.channels import Channels, KeptChannels, find_channels, is_restorable
from caveat.engine.sparse import LayerGeometry, weight_name
from caveat.network import Network

__all__ = ["Units", "find_units"]


@dataclass(frozen=True)
class Units:
    """The units of a network, numbered: channels first, then inputs of linear layers."""

    channels: Channels | None  # None where no channel can be taken out
    spaces: dict[int, int]  # the spaces whose channels are units, and the number of their first one
    inputs: dict[str, int]  # linear layers whose inputs are units, and the number of their first one
    of_inputs: dict[str, Tensor]  # for each layer [inputs, n]: the units that multiply an input; `size` stands for none
    size: int  # how many units
    # How many units of each kind: by the layer that makes a space's channels, or that reads inputs.
    names: dict[str, int] = field(default_factory=dict)


def find_units(network: Network, layers: dict[str, LayerGeometry], example: Inputs) -> tuple[Units, str | None]:
    """The units of a network's layers, and why no channels are among them where that is so."""
    channels, why = _channels(network, example)
    spaces, inputs, of_inputs, names, size = {}, {}, {}, {}, 0
    if channels is not None:
        makers = _first_makers(channels)
        for space in _removable(network, layers, channels):
            spaces[space], names[makers[space]] = size, channels.widths[space]
            size += channels.widths[space]
        if not spaces:
            channels, why = None, "all channels are fixed, or read by layers that are no part of the fit"
    for name, geometry in layers.items():
        read = _units_read(name, channels, spaces)
        one_to_one = read is not None and bool((read >= 0).all()) and len(read.unique()) == len(read)
        if len(geometry.shape) == 2 and not one_to_one:
            single = size + torch.arange(geometry.shape[1])
            inputs[name], names[f"inputs of {name or 'the module'}"] = size, geometry.shape[1]
            size += geometry.shape[1]
            of_inputs[name] = single[:, None] if read is None else torch.stack([read, single], 1)
        elif read is not None and bool((read >= 0).any()):
            of_inputs[name] = read[:, None]
    if not of_inputs:
        raise ValueError(
            "the network has no units that could be pruned: no channel between two layers "
            f"({why or 'none was found'}), and no linear layer among those selected; VariationalDropout prunes single "
            "weights"
        )
    of_inputs = {name: torch.where(units < 0, size, units) for name, units in of_inputs.items()}
    return Units(channels, spaces, inputs, of_inputs, size, names), why


def _channels(network: Network, example: Inputs) -> tuple[Channels | None, str | None]:
    """The channels of a network; None, and why, where they cannot be taken out."""
    try:
        channels = find_channels(network.module, example)
    except ValueError as error:
        return None, str(error).partition(": use structure=")[0]
    half: KeptChannels = {space: torch.arange(width)[::2] for space, width in enumerate(channels.widths)}
    if not is_restorable(network, channels, half):
        return None, "a normalisation without parameters or statistics of its own cannot be told of fewer channels"
    return channels, None


def _first_makers(channels: Channels) -> dict[int, str]:
    """The name of each space: the first layer that computes its channels."""
    makers: dict[int, str] = {}
    for name in channels.weights:
        for segment in channels.extents[name].axes[0]:
            if segment.space is not None:
                makers.setdefault(segment.space, name.removesuffix(".weight"))
    return {space: makers.get(space, f"space {space}") for space in range(len(channels.widths))}


def _removable(network: Network, layers: dict[str, LayerGeometry], channels: Channels) -> list[int]:
    """The spaces that selected layers read and that depend on selected parameters alone."""
    parameters = dict(network.module.named_parameters())
    weights = {weight_name(name) for name in layers}
    read, fixed = set(), set()
    for name, extent in channels.extents.items():
        for dimension, axis in enumerate(extent.axes):
            inside = {segment.space for segment in axis if segment.space is not None}
            reads = name in channels.weights and dimension == 1
            if (name in parameters and name not in network.names) or (reads and name not in weights):
                fixed |= inside
            elif reads:
                read |= inside
    return sorted(read - fixed)


def _units_read(name: str, channels: Channels | None, spaces: dict[int, int]) -> Tensor | None:
    """For each input of a layer the unit of its channel, [inputs], -1 for none; None where it reads no channels."""
    extent = None if channels is None else channels.extents.get(weight_name(name))
    if extent is None or len(extent.axes) < 2 or not extent.axes[1]:
        return None
    parts = []
    for segment in extent.axes[1]:
        first = spaces.get(-1 if segment.space is None else segment.space)
        units = torch.full((segment.width,), -1) if first is None else first + torch.arange(segment.width)
        parts.append(units.repeat_interleave(segment.block))
    return torch.cat(parts)
