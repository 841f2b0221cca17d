"""A network's operations on tensors as a graph, for inputs of one shape; none of them in place.

A graph is the network only where nothing that Python decides depends on numbers. Numbers that are read, shapes that
depend on them, and tracing that takes too long are `NotTraceableError`s: such a network has products by autograd.

BatchNorm with fixed statistics that reads a convolution or a linear layer becomes part of its weights,

    s (W x + b - mean) + beta = (s W) x + s (b - mean) + beta,      s = gamma / sqrt(variance + eps),

so that its tangents cost what those of weights do, not what those of activations do. Attention and recurrent layers
become their ordinary operations.
"""

import contextlib
import math
import operator
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functionalize
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from caveat.batches import Inputs, map_tensors, tensors
from caveat.engine.tangents.plain_operations import plain_operations
from caveat.engine.torch_settings import process_lock
from caveat.network import Network, Params

__all__ = ["NotTraceableError", "check_time", "traced"]


class NotTraceableError(ValueError):
    """A network that is not the same list of operations for all inputs of a shape, or not one that can be followed."""


_TRACING = process_lock()  # torch.fx patches modules of the whole process while it traces


def traced(network: Network, params: Params, x: Inputs, float16: bool, until: float = math.inf) -> fx.GraphModule:
    """The network's operations on tensors, none of them in place; threads trace one after the other.

    `until` is when `time.monotonic` has had enough of it.
    """
    with _TRACING:
        graph = _traced(network, params, x, float16, until)
        if not any(_writes(node) for node in graph.graph.nodes):
            return graph
        return _without_writing_in_place(graph, [*params.values(), *tensors(x)], until)


def _writes(node: fx.Node) -> bool:
    """Whether an operation writes into what it is given; what torch has no word on may."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    schema = getattr(node.target, "_schema", None)
    return schema is None or bool(schema.is_mutable)


def check_time(until: float) -> None:
    """Stop where tracing takes too long."""
    if time.monotonic() > until:
        raise NotTraceableError("tracing it takes too long")


class _StandingStill(TorchDispatchMode):
    """Stops at an operation whose result's shape, or whose value for Python, depends on numbers; and in time."""

    def __init__(self, until: float) -> None:
        super().__init__()
        self.until = until

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        check_time(self.until)
        depends = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}.intersection(func.tags)
        if depends and not (func is torch.ops.aten.index.Tensor and not _masks(args[1])):
            raise NotTraceableError(f"what it does next depends on the numbers that {func} finds")
        return func(*args, **(kwargs or {}))


def _masks(indices: Sequence[Tensor | None]) -> bool:
    """Whether entries are taken by a mask, not by their places."""
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _traced(network: Network, params: Params, x: Inputs, float16: bool, until: float) -> fx.GraphModule:
    """The operations as the module calls them."""

    def call(params: Params, *given: Tensor) -> Tensor:
        parts = iter(given)
        with _StandingStill(until), _Folding():
            return network(params, map_tensors(lambda _: next(parts), x))

    precision = torch.autocast(network.device.type, torch.float16) if float16 else contextlib.nullcontext()
    with (
        torch.no_grad(),
        _layers_noted(network.module),
        plain_operations(network.module, network.device, convolutions=True),
        precision,
    ):
        return make_fx(call)(params, *tensors(x))


def _without_writing_in_place(graph: fx.GraphModule, values: list[Tensor], until: float) -> fx.GraphModule:
    """The graph traced a second time: what torch puts together from several operations may work in place."""
    with torch.no_grad(), traceback.preserve_node_meta():
        return make_fx(functionalize(lambda *given: _Timed(graph, until).run(*given)))(*values)


class _Timed(fx.Interpreter):
    """Goes through a graph for as long as it may."""

    def __init__(self, graph: fx.GraphModule, until: float) -> None:
        super().__init__(graph)
        self.until = until

    def run_node(self, n: fx.Node) -> Any:
        check_time(self.until)
        return super().run_node(n)


@dataclass(frozen=True)
class _LayerCall:
    """A layer's result and what it was computed from; where its version has changed since, it was written into."""

    result: Tensor  # kept, so that no other tensor takes its identity
    version: int
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self.args[1] if len(self.args) > 1 else self.kwargs["weight"]
        return weight

    @property
    def bias(self) -> Tensor | None:
        return self.args[2] if len(self.args) > 2 else self.kwargs.get("bias")

    def __call__(self, weight: Tensor, bias: Tensor) -> Tensor:
        """The layer's result for the same inputs with another weight and bias."""
        inputs = self.args[0] if self.args else self.kwargs["input"]
        others = {name: value for name, value in self.kwargs.items() if name not in ("input", "weight", "bias")}
        result: Tensor = self.func(inputs, weight, bias, *self.args[3:], **others)
        return result


class _Folding(TorchFunctionMode):
    """BatchNorm with fixed statistics as a layer's own scale and shift, or of its inputs where no layer made them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[int, _LayerCall] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _READING:
            raise NotTraceableError("its forward pass reads numbers outside of torch")
        if func is nn.functional.batch_norm and not kwargs.get("training", args[5] if len(args) > 5 else False):
            return self._normalised(*args, **kwargs)
        result = func(*args, **kwargs)
        if func in _LAYERS:
            self.calls[id(result)] = _LayerCall(result, result._version, func, args, kwargs)
        return result

    def _normalised(
        self,
        x: Tensor,
        running_mean: Tensor,
        running_var: Tensor,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        scale = (running_var + eps).rsqrt()
        scale = scale if weight is None else weight * scale
        layer = self.calls.get(id(x))
        # A linear layer has its outputs on the last axis, and the channels are on the second.
        if layer is None or layer.version != x._version or x.ndim != layer.weight.ndim:
            shift = -running_mean * scale if bias is None else bias - running_mean * scale
            axes = (1, -1, *[1] * (x.ndim - 2))
            return x * scale.view(axes) + shift.view(axes)
        shift = (-running_mean if layer.bias is None else layer.bias - running_mean) * scale
        weight = layer.weight * scale.view(-1, *[1] * (layer.weight.ndim - 1))
        return layer(weight, shift if bias is None else shift + bias)


_READING = (Tensor.numpy, Tensor.tolist, Tensor.__array__)
_LAYERS = (torch.conv1d, torch.conv2d, torch.conv3d, nn.functional.linear)


@contextlib.contextmanager
def _layers_noted(module: nn.Module) -> Iterator[None]:
    """While tracing, every operation is marked with the submodule that it is part of."""
    stack: list[str] = []

    def enter(name: str) -> None:
        stack.append(name)
        traceback.get_current_meta()["nn_module_stack"] = {name: (name, "")}

    def leave() -> None:
        stack.pop()
        name = stack[-1] if stack else ""
        traceback.get_current_meta()["nn_module_stack"] = {name: (name, "")}

    hooks = []
    for name, child in module.named_modules():
        hooks.append(child.register_forward_pre_hook(lambda *_, name=name: enter(name)))
        hooks.append(child.register_forward_hook(lambda *_: leave()))
    try:
        with traceback.preserve_node_meta():
            yield
    finally:
        traceback.get_current_meta().pop("nn_module_stack", None)
        for hook in hooks:
            hook.remove()
