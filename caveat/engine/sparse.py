"""Linear and convolutional layers given by few of their weights: what they compute, and gradients at those weights.

    y = W x + b,   W = zero but for values[k] at flat index indices[k]

`apply` and `apply_pair` keep the values and indices alone. Where W is needed as a whole (no native kernel for the
layer, device or density; or its gradient is wanted to look for new weights), it exists for the time of one call.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from caveat import native
from caveat.native import Grid, Structure

__all__ = ["Geometry", "Pattern", "apply", "apply_pair", "runs_sparse"]

Collector = Callable[[Tensor], None]  # is given the gradient of the whole W, once, while a step runs backward


@dataclass(frozen=True)
class Geometry:
    """What a linear or convolutional layer does beside its weights."""

    shape: tuple[int, ...]  # of the weight: outputs, inputs of a group, kernel
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1

    @staticmethod
    def of(layer: nn.Module) -> "Geometry | None":
        """Of a plain linear or convolutional layer (1-D or 2-D, padded with zeros); None for any other."""
        if type(layer) is nn.Linear:
            return Geometry(tuple(layer.weight.shape))
        if type(layer) in (nn.Conv1d, nn.Conv2d) and layer.padding_mode == "zeros":
            padding = layer.padding
            if padding == "same":
                reach = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
                if any(r % 2 for r in reach):
                    return None
                padding = tuple(r // 2 for r in reach)
            elif padding == "valid":
                padding = (0,) * len(layer.kernel_size)
            return Geometry(tuple(layer.weight.shape), layer.stride, padding, layer.dilation, layer.groups)
        return None

    @property
    def size(self) -> int:
        """How many weights there would be."""
        return int(torch.Size(self.shape).numel())

    def dense(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """With the whole weight."""
        if len(self.shape) == 2:
            return F.linear(x, weight, bias)
        convolve: Any = F.conv1d if len(self.shape) == 3 else F.conv2d
        found: Tensor = convolve(x, weight, bias, self.stride, self.padding, self.dilation, self.groups)
        return found

    def gradients(self, g: Tensor, x: Tensor, weight: Tensor, of: tuple[bool, bool]) -> tuple[Tensor | None, ...]:
        """Of x and of the whole weight, from that of the outputs; those that are not asked for are None."""
        if len(self.shape) == 2:
            rows, outputs = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
            return (g @ weight if of[0] else None, outputs.t() @ rows if of[1] else None)
        found = torch.ops.aten.convolution_backward(
            g, x, weight, None, self.stride, self.padding, self.dilation, False,
            [0] * len(self.stride), self.groups, [*of, False],
        )  # fmt: skip
        return tuple(found[:2])


class Pattern:
    """Which weights of a layer there are: sorted flat indices [K] into the whole weight, which are not to change."""

    def __init__(self, geometry: Geometry, indices: Tensor) -> None:
        self.geometry, self.indices = geometry, indices
        self.ran: str | None = None  # "sparse" or "dense": the way of the last apply
        self._structures: dict[tuple[object, ...], Structure] = {}

    def whole(self, values: Tensor) -> Tensor:
        """The whole weight."""
        flat = values.new_zeros(self.geometry.size)
        return flat.scatter_(0, self.indices.long(), values).view(self.geometry.shape)

    def at(self, whole: Tensor) -> Tensor:
        """The entries of a whole weight that there are."""
        return whole.reshape(-1)[self.indices.long()]


    def grid(self, x: Tensor) -> Grid | None:
        """How x lies for the native kernels; None where it goes through the whole weight."""
        geometry, linear = self.geometry, len(self.geometry.shape) == 2
        shape = (math.prod(x.shape[:-1]), x.shape[-1]) if linear else tuple(x.shape)
        fits = shape[1:2] == (geometry.shape[1] * geometry.groups,) and len(shape) == len(geometry.shape)
        if not (fits and shape[0] and runs_sparse(geometry, len(self.indices), shape)) or native.library() is None:
            return None
        return Grid.of(geometry.shape, geometry.stride, geometry.padding, geometry.dilation, geometry.groups, shape)

    def structure(self, grid: Grid, back: bool) -> Structure:
        """The non-zeros as the kernels read them, by outputs or, for the way back, by inputs."""
        key = (back, *grid.key)
        if key not in self._structures:
            make = Structure.backward if back else Structure.forward
            indices = self.indices.numpy().astype(np.int32, copy=False)
            self._structures[key] = make(self.geometry.shape, self.geometry.groups, indices, grid)
        return self._structures[key]


def runs_sparse(geometry: Geometry, count: int, x_shape: tuple[int, ...]) -> bool:
    """Whether the native kernels are the faster way for `count` weights and inputs of this shape [batch, ...]."""
    return count <= 0.3 * geometry.size


def apply(
    x: Tensor, values: Tensor, pattern: Pattern, bias: Tensor | None = None, collect: Collector | None = None
) -> Tensor:
    """The layer's outputs; `collect` gets the gradient of the whole weight when the way back passes."""
    if (grid := _grid(x, values, pattern)) is not None:
        found: Tensor = _Native.apply(x, values, None, bias, pattern, grid, collect)
        return found
    y: Tensor = _Dense.apply(x, values, pattern, collect)
    return y if bias is None else y + _over_channels(bias, y, pattern.geometry)


