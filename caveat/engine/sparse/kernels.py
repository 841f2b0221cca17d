"""Linear and convolutional layers given by few of their weights: what they compute, and gradients at those weights.

    y = W x + b,   W = zero but for values[k] at flat index indices[k]

`apply` and `apply_pair` keep the inputs, values and indices alone for the way back, on every device. Where W is needed
as a whole (no native kernel for the layer, device or density; or its gradient is wanted to look for new weights), it
exists for the time of one call.
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

__all__ = ["LayerGeometry", "Pattern", "apply", "apply_pair", "runs_sparse"]

Collector = Callable[[Tensor], None]  # is given the gradient of the whole W, once, while a step runs backward
_STRUCTURES = 32  # that a layer keeps: two for each shape of inputs


@dataclass(frozen=True)
class LayerGeometry:
    """What a linear or convolutional layer computes, beside its weights."""

    shape: tuple[int, ...]  # of the weight: outputs, inputs of a group, kernel
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1
    drawn: bool = False  # a parameter that its module computes with in a way of its own, not the weight of such a layer

    @staticmethod
    def of(layer: nn.Module) -> "LayerGeometry | None":
        """The geometry of a layer that computes what nn.Linear, nn.Conv1d or nn.Conv2d does, padded with zeros.

        That is one of these or of a subclass which leaves their `forward` as it is; None for any other layer.
        """
        if isinstance(layer, nn.Linear) and _computes_as(layer, nn.Linear):
            return LayerGeometry(tuple(layer.weight.shape))
        if (
            isinstance(layer, (nn.Conv1d, nn.Conv2d))
            and _computes_as(layer, nn.Conv1d if isinstance(layer, nn.Conv1d) else nn.Conv2d)
            and layer.padding_mode == "zeros"
        ):
            padding = layer.padding
            if padding == "same":
                reach = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
                if any(r % 2 for r in reach):
                    return None
                padding = tuple(r // 2 for r in reach)
            elif isinstance(padding, str):  # "valid"
                padding = (0,) * len(layer.kernel_size)
            return LayerGeometry(tuple(layer.weight.shape), layer.stride, padding, layer.dilation, layer.groups)
        return None

    @property
    def size(self) -> int:
        """How many entries the whole weight has."""
        return int(torch.Size(self.shape).numel())

    def dense(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Outputs with a whole weight."""
        if len(self.shape) == 2:
            return F.linear(x, weight, bias)
        convolve: Any = F.conv1d if len(self.shape) == 3 else F.conv2d
        outputs: Tensor = convolve(x, weight, bias, self.stride, self.padding, self.dilation, self.groups)
        return outputs

    def gradients(self, g: Tensor, x: Tensor, weight: Tensor, of: tuple[bool, bool]) -> tuple[Tensor | None, ...]:
        """Gradients of x and of the whole weight from g, that of the outputs; None where `of` asks for none."""
        if len(self.shape) == 2:
            rows, outputs = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
            return (g @ weight if of[0] else None, outputs.t() @ rows if of[1] else None)
        alone = x.ndim < len(self.shape)  # one image, without an axis of rows
        to_x, to_weight, _ = torch.ops.aten.convolution_backward(
            g.unsqueeze(0) if alone else g, x.unsqueeze(0) if alone else x, weight, None, self.stride, self.padding,
            self.dilation, False, [0] * len(self.stride), self.groups, [*of, False],
        )  # fmt: skip
        return to_x.squeeze(0) if alone and to_x is not None else to_x, to_weight


def _computes_as(layer: nn.Module, kind: Any) -> bool:
    """Whether a layer of a subclass computes as its base does, with a weight that is a parameter."""
    names = [name for name in ("forward", "_conv_forward") if hasattr(kind, name)]
    same = all(getattr(type(layer), name) is getattr(kind, name) for name in names)
    return same and "forward" not in vars(layer) and "weight" in layer._parameters


