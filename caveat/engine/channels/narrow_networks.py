"""Narrow networks: a network with some of its channels, and how a posterior stores which ones."""

from torch import Tensor

from caveat.engine.channels.narrowing import Channels, Index, KeptChannels, kept_entries, narrow, scatter, shrink
from caveat.network import Network, Params

__all__ = ["is_restorable", "narrow_network", "sliced_network", "stored_slices", "widened"]


def narrow_network(network: Network, channels: Channels, kept: KeptChannels) -> Network:
    """The network with the kept channels only."""
    return network.with_module(narrow(network.module, channels, kept))


def stored_slices(channels: Channels, kept: KeptChannels) -> Params:
    """The kept entries of every wide tensor, as a state stores them: int32, under "<name>/<axis>"."""
    index = kept_entries(channels, kept)
    return {
        f"{name}/{axis}": entries.int()
        for name, axes in index.items()
        for axis, entries in enumerate(axes)
        if entries is not None
    }


def _index(stored: Params) -> dict[str, Index]:
    """What `stored_slices` stored, for each name and axis."""
    by_name: dict[str, dict[int, Tensor]] = {}
    for key, entries in stored.items():
        name, _, axis = key.rpartition("/")
        by_name.setdefault(name, {})[int(axis)] = entries.long()
    return {name: tuple(axes.get(axis) for axis in range(max(axes) + 1)) for name, axes in by_name.items()}


def sliced_network(network: Network, stored: Params) -> Network:
    """The narrow network that slices were stored of."""
    return network.with_module(shrink(network.module, _index(stored)))


def is_restorable(network: Network, channels: Channels, kept: KeptChannels) -> bool:
    """Whether stored slices make the narrow network again.

    They do not where a normalisation has no parameters or statistics of its own that would tell its number of channels.
    """
    narrow, restored = narrow_network(network, channels, kept), sliced_network(network, stored_slices(channels, kept))
    return repr(narrow.module) == repr(restored.module)


def widened(params: Params, network: Network, stored: Params) -> Params:
    """Values with which the wide network computes what the narrow one does with `params`."""
    index = _index(stored)
    like = dict(network.module.named_parameters()) | dict(network.module.named_buffers())
    wide = {}
    for name, value in params.items():
        if name in index:
            absent = 1.0 if name.endswith("running_var") else 0.0
            value = scatter(value, index[name], value.new_full(like[name].shape, absent))
        wide[name] = value
    return wide