def apply_pair(
    x: Tensor, mean: Tensor, variance: Tensor, pattern: Pattern, collect: Collector | None = None
) -> tuple[Tensor, Tensor]:
    """Outputs with values `mean`, and outputs of the squared inputs with values `variance`."""
    if (grid := _grid(x, mean, pattern)) is not None:
        pair: tuple[Tensor, Tensor] = _Native.apply(x, mean, variance, None, pattern, grid, collect)
        return pair
    return _Dense.apply(x, mean, pattern, collect), _Dense.apply(x.square(), variance, pattern, None)


def _grid(x: Tensor, values: Tensor, pattern: Pattern) -> Grid | None:
    """For the native kernels, which are for float32 on a CPU; notes which way it goes."""
    plain = all(t.dtype == torch.float32 and t.device.type == "cpu" for t in (x, values))
    grid = pattern.grid(x) if plain else None
    pattern.ran = "dense" if grid is None else "sparse"
    return grid


def _over_channels(bias: Tensor, y: Tensor, geometry: Geometry) -> Tensor:
    return bias if len(geometry.shape) == 2 else bias.view(-1, *[1] * (len(geometry.shape) - 2))


class _Dense(torch.autograd.Function):
    """Through the whole weight, which is made anew for the way back instead of being kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, pattern: Pattern, collect: Collector | None) -> Tensor:
        ctx.save_for_backward(x, values)
        ctx.pattern, ctx.collect = pattern, collect
        return pattern.geometry.dense(x, pattern.whole(values))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # type: ignore[override]
        x, values = ctx.saved_tensors
        pattern: Pattern = ctx.pattern
        of = (ctx.needs_input_grad[0], ctx.needs_input_grad[1] or ctx.collect is not None)
        to_x, to_weight = pattern.geometry.gradients(g, x, pattern.whole(values.to(x.dtype)), of)
        if ctx.collect is not None:
            ctx.collect(to_weight)
        return to_x, None if to_weight is None else pattern.at(to_weight), None, None


class _Native(torch.autograd.Function):
    """Through the native kernels: the values alone, or a pair of means and variances; gradients at the non-zeros."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, values: Tensor, variance: Tensor | None, bias: Tensor | None, pattern: Pattern,
        grid: Grid, collect: Collector | None,
    ) -> Any:  # fmt: skip
        x, values = x.contiguous(), values.contiguous()
        variance = None if variance is None else variance.contiguous()
        ctx.save_for_backward(x, values, variance)
        ctx.pattern, ctx.grid, ctx.collect = pattern, grid, collect
        lead = x.shape[:-1] if len(pattern.geometry.shape) == 2 else x.shape[:1]
        found = [x.new_empty(*lead, *grid.outputs) for _ in range(1 if variance is None else 2)]
        by_output = pattern.structure(grid, back=False)
        bias = None if bias is None else bias.contiguous()
        _call("caveat_forward", grid, x, by_output.start, by_output.offset, values, variance, bias, found[0],
              found[-1] if variance is not None else None)  # fmt: skip
        return found[0] if variance is None else tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, g2: Tensor | None = None) -> Any:  # type: ignore[override]
        x, values, variance = ctx.saved_tensors
        pattern, grid, geometry = ctx.pattern, ctx.grid, ctx.pattern.geometry
        to_x, to_mean, to_variance, to_bias = ctx.needs_input_grad[:4]
        g, g2 = g.contiguous(), None if g2 is None else g2.contiguous()
        by_output = pattern.structure(grid, back=False)
        by_input = pattern.structure(grid, back=True) if to_x else None
        dx = torch.empty_like(x) if to_x else None
        dw = torch.empty_like(values) if to_mean or to_variance else None
        dw2 = torch.empty_like(values) if dw is not None and variance is not None else None
        ways = (None, None, None) if by_input is None else (by_input.start, by_input.offset, by_input.order)
        _call("caveat_backward", grid, x, g, g2, by_output.start, by_output.offset, values, variance, *ways, dx, dw, dw2)
        if ctx.collect is not None:
            ctx.collect(geometry.gradients(g, x, g.new_empty(geometry.shape), (False, True))[1])
        db = None
        if to_bias:
            db = g.reshape(-1, g.shape[-1]).sum(0) if len(geometry.shape) == 2 else g.flatten(2).sum((0, 2))
        return dx, dw if to_mean else None, dw2 if to_variance else None, db, None, None, None


def _call(name: str, grid: Grid, *given: Any) -> None:
    """A kernel on tensors and arrays; None where it takes nothing."""
    library = native.library()
    assert library is not None  # there is no grid without it
    places = [None if a is None else a.data_ptr() if isinstance(a, Tensor) else a.ctypes.data for a in given]
    if getattr(library, name)(grid.plan.ctypes.data, *places, torch.get_num_threads()):
        raise MemoryError(f"no memory for the grids of a layer with weights {grid.outputs[0]} x ...; use a smaller batch")