class Pattern:
    """Which weights of a layer there are: sorted flat indices [K] into the whole weight, which are not to change."""

    def __init__(self, geometry: LayerGeometry, indices: Tensor) -> None:
        self.geometry, self.indices = geometry, indices
        self.ran: str | None = None  # "sparse" or "dense": the way of the last apply
        self._structures: dict[tuple[object, ...], Structure] = {}

    def __getstate__(self) -> dict[str, object]:
        """Copies make structures of their own: these hold addresses."""
        return self.__dict__ | {"_structures": {}}

    def whole(self, values: Tensor) -> Tensor:
        """The whole weight with these values [K], zero elsewhere."""
        flat = values.new_zeros(self.geometry.size)
        # In place saves a copy, but vmap warns of it.
        scatter = flat.scatter if torch._C._are_functorch_transforms_active() else flat.scatter_
        return scatter(0, self.indices.long(), values).view(self.geometry.shape)

    def at(self, whole: Tensor) -> Tensor:
        """The entries [K] of a whole weight at this pattern's places."""
        return whole.reshape(-1)[self.indices.long()]

    def grid(self, x: Tensor) -> Grid | None:
        """The memory layout of x for the native kernels; None where the whole weight is the way."""
        geometry, linear = self.geometry, len(self.geometry.shape) == 2
        shape = (math.prod(x.shape[:-1]), x.shape[-1]) if linear else tuple(x.shape)
        fits = shape[1:2] == (geometry.shape[1] * geometry.groups,) and len(shape) == len(geometry.shape)
        if not (fits and shape[0] and runs_sparse(geometry, len(self.indices), shape)) or native.library() is None:
            return None
        return Grid.of(geometry.shape, geometry.stride, geometry.padding, geometry.dilation, geometry.groups, shape)

    def structure(self, grid: Grid, back: bool) -> Structure:
        """The non-zeros as the kernels read them: by outputs, or by inputs for the way back."""
        key = (back, *grid.key)
        structure = self._structures.pop(key, None)
        if structure is None:
            make = Structure.backward if back else Structure.forward
            indices = self.indices.numpy().astype(np.int32, copy=False)
            structure = make(self.geometry.shape, self.geometry.groups, indices, grid)
        self._structures[key] = structure  # the last used one is the last
        for old in list(self._structures)[:-_STRUCTURES]:  # a copy: other threads may be here, too
            self._structures.pop(old, None)
        return structure


def runs_sparse(geometry: LayerGeometry, count: int, x_shape: tuple[int, ...]) -> bool:
    """Whether the native kernels are the faster way for `count` weights and inputs of this shape [batch, ...].

    Measured on two cores of an AMD EPYC (Zen 4) beside other work, against the way through the whole weight, forward
    and back. Convolutions of ResNet-18, 1 to 128 images: with 5% of the weights 4 to 10 times faster, 10% 2.6 to 6,
    30% 1.2 to 2.6, 40% 1.2 to 2, 50% about as fast; with strides, for which inputs are taken apart, at 30% 0.9 to 1.8.
    Linear layers, 1 to 128 rows: 5% 2 to 10, 30% 1 to 2. One row fills a sixteenth of a vector, so that few rows break
    even earlier, at 20 to 30%.
    """
    share = count / geometry.size
    if any(step > 1 for step in geometry.stride):
        return share <= 0.25
    if len(geometry.shape) == 2 and x_shape[0] < 8:
        return share <= 0.2
    return share <= 0.35


def apply(
    x: Tensor, values: Tensor, pattern: Pattern, bias: Tensor | None = None, collect: Collector | None = None
) -> Tensor:
    """The layer's outputs; `collect` is given the gradient of the whole weight in the backward pass."""
    if (grid := _grid(pattern, x, values, None, bias)) is not None:
        outputs: Tensor = _native(x, values, None, bias, pattern, grid, collect)
        return outputs
    y = _through_whole(x, values, pattern, collect)
    return y if bias is None else y + _over_channels(bias, y, pattern.geometry)


def apply_pair(
    x: Tensor, mean: Tensor, variance: Tensor, pattern: Pattern, collect: Collector | None = None
) -> tuple[Tensor, Tensor]:
    """Outputs with values `mean`, and outputs of the squared inputs with values `variance`."""
    if (grid := _grid(pattern, x, mean, variance, None)) is not None:
        pair: tuple[Tensor, Tensor] = _native(x, mean, variance, None, pattern, grid, collect)
        return pair
    if _leaves_the_way_back(x, mean, variance, collect):
        return _through_whole(x, mean, pattern, collect), _through_whole(x * x, variance, pattern, None)
    both: tuple[Tensor, Tensor] = _DensePair.apply(x, mean, variance, pattern, collect)
    return both


