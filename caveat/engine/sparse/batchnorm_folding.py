"""BatchNorm that follows a linear or convolutional layer becomes part of that layer's weights, for inference.

    s (W x + b - m) + t = (s W) x + s (b - m) + t,        s = gamma / sqrt(v + eps),  t = beta

with running mean m and variance v. One pass over the activations less for each; the weights that are zero stay zero.
"""

import copy
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from caveat.engine.sparse.kernels import LayerGeometry
from caveat.engine.sparse.substitute import SparseLayer

__all__ = ["Folded", "folded"]

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)


@dataclass(frozen=True)
class Folded:
    """A module for inference."""

    module: nn.Module  # a copy; the module itself where nothing was folded
    norms: tuple[str, ...]  # names of the BatchNorm layers that are part of other layers now
    reason: str | None = None  # why nothing could be looked at


def folded(module: nn.Module) -> Folded:
    """A copy of a module in eval mode, with every BatchNorm folded that alone reads a layer with point weights."""
    try:
        graph = _Tracer().trace(module)
    except Exception as error:  # whatever the module's own code raises when it is given no numbers
        first = str(error).partition("\n")[0]
        return Folded(module, (), f"torch.fx cannot trace {type(module).__name__} ({type(error).__name__}: {first})")
    pairs = _pairs(module, graph)
    if not pairs:
        return Folded(module, ())
    private = _copy(module)
    for layer, norm in pairs.items():
        _fold(private.get_submodule(layer), private.get_submodule(norm))
        dimensions = len(_geometry(private.get_submodule(layer)).shape)
        parent, _, child = norm.rpartition(".")
        setattr(private.get_submodule(parent), child, _FoldedNorm(dimensions))
    return Folded(private, tuple(pairs.values()))


class _Tracer(fx.Tracer):
    """Sparse layers are steps, as torch's modules are."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, SparseLayer) or super().is_leaf_module(m, module_qualified_name)


class _FoldedNorm(nn.Module):
    """Takes the place of a folded BatchNorm: passes on the layer's outputs, in which channels come second."""

    def __init__(self, dimensions: int) -> None:
        super().__init__()
        self.dimensions = dimensions

    def forward(self, x: Tensor) -> Tensor:
        """Its input, unchanged."""
        if x.dim() != self.dimensions:
            raise ValueError(
                f"a BatchNorm was folded into the layer before it for tensors of {self.dimensions} dimensions, and is "
                f"given one of {x.dim()}, in which the layer's outputs do not come second: do not fold this module"
            )
        return x


def _pairs(module: nn.Module, graph: fx.Graph) -> dict[str, str]:
    """Names of the layers to fold into, each with its BatchNorm."""
    # By the modules' identity: one may have several names.
    calls = Counter(id(module.get_submodule(node.target)) for node in graph.nodes if node.op == "call_module")
    direct = [str(node.target) for node in graph.nodes if node.op == "get_attr"]  # parameters that the code uses itself
    shared = _shared(module)
    pairs = {}
    for node in graph.nodes:
        before = node.args[0] if node.op == "call_module" and node.args else None
        if not isinstance(before, fx.Node) or before.op != "call_module" or len(before.users) != 1:
            continue
        names = (str(before.target), str(node.target))
        layer, norm = (module.get_submodule(name) for name in names)
        alone = all(calls[id(m)] == 1 and not m._forward_hooks and not m._forward_pre_hooks for m in (layer, norm))
        untouched = not any(target.startswith(f"{name}.") for name in names for target in direct)
        unshared = not any(id(p) in shared for m in (layer, norm) for p in m.parameters())
        if alone and untouched and unshared and _can_fold(layer, norm):
            pairs[names[0]] = names[1]
    return pairs


def _shared(module: nn.Module) -> set[int]:
    """Parameters that several modules have."""
    times = Counter(id(p) for m in module.modules() for p in m.parameters(recurse=False))
    return {key for key, n in times.items() if n > 1}


def _can_fold(layer: nn.Module, norm: nn.Module) -> bool:
    if isinstance(layer, SparseLayer):
        if layer.variance is not None:
            return False
        geometry: LayerGeometry | None = layer.geometry
    else:
        geometry = LayerGeometry.of(layer)
    if geometry is None or type(norm) not in _NORMS or norm.training:
        return False
    assert isinstance(norm, _NORMS)
    flat = len(geometry.shape) < 4
    return (
        norm.running_mean is not None and norm.num_features == geometry.shape[0] and flat == (type(norm) is _NORMS[0])
    )


def _geometry(layer: nn.Module) -> LayerGeometry:
    geometry = layer.geometry if isinstance(layer, SparseLayer) else LayerGeometry.of(layer)
    assert geometry is not None
    return geometry


def _copy(module: nn.Module) -> nn.Module:
    """Sparse layers share their patterns, and their values until they are scaled: neither is changed in place."""
    memo: dict[int, Any] = {}
    for layer in module.modules():
        if isinstance(layer, SparseLayer):
            places = layer._buffers.get("indices")  # those of the pattern, where they are part of a file
            for part in (layer.pattern, places, layer.values, layer.variance, layer.collect, layer.noise):
                memo[id(part)] = part
    return copy.deepcopy(module, memo)


@torch.no_grad()
def _fold(layer: Any, norm: Any) -> None:
    scale = (norm.running_var + norm.eps).rsqrt()
    scale = scale if norm.weight is None else scale * norm.weight
    shift = -norm.running_mean * scale if norm.bias is None else norm.bias - norm.running_mean * scale
    bias = shift if layer.bias is None else torch.addcmul(shift, layer.bias, scale)
    layer.bias = nn.Parameter(bias, requires_grad=False)
    whole = scale.view(-1, *[1] * (len(_geometry(layer).shape) - 1))
    if not isinstance(layer, SparseLayer):
        layer.weight = nn.Parameter(layer.weight * whole, requires_grad=False)
    elif layer.pattern is None:
        layer.values = layer.values * whole
    else:
        outputs = layer.pattern.indices.long() // (layer.geometry.size // layer.geometry.shape[0])
        layer.values = layer.values * scale[outputs]
