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
from caveat.engine.channels import Channels, KeptChannels, find_channels, narrow_network, sliced_network, stored_slices
from caveat.engine.sparse import LayerGeometry, WeightLayout, weight_name
from caveat.engine.variational.multiplicative_noise import lognormal_log_moment, lognormal_of
from caveat.network import Network, Params
from caveat.randomness import normals

__all__ = ["Units", "drawn", "expected", "factors_of", "find_units", "kept_of", "scaled"]


@dataclass(frozen=True)
class Units:
    """What is multiplied by what."""

    channels: Channels | None  # None where no channel can be taken out
    spaces: dict[int, int]  # the spaces whose channels are groups, and where theirs begin
    inputs: dict[str, int]  # linear layers with groups of their own, and where theirs begin
    of: dict[str, Tensor]  # for each layer [inputs, n]: the groups that multiply an input; `size` stands for none
    size: int  # how many groups
    names: dict[str, int] = field(default_factory=dict)  # of spaces (by the layer that makes one) and layers: how many


def find_units(network: Network, layers: dict[str, LayerGeometry], example: Inputs) -> tuple[Units, str | None]:
    """The groups of a network's layers, and why no channels are among them where that is so."""
    channels, why = _channels(network, layers, example)
    spaces, inputs, of, names, size = {}, {}, {}, {}, 0
    if channels is not None:
        made_by = _makers(channels)
        for space in _removable(network, layers, channels):
            spaces[space], names[made_by[space]] = size, channels.widths[space]
            size += channels.widths[space]
        if not spaces:
            channels, why = None, "all channels are fixed, or read by layers that are no part of the fit"
    for name, geometry in layers.items():
        own = _read(name, channels, spaces)
        alone = own is not None and bool((own >= 0).all()) and len(own.unique()) == len(own)
        if len(geometry.shape) == 2 and not alone:
            mine = size + torch.arange(geometry.shape[1])
            inputs[name], names[f"inputs of {name or 'the module'}"] = size, geometry.shape[1]
            size += geometry.shape[1]
            of[name] = mine[:, None] if own is None else torch.stack([own, mine], 1)
        elif own is not None and bool((own >= 0).any()):
            of[name] = own[:, None]
    if not of:
        raise ValueError(
            "the network has no units that could be pruned: no channel between two layers "
            f"({why or 'none was found'}), and no linear layer among those selected; VariationalDropout prunes single "
            "weights"
        )
    of = {name: torch.where(own < 0, size, own) for name, own in of.items()}
    return Units(channels, spaces, inputs, of, size, names), why


def _channels(
    network: Network, layers: dict[str, LayerGeometry], example: Inputs
) -> tuple[Channels | None, str | None]:
    try:
        channels = find_channels(network.module, example)
    except ValueError as error:
        return None, str(error).partition(": use structure=")[0]
    half: KeptChannels = {space: torch.arange(width)[::2] for space, width in enumerate(channels.widths)}
    narrow = narrow_network(network, channels, half)
    if repr(narrow.module) != repr(sliced_network(network, stored_slices(channels, half)).module):
        return None, "a normalisation without parameters or statistics of its own cannot be told of fewer channels"
    return channels, None


def _makers(channels: Channels) -> dict[int, str]:
    """For each space the first layer whose outputs it is."""
    found: dict[int, str] = {}
    for name in channels.weights:
        for segment in channels.extents[name].axes[0]:
            if segment.space is not None:
                found.setdefault(segment.space, name.removesuffix(".weight"))
    return {space: found.get(space, f"space {space}") for space in range(len(channels.widths))}


def _removable(network: Network, layers: dict[str, LayerGeometry], channels: Channels) -> list[int]:
    """The spaces of selected parameters alone that selected layers read."""
    own = dict(network.module.named_parameters())
    weights = {weight_name(name) for name in layers}
    found, fixed = set(), set()
    for name, extent in channels.extents.items():
        for dimension, axis in enumerate(extent.axes):
            inside = {segment.space for segment in axis if segment.space is not None}
            reads = name in channels.weights and dimension == 1
            if (name in own and name not in network.names) or (reads and name not in weights):
                fixed |= inside
            elif reads:
                found |= inside
    return sorted(found - fixed)


def _read(name: str, channels: Channels | None, spaces: dict[int, int]) -> Tensor | None:
    """For each input of a layer the group of its channel, -1 for none; None where it reads no channels."""
    extent = None if channels is None else channels.extents.get(weight_name(name))
    if extent is None or len(extent.axes) < 2 or not extent.axes[1]:
        return None
    parts = []
    for segment in extent.axes[1]:
        first = spaces.get(-1 if segment.space is None else segment.space)
        own = torch.full((segment.width,), -1) if first is None else first + torch.arange(segment.width)
        parts.append(own.repeat_interleave(segment.block))
    return torch.cat(parts)


def kept_of(noise: Params) -> dict[str, Tensor]:
    """What multiplies what, as a state has it: for each layer, under "of/<layer>", the groups of its inputs."""
    return {name.removeprefix("of/"): own for name, own in noise.items() if name.startswith("of/")}


def factors_of(z: Tensor, of: dict[str, Tensor]) -> dict[str, Tensor]:
    """For each layer the numbers [..., inputs], of one for each group [..., size]."""
    padded = torch.cat([z, z.new_ones((*z.shape[:-1], 1))], -1)
    return {name: padded[..., own.to(z.device).long()].prod(-1) for name, own in of.items()}


def scaled(values: Tensor, layout: WeightLayout, factors: dict[str, Tensor]) -> Tensor:
    """Flat weights, each multiplied by the factor [inputs] of its input."""
    indices, parts = layout.indices_of(), []
    for name, part in layout.split(values):
        if name in factors:
            shape, own = layout.geometries[name].shape, indices[name]
            factor = factors[name].to(part)
            if own is None:
                part = (part.view(shape) * factor.view(1, -1, *[1] * (len(shape) - 2))).flatten()
            else:
                kernel = int(torch.Size(shape[2:]).numel())
                part = part * factor[own.long() // kernel % shape[1]]
        parts.append(part)
    return torch.cat(parts)


def expected(noise: Params) -> Tensor:
    """The mean of each group's number, as a state has them: Gaussian, or a truncated log-normal."""
    if "location" in noise:
        return lognormal_log_moment(noise["location"], noise["log_scale"], 1).exp()
    return noise["mean"]


def drawn(noise: Params, rng: torch.Generator) -> Tensor:
    """A draw of each group's number."""
    if "location" in noise:
        uniform = torch.rand(noise["location"].shape, generator=rng, dtype=torch.float64)
        return lognormal_of(noise["location"], noise["log_scale"], uniform.to(noise["location"].device))
    mean = noise["mean"]
    normal = normals(mean.shape, rng, mean)
    return torch.addcmul(mean, noise["log_std"].exp(), normal)