def _grid(pattern: Pattern, x: Tensor, values: Tensor, variance: Tensor | None, bias: Tensor | None) -> Grid | None:
    """For the native kernels, which are for float32 on a CPU; notes which way it goes."""
    count, outputs = len(pattern.indices), pattern.geometry.shape[0]
    given = [(t, n) for t, n in ((values, count), (variance, count), (bias, outputs)) if t is not None]
    fits = all(t.shape == (n,) and t.dtype == torch.float32 and t.device.type == "cpu" for t, n in given)
    plain = fits and x.dtype == torch.float32 and x.device.type == "cpu"
    # Tensors of these have no address.
    plain = plain and not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active()
    grid = pattern.grid(x) if plain else None
    pattern.ran = "dense" if grid is None else "sparse"
    return grid


def _leaves_the_way_back(x: Tensor, values: Tensor, variance: Tensor | None, collect: Collector | None) -> bool:
    """Whether the way back is not ours to write: no gradients, a transform of torch.func, or a compiler's graph."""
    given = any(t is not None and t.requires_grad for t in (x, values, variance))
    tracked = torch.is_grad_enabled() and given
    transformed = torch._C._are_functorch_transforms_active()
    return torch.compiler.is_compiling() or (collect is None and (not tracked or transformed))


def _through_whole(x: Tensor, values: Tensor, pattern: Pattern, collect: Collector | None) -> Tensor:
    if not _leaves_the_way_back(x, values, None, collect):
        y: Tensor = _Dense.apply(x, values, pattern, collect)
        return y
    whole = pattern.whole(values)
    if collect is not None and whole.requires_grad:
        whole.register_hook(collect)
    return pattern.geometry.dense(x, whole)


def _over_channels(bias: Tensor, y: Tensor, geometry: LayerGeometry) -> Tensor:
    return bias if len(geometry.shape) == 2 else bias.view(-1, *[1] * (len(geometry.shape) - 2))


class _Dense(torch.autograd.Function):
    """Through the whole weight, which is made anew for the way back instead of being kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, pattern: Pattern, collect: Collector | None) -> Tensor:
        ctx.save_for_backward(x, values)
        ctx.pattern, ctx.collect = pattern, collect
        return pattern.geometry.dense(x, pattern.whole(values))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, values = ctx.saved_tensors
        pattern: Pattern = ctx.pattern
        of = (ctx.needs_input_grad[0], ctx.needs_input_grad[1] or ctx.collect is not None)
        # Under autocast the outputs, and so g, may be of another type than the inputs.
        to_x, to_weight = pattern.geometry.gradients(g, x.to(g.dtype), pattern.whole(values).to(g.dtype), of)
        if ctx.collect is not None:
            ctx.collect(to_weight)
        to_values = None if to_weight is None else pattern.at(to_weight).to(values.dtype)
        return None if to_x is None else to_x.to(x.dtype), to_values, None, None


class _DensePair(torch.autograd.Function):
    """Means and variances through whole weights: these, and the squared inputs, are made anew for the way back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mean: Tensor, variance: Tensor, pattern: Pattern, collect: Collector | None
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, mean, variance)
        ctx.pattern, ctx.collect = pattern, collect
        dense = pattern.geometry.dense
        return dense(x, pattern.whole(mean)), dense(x * x, pattern.whole(variance))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, g2: Tensor) -> Any:
        x, mean, variance = ctx.saved_tensors
        pattern: Pattern = ctx.pattern
        of_x, of_mean, of_variance = ctx.needs_input_grad[:3]

        def way_back(g: Tensor, x: Tensor, values: Tensor, of: bool) -> tuple[Tensor | None, ...]:
            # Under autocast the outputs, and so g, may be of another type than the inputs.
            return pattern.geometry.gradients(g, x.to(g.dtype), pattern.whole(values).to(g.dtype), (of_x, of))

        to_x, to_mean = way_back(g, x, mean, of_mean or ctx.collect is not None)
        to_squares, to_variance = way_back(g2, x * x, variance, of_variance)
        if ctx.collect is not None:
            ctx.collect(to_mean)
        if to_x is not None and to_squares is not None:
            to_x = torch.addcmul(to_x.to(x.dtype), to_squares.to(x.dtype), x, value=2)
        of_mean_alone = pattern.at(to_mean).to(mean.dtype) if of_mean and to_mean is not None else None
        return to_x, of_mean_alone, None if to_variance is None else pattern.at(to_variance).to(mean.dtype), None, None


