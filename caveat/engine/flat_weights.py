"""A network's selected parameters as one flat vector, [n], in the order of `network.names`."""

import torch
from torch import Tensor

from caveat.network import Network, Params

__all__ = ["flat", "flat_places", "moved"]


def flat_places(network: Network) -> dict[str, slice]:
    """Where each parameter lies in the flat vector."""
    places, before = {}, 0
    parameters = dict(network.module.named_parameters())
    for name in network.names:
        places[name] = slice(before, before + parameters[name].numel())
        before += parameters[name].numel()
    return places


def flat(network: Network, params: Params) -> Tensor:
    """The selected parameters among `params`, one after the other, [n]."""
    return torch.cat([params[name].flatten() for name in network.names])


def moved(network: Network, params: Params, delta: Tensor) -> Params:
    """`params` with delta [n] added to the selected ones."""
    places = flat_places(network)
    return params | {name: params[name] + delta[place].reshape(params[name].shape) for name, place in places.items()}
