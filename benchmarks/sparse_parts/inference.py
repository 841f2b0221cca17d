"""Inference: networks at the mean weights of posteriors, by `caveat.deploy`, against the same function as a dense one.

That one is there in every layout tried (NCHW or channels last, BatchNorm folded or not, on a CPU oneDNN's own blocked
weights; with --mode both, by torch.compile too, which takes minutes more); ratios are to the fastest dense one. Stored
are the bytes of a network's state.
"""

import argparse
import copy
import functools
import importlib
from typing import Any

import torch
from torch import Tensor, nn

import caveat
from caveat.engine.variational import LayerState

from .cases import CHANNEL, SPARSE
from .fitted import Fitted
from .sizes import storage_bytes, table_bytes
from .tables import Table
from .timing import timed


def compare_inference(arguments: argparse.Namespace, fitted: Fitted, table: Table) -> None:
    """A row for every network and batch."""
    if len(fitted.posteriors) == 1:
        return  # of dense VI alone there is nothing to compare
    x = fitted.x
    networks = networks_at_means(fitted, arguments.mode != "eager")
    for batch in fitted.batches:
        last = x[:batch].contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x[:batch]
        calls = {name: functools.partial(network, last if "last" in name else x[:batch].clone())
                 for name, network in networks.items()}  # fmt: skip
        with torch.inference_mode():
            rows = timed(fitted.about | {"part": "inference", "batch": batch}, calls, arguments.rounds, fitted.clock)
        best = min(row["step_s"] for row in rows if row["way"].startswith("dense"))
        for row in rows:
            network = fitted.module if row["way"].startswith("dense") else networks[row["way"]]
            row |= {"times_faster": best / row["step_s"], "stored_bytes": storage_bytes(network.state_dict().values())}
            row["kernel_bytes"] = sum(table_bytes(getattr(layer, "pattern", None)) for layer in network.modules())
        table.keep(rows)


def networks_at_means(fitted: Fitted, compiled: bool) -> dict[str, nn.Module]:
    """Posteriors' networks, and the same function as a dense one in every layout."""
    posteriors, x = fitted.posteriors, fitted.x
    networks = {way: caveat.deploy(posterior) for way, posterior in posteriors.items() if way != "dense VI"}
    dense = copy.deepcopy(fitted.module).to(x.device).eval()
    for way in (way for way in networks if way in SPARSE):
        dense.load_state_dict(whole_weights(posteriors[way]), strict=False)  # zeros and all
        with torch.inference_mode():
            differ = float((networks[way](x[:8]) - dense(x[:8])).abs().max() / dense(x[:8]).abs().max())
        print(f"{way}: its network and the dense one differ by {differ:.0e}", flush=True)
    found = {f"dense, {name}": network for name, network in dense_layouts(dense, x.ndim == 4).items()} | networks
    if x.ndim == 4:
        found |= {f"{way}, channels last": copy.deepcopy(networks[way]) for way in networks if way in CHANNEL}
    return found | (compiled_ones(found, x.device) if compiled else {})


def whole_weights(posterior: Any) -> dict[str, Tensor]:
    """A dense network's values at a posterior's means."""
    state = LayerState.of(posterior.state)
    return state.rest | state.layout(posterior.network).whole(state.mean)


def dense_layouts(dense: nn.Module, images: bool) -> dict[str, nn.Module]:
    """A dense network as torch can lay it out for inference."""
    from torch.fx.experimental.optimization import fuse
    from torch.utils import mkldnn

    plain = {"NCHW": dense, "NCHW, folded": fuse(dense)} if images else {"plain": dense}
    last = {
        name.replace("NCHW", "channels last"): copy.deepcopy(network).to(memory_format=torch.channels_last)
        for name, network in plain.items()
        if images
    }
    if next(dense.parameters()).device.type != "cpu":
        return plain | last
    name = "oneDNN blocks, folded" if images else "oneDNN blocks"
    return plain | last | {name: Blocked(mkldnn.to_mkldnn(copy.deepcopy([*plain.values()][-1])))}


class Blocked(nn.Module):
    """A network in oneDNN's own layout; its inputs and outputs are ordinary tensors."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        outputs: Tensor = self.network(x.to_mkldnn())
        return outputs.to_dense() if outputs.is_mkldnn else outputs


def compiled_ones(networks: dict[str, nn.Module], device: torch.device) -> dict[str, nn.Module]:
    """By torch.compile, those that may be faster so."""
    cpu = device.type == "cpu"
    importlib.import_module("torch._dynamo.config").recompile_limit = 100  # one forward, of many networks
    importlib.import_module("torch._inductor.config").freezing = cpu  # weights laid out before
    mode = "default" if cpu else "reduce-overhead"
    left = {"dense, NCHW", "dense, channels last"}  # their BatchNorm is not folded
    left |= {*SPARSE} if cpu else set()  # a compiled pass leaves the native kernels alone
    return {f"{name}, compiled": torch.compile(network, dynamic=False, mode=mode) for name, network in networks.items()
            if name not in left and not isinstance(network, Blocked)}  # fmt: skip