class _Native(torch.autograd.Function):
    """Through the native kernels: the values alone, or a pair of means and variances; gradients at the non-zeros."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, values: Tensor, variance: Tensor | None, bias: Tensor | None, pattern: Pattern,
        grid: Grid, collect: Collector | None,
    ) -> Any:  # fmt: skip
        ctx.save_for_backward(x, values, variance)
        ctx.pattern, ctx.grid, ctx.collect = pattern, grid, collect
        return _forward(x, values, variance, bias, pattern, grid)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gs: Tensor) -> Any:
        x, values, variance = ctx.saved_tensors
        pattern, grid, geometry = ctx.pattern, ctx.grid, ctx.pattern.geometry
        of_x, of_mean, of_variance, of_bias = ctx.needs_input_grad[:4]
        g, g2 = gs[0], gs[1] if len(gs) == 2 else None
        dx = x.new_empty(x.shape) if of_x else None
        dw = x.new_empty(values.shape) if of_mean or of_variance else None
        dw2 = x.new_empty(values.shape) if dw is not None and variance is not None else None
        by_output = pattern.structure(grid, back=False)
        by_input = pattern.structure(grid, back=True) if of_x else None
        places = (None, None, None) if by_input is None else by_input.addresses
        _call("caveat_backward", grid, x, g, g2, *by_output.addresses[:2], values, variance, *places, dx, dw, dw2)
        if ctx.collect is not None:
            nothing = g.new_empty(()).expand(geometry.shape)  # the gradient of the weight does not need the weight
            ctx.collect(geometry.gradients(g, x, nothing, (False, True))[1])
        db = None
        if of_bias:
            db = g.reshape(-1, g.shape[-1]).sum(0) if len(geometry.shape) == 2 else g.flatten(2).sum((0, 2))
        return dx, dw if of_mean else None, dw2 if of_variance else None, db, None, None, None


def _native(
    x: Tensor, values: Tensor, variance: Tensor | None, bias: Tensor | None, pattern: Pattern, grid: Grid,
    collect: Collector | None,
) -> Any:  # fmt: skip
    """Outputs, a pair of them with a variance; without autograd's share of the time where nobody asks for gradients."""
    tracked = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, values, variance, bias))
    if tracked:
        return _Native.apply(x, values, variance, bias, pattern, grid, collect)
    return _forward(x, values, variance, bias, pattern, grid)


def _forward(
    x: Tensor, values: Tensor, variance: Tensor | None, bias: Tensor | None, pattern: Pattern, grid: Grid
) -> Any:
    lead = x.shape[:-1] if len(pattern.geometry.shape) == 2 else x.shape[:1]
    y = x.new_empty((*lead, *grid.outputs))
    y2 = None if variance is None else torch.empty_like(y)
    by_output = pattern.structure(grid, back=False)
    _call("caveat_forward", grid, x, *by_output.addresses[:2], values, variance, bias, y, y2)
    return y if y2 is None else (y, y2)


def _call(name: str, grid: Grid, *given: Tensor | int | None) -> None:
    """A kernel on tensors, which are made contiguous, and addresses; None where there is nothing."""
    library = native.library()
    assert library is not None  # there is no grid without it
    tensors = [a.contiguous() if isinstance(a, Tensor) else a for a in given]  # keeps them until the kernel is done
    places = [a.data_ptr() if isinstance(a, Tensor) else a for a in tensors]
    if getattr(library, name)(grid.address, *places, torch.get_num_threads()):
        raise MemoryError(f"no memory for {grid.rows[0]} + {grid.rows[1]} rows of {grid.plan[4]} numbers")
