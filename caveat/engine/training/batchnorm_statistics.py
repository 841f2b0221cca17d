"""BatchNorm statistics for weights that no training step has seen, averaged over one pass through the data.

    mean = sum_b n_b mean_b / N,   variance = sum_b n_b variance_b / N        over batches b of n_b rows

As in training, the inputs of a layer come from layers that use the batch's own statistics.
"""

import torch
from torch.nn.modules.batchnorm import _NormBase

from caveat.network import Network, Params
from caveat.rows import Rows

__all__ = ["has_batchnorm", "refreshed_statistics", "statistic_names"]


def _norms(network: Network) -> dict[str, _NormBase]:
    modules = network.module.named_modules()
    return {name: module for name, module in modules if isinstance(module, _NormBase) and module.track_running_stats}


def has_batchnorm(network: Network) -> bool:
    """Whether the network keeps running statistics of its activations."""
    return bool(_norms(network))


def statistic_names(network: Network) -> list[str]:
    """The names of the running statistics among the network's buffers."""
    norms = _norms(network).items()
    return [f"{prefix}.{name}" if prefix else name for prefix, norm in norms for name, _ in norm.named_buffers()]


def refreshed_statistics(network: Network, params: Params, rows: Rows) -> Params:
    """The running mean and variance of every BatchNorm layer at these weights, averaged over all rows.

    Only the BatchNorm layers are in training mode; dropout stays off.
    """
    norms, names = _norms(network), statistic_names(network)
    buffers = network.buffers()
    statistics = {name: torch.zeros_like(buffers[name]) for name in names}
    momentum = {name: norm.momentum for name, norm in norms.items()}
    network.module.eval()
    # No batch is smaller than the loader's, because a batch of one row has no variance.
    batches = torch.arange(len(rows)).tensor_split(max(len(rows) // rows.batch_size, 1))
    seen = 0
    try:
        with torch.no_grad():
            for x, y in rows.batches(batches, network.device):
                seen += len(y)
                for norm in norms.values():
                    norm.train()
                    norm.momentum = len(y) / seen
                network(params | statistics, x)
    finally:
        for name, norm in norms.items():
            norm.momentum = momentum[name]
        network.module.eval()
    return statistics
