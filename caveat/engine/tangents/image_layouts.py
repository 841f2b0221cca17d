"""K tangents of images that meet one filter, as one convolution: ways to lay them out in memory.

    rows       [K, B, H, W, C]   K B images
    depth      [B, H, W, K, C]   images with a third axis, which the filter does not reach along

The second is also what K filters beside each other make of one image, and what their gradients are made from: nothing
has to be moved between the two kinds of convolution.
"""

from typing import Protocol

import torch
from torch import Tensor

__all__ = ["DEPTH", "ROWS", "Geometry", "TangentLayout", "by_channels", "empty_by_channels"]

Geometry = tuple[list[int], list[int], list[int]]  # stride, padding, dilation, of each axis


class TangentLayout(Protocol):
    """A way to lay out K tangents of images in memory."""

    beside: bool  # whether the K numbers of a place lie beside each other

    def folded(self, t: Tensor) -> Tensor:
        """Tangents [K, B, C, ...] as images: K B of them, or B with K times as many numbers in each."""

    def unfolded(self, t: Tensor, k: int) -> Tensor:
        """The tangents [K, B, C, ...] that `folded` made these images of."""

    def empty(self, x: Tensor, k: int) -> Tensor:
        """An uninitialised tensor shaped as K folded tangents of x, for operations that look at the shape only."""

    def filter(self, weight: Tensor) -> Tensor:
        """The filter for those images."""

    def geometry(self, plain: Geometry) -> Geometry:
        """The stride, padding and dilation for those images."""


class _Rows:
    beside = False

    def folded(self, t: Tensor) -> Tensor:
        return by_channels(t.flatten(0, 1))

    def unfolded(self, t: Tensor, k: int) -> Tensor:
        return t.unflatten(0, (k, -1))

    def empty(self, x: Tensor, k: int) -> Tensor:
        return empty_by_channels((k * len(x), *x.shape[1:]), x)

    def filter(self, weight: Tensor) -> Tensor:
        return weight

    def geometry(self, plain: Geometry) -> Geometry:
        return plain


class _Depth:
    beside = True

    def folded(self, t: Tensor) -> Tensor:
        return t.permute(1, 2, 3, 4, 0).contiguous(memory_format=torch.channels_last_3d)

    def unfolded(self, t: Tensor, k: int) -> Tensor:
        return t.permute(4, 0, 1, 2, 3)

    def empty(self, x: Tensor, k: int) -> Tensor:
        return torch.empty((*x.shape, k), dtype=x.dtype, device=x.device, memory_format=torch.channels_last_3d)

    def filter(self, weight: Tensor) -> Tensor:
        return weight.unsqueeze(-1)

    def geometry(self, plain: Geometry) -> Geometry:
        stride, padding, dilation = plain
        return [*stride, 1], [*padding, 0], [*dilation, 1]


ROWS, DEPTH = _Rows(), _Depth()


def by_channels(t: Tensor) -> Tensor:
    """Images and filters with channels last in memory; other tensors contiguous."""
    return t.contiguous(memory_format=torch.channels_last) if t.ndim == 4 else t.contiguous()


def empty_by_channels(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """An uninitialised tensor with channels last, for operations that look at the shape only."""
    layout = torch.channels_last if len(shape) == 4 else torch.contiguous_format
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=layout)
