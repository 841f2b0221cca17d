"""BatchNorm statistics for weights that no training step has seen: one pass over the data in which they are averaged."""

import torch
from torch import nn
from torch.func import functional_call

from caveat.batches import move
from caveat.network import Network, Params
from caveat.task import Rows

__all__ = ["has_batchnorm", "refreshed_statistics"]


def _norms(network: Network) -> dict[str, nn.Module]:
    return {
        name: module
        for name, module in network.module.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats
    }


def has_batchnorm(network: Network) -> bool:
    """Whether the network keeps running statistics of its activations."""
    return bool(_norms(network))


def refreshed_statistics(network: Network, params: Params, rows: Rows) -> Params:
    """Running mean and variance of every BatchNorm layer at these weights, averaged over all rows.

    The layers alone are in training mode, with a cumulative average; dropout stays off.
    """
    norms = _norms(network)
    names = [f"{prefix}.{n}" if prefix else n for prefix, norm in norms.items() for n, _ in norm.named_buffers()]
    own = network.buffers()
    statistics = {name: torch.zeros_like(own[name]) for name in names}
    momentum = {name: norm.momentum for name, norm in norms.items()}
    network.module.eval()
    try:
        for norm in norms.values():
            norm.train()
            norm.momentum = None  # type: ignore[assignment]
        with torch.no_grad():
            for x, _ in rows.ordered(device=network.device):
                x = move(x, network.device)
                args, kwargs = (x, {}) if isinstance(x, tuple) else ((), x) if isinstance(x, dict) else ((x,), {})
                functional_call(network.module, params | statistics, args, kwargs)
    finally:
        for name, norm in norms.items():
            norm.momentum = momentum[name]  # type: ignore[assignment]
        network.module.eval()
    return statistics
