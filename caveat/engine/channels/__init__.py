"""Channels: which channels of a network can be removed together, the narrower network, and exchanges of channels.

    narrow W = W[rows of kept outputs, columns of kept inputs]      the same function as W with zeros elsewhere

    spaces             groups of channels that can only be removed together, found by tracing
    trial              whether a step acts on each channel alone, found by trying
    narrowing          tensors and modules with some of their channels, and the way back
    narrow_networks    narrow networks, and how a posterior stores which channels it has
    choice             how many channels, which to begin with, which to exchange
    channel_exchange   the exchange itself, while a narrow network is trained

Called by SSVI over channels, by the methods that prune units, and by MaskedBNN.
"""

from caveat.engine.channels.channel_exchange import ChannelExchange
from caveat.engine.channels.choice import channel_density, random_channels
from caveat.engine.channels.narrow_networks import is_restorable, narrow_network, sliced_network, stored_slices, widened
from caveat.engine.channels.narrowing import Channels, Index, KeptChannels, gather, kept_entries, narrow_params, scatter
from caveat.engine.channels.spaces import OUTPUTS, find_channels

__all__ = [
    "OUTPUTS",
    "ChannelExchange",
    "Channels",
    "Index",
    "KeptChannels",
    "channel_density",
    "find_channels",
    "gather",
    "is_restorable",
    "kept_entries",
    "narrow_network",
    "narrow_params",
    "random_channels",
    "scatter",
    "sliced_network",
    "stored_slices",
    "widened",
]
