"""What the kernel of a convolution meets at each of its positions: all patches of an image, or chosen rows of them.

output[o, t] = sum_k W[o, k] patches[k, t]      k = channel and offset in the kernel, t = positions
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["Window"]


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
        pieces = [
            views[(slice(None), slice(start, end), *place)].flatten(2)
            for place, (start, end) in zip(places, pairwise([0, *ends]), strict=True)
        ]
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
