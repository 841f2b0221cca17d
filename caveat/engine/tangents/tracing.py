"""A network's operations on tensors as a graph, for inputs of one shape; none of them in place.

BatchNorm with fixed statistics that reads a convolution or a linear layer becomes part of its weights,

    s (W x + b - mean) + beta = (s W) x + s (b - mean) + beta,      s = gamma / sqrt(variance + eps),

so that its tangents cost what those of weights do, not what those of activations do. Attention and recurrent layers
become their ordinary operations.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functionalize
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from caveat.batches import Inputs, map_tensors, tensors
from caveat.engine.torch_settings import HeldSetting, differentiable_attention, process_lock
from caveat.network import Network, Params

__all__ = ["traced"]


_TRACING = process_lock()  # torch.fx patches modules of the whole process while it traces


def traced(network: Network, params: Params, x: Inputs, float16: bool) -> fx.GraphModule:
    """The network's operations on tensors, none of them in place; threads trace one after the other."""
    with _TRACING:
        return _without_writing_in_place(_traced(network, params, x, float16), [*params.values(), *tensors(x)])


def _traced(network: Network, params: Params, x: Inputs, float16: bool) -> fx.GraphModule:
    """The operations as the module calls them."""

    def call(params: Params, *given: Tensor) -> Tensor:
        parts = iter(given)
        with _Folding():
            return network(params, map_tensors(lambda _: next(parts), x))

    precision = torch.autocast(network.device.type, torch.float16) if float16 else contextlib.nullcontext()
    with torch.no_grad(), _layers_noted(network.module), _plain_operations(network.module, network.device), precision:
        try:
            return make_fx(call)(params, *tensors(x))
        except RuntimeError as error:
            if "data-dependent" not in str(error):
                raise
            raise ValueError(
                "the network cannot be traced, which its linear products need: give it a forward pass without branches "
                f"that depend on numbers ({str(error).partition(chr(10))[0]})"
            ) from error


def _without_writing_in_place(graph: fx.GraphModule, values: list[Tensor]) -> fx.GraphModule:
    """The graph traced a second time: what torch puts together from several operations may work in place."""
    with torch.no_grad(), traceback.preserve_node_meta():
        return make_fx(functionalize(lambda *given: fx.Interpreter(graph).run(*given)))(*values)


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


_no_mkldnn = HeldSetting(torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled, False)
_no_cudnn = HeldSetting(torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled, False)
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


@contextlib.contextmanager
def _plain_operations(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Attention and recurrent layers by their ordinary operations, not by kernels that have no derivatives.

    These are settings of the whole process: other threads keep their kernels unless a recurrent layer, or a GPU, makes
    it necessary.
    """
    recurrent = any(isinstance(child, nn.RNNBase) for child in module.modules())
    with differentiable_attention(), contextlib.ExitStack() as settings:
        if recurrent:
            settings.enter_context(_no_mkldnn())
        if device.type == "cuda":  # cudnn's public context sets TF32 too, and fails where a program has set that
            settings.enter_context(_no_cudnn())
        yield
