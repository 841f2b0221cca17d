"""The gradient of a linear layer's or a convolution's weight for each row of the batch.

    grad W[o, k] = sum_t g[o, t] a[k, t]      a = inputs, or patches of them; g = the gradient at outputs; t = positions

The whole weight takes one matrix product a row. Chosen entries are gathered and summed, or cut out of such products of
the outputs concerned: whichever moves less. A `Window` makes patches, what the kernel of a convolution meets at each of
its positions: all of an image, or chosen rows of them,

    output[o, t] = sum_k W[o, k] patches[k, t]      k = channel and offset in the kernel
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from caveat.engine.cost import working_numbers
from caveat.engine.row_gradients.uses import ChosenEntries, Split, Use

__all__ = ["ProductUse", "Window"]

# Bytes that could be moved in the time of one multiply-add: what a dense product costs against gathering.
BYTES_PER_PRODUCT = {"cpu": 0.4, "cuda": 0.08}


@dataclass
class ProductUse(Use):
    """The weight of a linear layer or a convolution (or rows of it, from `first` on)."""

    inputs: Tensor  # [N, *positions, I] or [N, I, *image], as the function took them
    weight: Tensor
    convolution: "Window | None" = None
    first: int = 0
    groups: int = 1
    outputs: int = 0  # how many rows of the weight act here
    _gathered: tuple[Split, Tensor] | None = field(default=None, repr=False)
    _kept: dict[Any, Tensor] = field(default_factory=dict, repr=False)

    @property
    def width(self) -> int:
        """How many weights one output has."""
        return self.weight[0].numel()

    def positions(self, g: Tensor) -> Tensor:
        """An output's gradient as [N, O, T]."""
        return g.flatten(2) if self.convolution else g.reshape(len(g), -1, g.shape[-1]).transpose(1, 2)

    def patches(self, part: slice, dtype: torch.dtype) -> Tensor:
        """What the weight multiplies, [n, groups * K, T]; kept for the next cotangent where there is room."""
        key = (part.start, part.stop, dtype)
        if key in self._kept:
            return self._kept[key]
        x = self.arranged(self.inputs)[part].to(dtype)
        if self.convolution is None:
            return self.positions(x)
        patches = self.convolution.patches(x)
        if len(self.inputs) * patches[:1].numel() <= 2 * working_numbers(patches):
            self._kept[key] = patches
        return patches

    def dense(self, g: Tensor, part: slice) -> Tensor:
        """One product a row; zero at the rows of the weight that do not act here."""
        g = self.positions(g[part])
        a = self.patches(part, g.dtype)
        n, t = len(g), g.shape[2]
        if self.groups > 1:
            g, a = g.reshape(n, self.groups, -1, t), a.reshape(n, self.groups, -1, t)
        products = (g @ a.transpose(-1, -2)).reshape(n, -1, *self.weight.shape[1:])
        if self.outputs == len(self.weight):
            return products
        return F.pad(
            products, [0, 0] * (self.weight.ndim - 1) + [self.first, len(self.weight) - self.first - self.outputs]
        )

    def on_the_way(self, g: Tensor) -> int:
        """The numbers in the patches of one row, which are more than those of its gradient."""
        return self.groups * self.width * (super().on_the_way(g) // self.outputs)

    def chosen(self, g: Tensor, entries: ChosenEntries) -> Tensor:
        """By gathering channels and patches, or from dense products of the outputs concerned: whichever moves less."""
        g, split = self.positions(g), entries.split(self.width, self.first, self.outputs)
        if split.mine is None:
            return self._chosen(g, split)
        gradients = g.new_zeros(len(g), len(entries.index))
        if len(split.row):
            gradients[:, split.mine] = self._chosen(g, split)
        return gradients

    def _chosen(self, g: Tensor, split: Split) -> Tensor:
        t = g.shape[2]
        dense_bytes = len(split.used) * self.width * (8 + BYTES_PER_PRODUCT[g.device.type] * t)
        dense_is_less = self.groups == 1 and 16 * len(split.row) * t > dense_bytes
        return self._from_products(g, split) if dense_is_less else self._from_gathered(g, split)

    def _from_products(self, g: Tensor, split: Split) -> Tensor:
        step = max(1, working_numbers(g) // (len(split.used) * self.width + self.width * g.shape[2]))
        pieces = []
        for start in range(0, len(g), step):
            part = slice(start, start + step)
            whole = g[part][:, split.used] @ self.patches(part, g.dtype).transpose(1, 2)  # [n, used, K]
            pieces.append(whole.flatten(1) if split.place is None else whole.flatten(1)[:, split.place])
        return _joined(pieces, 0)

    def _from_gathered(self, g: Tensor, split: Split) -> Tensor:
        n, _, t = g.shape
        step = max(1, working_numbers(g) // (n * t))
        keep = len(split.row) <= step
        pieces = []
        for start in range(0, len(split.row), step):
            o, j = split.row[start : start + step], split.k[start : start + step]
            if keep and self._gathered is not None and self._gathered[0] is split:
                a = self._gathered[1]  # the same for every cotangent
            else:
                a = self._gather(o, j, g.dtype)
                self._gathered = (split, a) if keep else None
            pieces.append((g[:, o] * a).sum(-1) if t > 1 else (g[:, o] * a).squeeze(-1))
        return _joined(pieces, 1)

    def _gather(self, row: Tensor, k: Tensor, dtype: torch.dtype) -> Tensor:
        """Chosen patches, [N, s, T]."""
        x, window = self.arranged(self.inputs), self.convolution
        if window is None:
            return self.positions(x)[:, k].to(dtype)
        channels = self.width // window.size
        group = row // (self.outputs // self.groups)
        return window.gather(x, group * channels + k // window.size, k % window.size).to(dtype)


def _joined(pieces: list[Tensor], axis: int) -> Tensor:
    """The pieces along an axis; a single one without a copy."""
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, axis)


@dataclass(frozen=True)
class Window:
    """How a convolution slides: kernel, stride, padding (before, after) and dilation of each axis."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]

    @classmethod
    def of(cls, weight: Tensor, stride: Any, padding: Any, dilation: Any) -> "Window":
        """The window of torch's arguments: one number for all axes or one for each, padding also by its name."""
        kernel = tuple(weight.shape[2:])
        dilations = _each(dilation, len(kernel))
        if isinstance(padding, str):
            reach = [d * (k - 1) for d, k in zip(dilations, kernel, strict=True)]
            pads = tuple((r // 2, r - r // 2) if padding == "same" else (0, 0) for r in reach)
        else:
            pads = tuple((p, p) for p in _each(padding, len(kernel)))
        return cls(kernel, _each(stride, len(kernel)), pads, dilations)

    @property
    def size(self) -> int:
        """How many numbers one channel of the kernel has."""
        return math.prod(self.kernel)

    def patches(self, x: Tensor) -> Tensor:
        """All patches, [N, C * size, T]."""
        if x.device.type == "cpu" and len(self.kernel) == 2 and all(a == b for a, b in self.padding):
            pads = tuple(a for a, _ in self.padding)
            return F.unfold(x, self.kernel, self.dilation, pads, self.stride)
        # One copy; a GPU's unfold goes image by image.
        return self._views(x).reshape(len(x), x.shape[1] * self.size, -1)

    def gather(self, x: Tensor, channel: Tensor, offset: Tensor) -> Tensor:
        """Chosen rows of the patches, given by their channels [s] and offsets in the kernel [s], as [N, s, T]."""
        order = offset.argsort(stable=True)
        ends = torch.bincount(offset, minlength=self.size).cumsum(0).tolist()
        views = self._views(x[:, channel[order]])  # of what is wanted alone: there may be few among many channels
        places: Iterator[tuple[Any, ...]] = product(*map(range, self.kernel))
        chosen = [(slice(None), slice(*both), *place) for place, both in zip(places, pairwise([0, *ends]), strict=True)]
        pieces = [views[one].flatten(2) for one in chosen]
        return torch.cat(pieces, 1)[:, order.argsort()]

    def _views(self, x: Tensor) -> Tensor:
        """The inputs that each offset in the kernel meets: a view [N, C, *kernel, *positions] of the padded ones."""
        padded = F.pad(x, [p for pair in reversed(self.padding) for p in pair]) if any(map(any, self.padding)) else x
        axes = list(zip(padded.shape[2:], padded.stride()[2:], self.kernel, self.stride, self.dilation, strict=True))
        positions = [(length - d * (k - 1) - 1) // s + 1 for length, _, k, s, d in axes]
        along_kernel, along_positions = [step * d for _, step, *_, d in axes], [step * s for _, step, _, s, _ in axes]
        return padded.as_strided(
            (*padded.shape[:2], *self.kernel, *positions), (*padded.stride()[:2], *along_kernel, *along_positions)
        )


def _each(value: Any, axes: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * axes if len(values) == 1 else values
