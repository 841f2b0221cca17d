"""The linear parts of convolutions, matrix products and pooling, for K vectors in one call each way.

    y = W * x:    dy_k = W * dx_k + dW_k * x,      gx_k = W^T * g_k,      gW_k = sum over rows and places of g_k x

K B rows share the weights in one convolution. K weights share the rows: they stand beside each other as K times as many
output channels, or come after each other where one alone has enough of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from caveat.engine.linear_site import Site, Tensors, aligned, summed_to

__all__ = ["Convolution", "MaxPool", "Product"]

ALONE_FROM = 64  # output channels from which a convolution fills the machine without others beside it
aten = torch.ops.aten


class Convolution:
    """Convolution of any dimension, stride, dilation and number of groups, not transposed."""

    def __init__(self, site: Site, weight: torch.Size, outputs: torch.Size) -> None:
        n = len(outputs) - 2
        self.active = tuple(site.slots[place] for place in site.active)  # 0: inputs, 1: weight, 2: bias
        self.weight, self.outputs = weight, outputs
        self.geometry = (*(list(site.leaves[3 + n * i : 3 + n * (i + 1)]) for i in range(3)), False, [0] * n)
        self.groups: int = site.leaves[-1]

    def save(self, values: Sequence[Any], result: Any) -> Tensors:
        """What the forward pass leaves."""
        return (_by_channels(values[0]), _by_channels(values[1]))

    def push(self, saved: Tensors, tangents: Sequence[Tensor]) -> Sequence[Tensor]:
        """Tangents of the outputs."""
        x, weight = saved
        given = dict(zip(self.active, tangents, strict=True))
        total: Tensor | None = None
        if 0 in given:
            total = self._convolved(_folded(given[0]), weight).unflatten(0, (-1, len(x)))
        if 1 in given:
            total = self._with_weights(x, given[1], total)
        if 2 in given:
            bias = given[2].unflatten(1, (-1, *[1] * (x.ndim - 2))).unsqueeze(1)  # [K, 1, O, 1, ...]
            total = bias.expand(-1, *self.outputs) if total is None else total.add_(bias)
        assert total is not None
        return (total,)

    def _convolved(self, x: Tensor, weight: Tensor) -> Tensor:
        found: Tensor = aten.convolution(x, weight, None, *self.geometry, self.groups)
        return found

    def _with_weights(self, x: Tensor, weights: Tensor, total: Tensor | None) -> Tensor:
        """The same inputs with each of K weights, added to what there is."""
        if self.weight[0] >= ALONE_FROM:
            if total is None:
                return torch.stack([self._convolved(x, _by_channels(weight)) for weight in weights])
            for weight, own in zip(weights, total, strict=True):
                own.add_(self._convolved(x, _by_channels(weight)))
            return total
        beside = weights.unflatten(1, (self.groups, -1)).transpose(0, 1).flatten(0, 2)
        found = self._convolved(x, _by_channels(beside)).unflatten(1, (self.groups, len(weights), -1))
        found = found.movedim(2, 0).flatten(2, 3)
        if total is not None:
            return total.add_(found)
        return _empty((found.shape[:2].numel(), *found.shape[2:]), found).unflatten(0, found.shape[:2]).copy_(found)

    def pull(self, saved: Tensors, cotangents: Sequence[Tensor | None]) -> Sequence[Tensor]:
        """Cotangents of the active values."""
        x, weight = saved
        (g,) = cotangents
        assert g is not None
        folded = _folded(g)
        found = []
        for part in self.active:
            if part == 0:
                like = _empty((len(folded), *x.shape[1:]), x)
                own = self._gradients(folded, like, weight, of_inputs=True).unflatten(0, (len(g), -1))
            elif part == 1:
                own = self._weights_of(folded.unflatten(0, (len(g), -1)), x, weight)
            else:
                own = folded.sum(tuple(range(2, folded.ndim))).unflatten(0, (len(g), -1)).sum(1)
            found.append(own)
        return found

    def _gradients(self, g: Tensor, x: Tensor, weight: Tensor, of_inputs: bool) -> Tensor:
        wanted = [of_inputs, not of_inputs, False]
        found = aten.convolution_backward(g, x, weight, None, *self.geometry, self.groups, wanted)
        result: Tensor = found[0 if of_inputs else 1]
        return result

    def _weights_of(self, g: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """The gradients of the weight for each of K cotangents."""
        if self.weight[0] >= ALONE_FROM:
            return torch.stack([self._gradients(own, x, weight, of_inputs=False) for own in g])
        apart = g.unflatten(2, (self.groups, -1)).movedim(0, 2)  # [B, G, K, O / G, ...]
        beside = _empty((len(x), len(g) * self.weight[0], *g.shape[3:]), g)
        beside.unflatten(1, apart.shape[1:4]).copy_(apart)
        like = _empty((len(g) * self.weight[0], *self.weight[1:]), weight)
        found = self._gradients(beside, x, like, of_inputs=False)
        return found.unflatten(0, (self.groups, len(g), -1)).transpose(0, 1).flatten(1, 2)


class Product:
    """a @ b, or c + a @ b."""

    def __init__(self, site: Site, shapes: Sequence[torch.Size]) -> None:
        self.first = 1 if site.target is aten.addmm.default else 0  # the slot of a
        self.parts = tuple("ab"[place - self.first] if place >= self.first else "c" for place in site.active)
        self.shapes = dict(zip(self.parts, shapes, strict=True))

    def save(self, values: Sequence[Any], result: Any) -> Tensors:
        """What the forward pass leaves."""
        a, b = values[self.first :]
        return (a, b)

    def push(self, saved: Tensors, tangents: Sequence[Tensor]) -> Sequence[Tensor]:
        """Tangents of the outputs."""
        a, b = saved
        given = dict(zip(self.parts, tangents, strict=True))
        total: Tensor | None = None
        if "a" in given:
            total = (given["a"].flatten(0, 1) @ b).unflatten(0, (-1, len(a)))
        if "b" in given:
            beside = given["b"].mT.flatten(0, 1)  # [K O, I]: K matrices are one product
            found = (a @ beside.T).unflatten(1, (-1, b.shape[1])).transpose(0, 1)
            total = found if total is None else total.add_(found)
        if "c" in given:
            c = aligned(given["c"], 2)
            total = c.expand(-1, len(a), b.shape[1]) if total is None else total + c
        assert total is not None
        return (total,)

    def pull(self, saved: Tensors, cotangents: Sequence[Tensor | None]) -> Sequence[Tensor]:
        """Cotangents of the active values."""
        a, b = saved
        (g,) = cotangents
        assert g is not None
        found = []
        for part in self.parts:
            if part == "a":
                found.append((g.flatten(0, 1) @ b.T).unflatten(0, (-1, len(a))))
            elif part == "b":
                beside = g.transpose(0, 1).flatten(1)  # [rows, K O]
                found.append((beside.T @ a).unflatten(0, (len(g), -1)).mT)
            else:
                found.append(summed_to(g, self.shapes["c"]))
        return found


@dataclass(frozen=True)
class MaxPool:
    """The tangent of a maximum is that of the entry that is largest."""

    shape: torch.Size  # of the inputs

    def save(self, values: Sequence[Any], result: Any) -> Tensors:
        """What the forward pass leaves."""
        return (result[1].permute(0, 2, 3, 1),)  # [B, H', W', C], places among H W

    def push(self, saved: Tensors, tangents: Sequence[Tensor]) -> Sequence[Tensor]:
        """Tangents of the outputs."""
        (t,) = tangents
        (places,) = saved
        found = _rows_of_channels(t).gather(2, places.flatten(1, 2).expand(len(t), -1, -1, -1))
        return (found.unflatten(2, places.shape[1:3]).movedim(-1, 2),)

    def pull(self, saved: Tensors, cotangents: Sequence[Tensor | None]) -> Sequence[Tensor]:
        """Cotangents of the active values."""
        g = cotangents[0]
        assert g is not None
        (places,) = saved
        b, c, h, w = self.shape
        found = g.new_zeros(len(g), b, h * w, c)
        found.scatter_add_(2, places.flatten(1, 2).expand(len(g), -1, -1, -1), _rows_of_channels(g))
        return (found.unflatten(2, (h, w)).movedim(-1, 2),)


def _by_channels(t: Tensor) -> Tensor:
    """Images and filters with channels last."""
    return t.contiguous(memory_format=torch.channels_last) if t.ndim == 4 else t.contiguous()


def _empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """In the place of numbers of which an operation wants the shape only."""
    layout = torch.channels_last if len(shape) == 4 else torch.contiguous_format
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=layout)


def _folded(t: Tensor) -> Tensor:
    """[K, B, ...] as [K B, ...]."""
    return _by_channels(t.flatten(0, 1))


def _rows_of_channels(t: Tensor) -> Tensor:
    """[K, B, C, H, W] as [K, B, H W, C]."""
    return t.permute(0, 1, 3, 4, 2).flatten(2, 3)
