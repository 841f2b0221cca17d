"""Faster 3x3 convolutions for many passes through a network with the same weights, on a CPU in float32.

    with Winograd(weights):                 convolutions of stride 1 by `caveat/native/winograd.cpp`, and gradients
        outputs = network(params, x)        at their inputs, also where the stride is 2; BatchNorm as a line a x + b

A quarter of the products (at stride 2 somewhat over half), once a kernel is transformed, which costs what some thousand
positions save: until then it goes the direct way. In the norm a result is within 1e-5 of the direct one. Images are
kept with channels last, as the native kernels take them. Where a convolution reads relu(a x + b), its gradient goes
straight to x: times a where the relu is positive, on the way out of the kernel.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.grad import conv2d_input
from torch.overrides import TorchFunctionMode

from caveat import native

__all__ = ["Winograd", "suits"]

WORTH = 1024  # positions that must have gone through a kernel before it is transformed
PANEL = 64  # of channels, in the native kernels


def suits(weight: Tensor) -> bool:
    """Whether a convolution with this weight can be faster: 3x3, and channels that fill the native kernels."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.ndim == 4
        and weight.shape[2:] == (3, 3)
        and not (weight.shape[0] % PANEL or weight.shape[1] % PANEL)
        and native.library() is not None
    )


class Winograd(TorchFunctionMode):
    """Replaces convolutions with these weights, which must not change, and BatchNorm while it is active."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()
        self.weights = {id(weight): weight for weight in weights if suits(weight)}  # others may be made anew each time
        self.kernels: dict[tuple[int, int, int], _WinogradKernel] = {}
        self.origins: list[_Origin] = []  # of the last few results

    def __exit__(self, *raised: Any) -> None:
        """Leave the mode, and release the tensors of the pass."""
        super().__exit__(*raised)
        self.origins = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run convolutions, relus and BatchNorm by the faster way where it can take the call as it is."""
        kwargs = kwargs or {}
        result = None
        if func is torch.conv2d:
            result = self._convolution(*args, **kwargs)
        elif func is F.relu:
            result = self._relu(*args, **kwargs)
        elif func is F.batch_norm:
            result = self._batch_norm(*args, **kwargs)
        return func(*args, **kwargs) if result is None else result

    def _convolution(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor | None:
        if input.ndim != 4 or input.dtype != torch.float32 or weight.requires_grad:
            return None
        input = input.contiguous(memory_format=torch.channels_last)
        pad = 1 if padding == "same" else 0 if padding == "valid" else _single(padding)
        step = _single(stride)
        fits = (step == 1 and pad in (0, 1, 2)) or (step == 2 and pad == 1)
        if not fits or groups != 1 or _single(dilation) != 1 or id(weight) not in self.weights:
            return torch.conv2d(input, weight, bias, stride, padding, dilation, groups)
        if min(input.shape[2:]) + 2 * pad < 3:
            return None  # torch says what is wrong
        kernel = self.kernels.setdefault((id(weight), step, pad), _WinogradKernel(weight, step, pad))
        origin = self._origin(input)
        if origin is None or not origin.gated:
            origin = _Origin(input, input)
        output: Tensor = _Convolution.apply(origin.source, origin, kernel)
        return output if bias is None else output + bias[:, None, None]

    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor | None:
        """Scale x + shift; torch's own gradient reads the inputs too."""
        fixed = all(t is None or not t.requires_grad for t in (running_mean, running_var, weight, bias))
        if training or running_mean is None or running_var is None or input.ndim != 4 or not fixed:
            return None
        scale = (running_var + eps).rsqrt()
        scale = scale if weight is None else scale * weight
        shift = -running_mean * scale
        shift = shift if bias is None else shift + bias
        output: Tensor = _Line.apply(input, scale[:, None, None], shift[:, None, None])
        self._remember(_Origin(output, input, scale))
        return output

    def _relu(self, input: Tensor, inplace: bool = False) -> Tensor | None:
        if inplace or input.dtype != torch.float32 or input.ndim != 4:
            return None
        output, before = F.relu(input), self._origin(input)
        source, scale = (input, None) if before is None or before.gated else (before.source, before.scale)
        scale = torch.ones(input.shape[1]) if scale is None else scale
        self._remember(_Origin(output, source, scale, gated=True))
        return output

    def _origin(self, tensor: Tensor) -> "_Origin | None":
        return next((o for o in self.origins if o.result is tensor and o.versions == o.current()), None)

    def _remember(self, origin: "_Origin") -> None:
        self.origins = [*self.origins[-3:], origin]


class _Origin:
    """What a tensor was made from: a scale (and a shift) of `source`, where `gated` only what is positive of it."""

    def __init__(self, result: Tensor, source: Tensor, scale: Tensor | None = None, gated: bool = False) -> None:
        self.result, self.source, self.scale, self.gated = result, source, scale, gated
        self.versions = self.current()

    def current(self) -> tuple[int, int]:
        """The versions of both tensors, which change when either is written into."""
        return self.result._version, self.source._version


class _WinogradKernel:
    """A weight [outputs, inputs, 3, 3] with its stride and padding, and its transforms for either direction."""

    def __init__(self, weight: Tensor, stride: int, padding: int) -> None:
        self.weight, self.stride, self.padding = weight.detach(), stride, padding
        self.met = {False: 0, True: 0}  # positions so far, there and back
        self.transformed: dict[bool, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        """The convolution of images [n, inputs, H, W]."""
        n, _, *size = x.shape
        if self.stride > 1 or not self._worth(x, back=False):
            return F.conv2d(x, self.weight, stride=self.stride, padding=self.padding)
        return self._convolved(x, [n, len(self.weight), *(length + 2 * self.padding - 2 for length in size)], False)

    def backward(self, g: Tensor, shape: list[int], gate: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
        """The gradient at inputs of that shape from the one at outputs, times scale where the gate is positive."""
        if self._worth(g, back=True):
            return self._convolved(g, shape, True, gate, scale)
        gradient = conv2d_input(shape, self.weight, g, stride=self.stride, padding=self.padding)
        return gradient if gate is None or scale is None else gradient * (gate > 0) * scale[:, None, None]

    def _worth(self, x: Tensor, back: bool) -> bool:
        self.met[back] += x.numel() // x.shape[1]
        return len(x) > 0 and self.met[back] >= WORTH

    def _convolved(self, x: Tensor, shape: list[int], back: bool, *gate: Tensor | None) -> Tensor:
        spread = self.stride > 1
        if back not in self.transformed:
            w = self.weight.transpose(0, 1) if back else self.weight
            w = w.flip(2, 3) if back and not spread else w
            u = torch.empty(36 * w.shape[0] * w.shape[1])
            _call("caveat_winograd_weights", [w.shape[1], w.shape[0], *w.stride(), spread], w, u)
            self.transformed[back] = u
        x = x.contiguous(memory_format=torch.channels_last)
        y = torch.empty(shape, memory_format=torch.channels_last)
        padding = 0 if spread else 2 - self.padding if back else self.padding
        n, inputs, height, width = x.shape
        sizes = [n, height, width, inputs, shape[1], padding, *shape[2:], spread]
        _call("caveat_winograd", sizes, x, self.transformed[back], *(gate or (None, None)), y)
        return y


def _call(name: str, sizes: list[int], *given: Tensor | None) -> None:
    library = native.library()
    assert library is not None  # `suits` has seen to it
    plan = torch.tensor(sizes, dtype=torch.int64)
    if getattr(library, name)(
        plan.data_ptr(), *(None if t is None else t.data_ptr() for t in given), torch.get_num_threads()
    ):
        raise MemoryError(f"no memory for a convolution of sizes {sizes}")


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, origin: _Origin, kernel: _WinogradKernel) -> Tensor:
        ctx.kernel, ctx.shape = kernel, list(source.shape)
        if origin.gated:
            ctx.save_for_backward(origin.result.detach(), origin.scale)
        return kernel.forward(origin.result.detach())

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return ctx.kernel.backward(g, ctx.shape, *ctx.saved_tensors), None, None


class _Line(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return torch.addcmul(shift, x, scale)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (scale,) = ctx.saved_tensors
        return g * scale, None, None


def _single(value: Any) -> int:
    """The one number that holds for both axes; -1 where the axes differ."""
    values = {value} if isinstance(value, int) else set(value)
    return values.pop() if len(values) == 1 else -1
