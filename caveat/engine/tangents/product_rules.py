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

from caveat.engine.tangents import image_layouts, lazy_sums
from caveat.engine.tangents.call_site import Site, Tensors, aligned, summed_to
from caveat.engine.tangents.image_layouts import Geometry, TangentLayout, by_channels, empty_by_channels
from caveat.engine.tangents.lazy_sums import Terms

__all__ = ["ConvolutionRule", "MatrixProductRule", "MaxPoolRule"]

ALONE_FROM = 64  # output channels from which a convolution fills a CPU without others beside it
GPU_LAYOUT: TangentLayout = image_layouts.DEPTH  # a fifth faster than rows for ResNet-18 on an H200
aten = torch.ops.aten


class ConvolutionRule:
    """Convolution of any dimension, stride, dilation and number of groups, not transposed."""

    def __init__(self, site: Site, weight: torch.Size, result: Tensor) -> None:
        n = result.ndim - 2
        self.active = tuple(site.slots[place] for place in site.active)  # 0: inputs, 1: weight, 2: bias
        self.weight, self.outputs = weight, result.shape
        stride, padding, dilation = (list(site.leaves[3 + n * i : 3 + n * (i + 1)]) for i in range(3))
        self.plain: Geometry = (stride, padding, dilation)
        self.groups: int = site.leaves[-1]
        self.on_gpu = result.device.type in lazy_sums.FUSING
        self.layout: TangentLayout = GPU_LAYOUT if self.on_gpu and n == 2 else image_layouts.ROWS
        self.alone = not self.on_gpu and weight[0] >= ALONE_FROM
        # A kernel of one place reads every stride-th place only. It is given those: oneDNN's gradient of such a weight
        # with fewer than sixteen input channels writes past its memory (its issue 6035).
        thins = not self.on_gpu and set(weight[2:]) == {1} and not any(padding) and max(stride) > 1
        self.thinned = (slice(None), slice(None), *(slice(None, None, step) for step in stride)) if thins else None
        self.of_weights: Geometry = ([1] * n, padding, dilation) if thins else self.plain

    def save(self, values: Sequence[Any], result: Any) -> Tensors:
        """What `push` and `pull` need of the forward pass."""
        return (by_channels(values[0]), by_channels(values[1]))

    def push(self, saved: Tensors, tangents: Sequence[Terms]) -> Sequence[Terms]:
        """Tangents of the outputs; on a GPU as terms, which are added when what follows is known."""
        x, weight = saved
        given = {part: t.whole for part, t in zip(self.active, tangents, strict=True)}
        terms: list[Tensor] = []
        if 0 in given:
            geometry = self.layout.geometry(self.plain)
            images = self._convolved(self.layout.folded(given[0]), self.layout.filter(weight), geometry)
            terms.append(self.layout.unfolded(images, len(given[0])))
        if 1 in given:
            total = terms.pop() if terms and not self.on_gpu else None
            terms.append(self._with_weights(x, given[1], total))
        if 2 in given:
            bias = given[2].unflatten(1, (-1, *[1] * (x.ndim - 2))).unsqueeze(1)  # [K, 1, O, 1, ...]
            if not terms:
                terms.append(bias.expand(-1, *self.outputs))
            elif self.on_gpu:
                terms.append(bias)
            else:
                terms[0].add_(bias)
        return (Terms(*terms),)

    def _convolved(self, x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
        result: Tensor = aten.convolution(x, weight, None, *geometry, False, [0] * (x.ndim - 2), self.groups)
        return result

    def _with_weights(self, x: Tensor, weights: Tensor, total: Tensor | None) -> Tensor:
        """The same inputs with each of K weights, added to `total` where there is one: [K, B, O, ...]."""
        x = x if self.thinned is None else by_channels(x[self.thinned])
        if self.alone:
            each = (self._convolved(x, by_channels(weight), self.of_weights) for weight in weights)
            if total is None:
                return torch.stack(list(each))
            for tangent, images in zip(total, each, strict=True):
                tangent.add_(images)
            return total
        beside = weights.unflatten(1, (self.groups, -1)).transpose(0, 1).flatten(0, 2)
        images = self._convolved(x, by_channels(beside), self.of_weights).unflatten(1, (self.groups, len(weights), -1))
        images = images.movedim(2, 0).flatten(2, 3)
        if total is not None:
            return total.add_(images)
        if self.on_gpu:
            return images
        rows = empty_by_channels((images.shape[:2].numel(), *images.shape[2:]), images)
        return rows.unflatten(0, images.shape[:2]).copy_(images)

    def pull(self, saved: Tensors, cotangents: Sequence[Terms | None]) -> Sequence[Tensor]:
        """The cotangents of the active values, [K, ...] each, from those of the outputs."""
        x, weight = saved
        assert cotangents[0] is not None
        k = len(cotangents[0].whole)
        folded = self.layout.folded(cotangents[0].whole)
        g = self.layout.unfolded(folded, k)
        pulled = []
        for part in self.active:
            if part == 0:
                like = self.layout.empty(x, k)
                geometry = self.layout.geometry(self.plain)
                of_inputs_folded = self._gradients(folded, like, self.layout.filter(weight), geometry, of_inputs=True)
                pulled.append(self.layout.unfolded(of_inputs_folded, k))
            elif part == 1:
                pulled.append(self._weights_of(g, x, weight))
            else:
                pulled.append(g.sum((1, *range(3, g.ndim))))
        return pulled

    def _gradients(self, g: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, of_inputs: bool) -> Tensor:
        wanted = [of_inputs, not of_inputs, False]
        gradients = aten.convolution_backward(
            g, x, weight, None, *geometry, False, [0] * (x.ndim - 2), self.groups, wanted
        )
        result: Tensor = gradients[0 if of_inputs else 1]
        return result

    def _weights_of(self, g: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """The gradients of the weight for each of K cotangents."""
        x = x if self.thinned is None else by_channels(x[self.thinned])
        if self.alone:
            return torch.stack(
                [self._gradients(cotangent, x, weight, self.of_weights, of_inputs=False) for cotangent in g]
            )
        apart = g.unflatten(2, (self.groups, -1)).movedim(0, 2)  # [B, G, K, O / G, ...]
        if self.layout.beside:
            beside = by_channels(apart.flatten(1, 3))
        else:
            beside = empty_by_channels((len(x), len(g) * self.weight[0], *g.shape[3:]), g)
            beside.unflatten(1, apart.shape[1:4]).copy_(apart)
        like = empty_by_channels((len(g) * self.weight[0], *self.weight[1:]), weight)
        gradients = self._gradients(beside, x, like, self.of_weights, of_inputs=False)
        return gradients.unflatten(0, (self.groups, len(g), -1)).transpose(0, 1).flatten(1, 2)


class MatrixProductRule:
    """a @ b, or c + a @ b."""

    def __init__(self, site: Site, shapes: Sequence[torch.Size]) -> None:
        self.first = 1 if site.target is aten.addmm.default else 0  # the slot of a
        self.parts = tuple("ab"[place - self.first] if place >= self.first else "c" for place in site.active)
        self.shapes = dict(zip(self.parts, shapes, strict=True))

    def save(self, values: Sequence[Any], result: Any) -> Tensors:
        """What `push` and `pull` need of the forward pass."""
        a, b = values[self.first :]
        return (a, b)

    def push(self, saved: Tensors, tangents: Sequence[Terms]) -> Sequence[Terms]:
        """The tangents of the outputs, [K, B, ...], from those of the active values."""
        a, b = saved
        given = {part: t.whole for part, t in zip(self.parts, tangents, strict=True)}
        total: Tensor | None = None
        if "a" in given:
            total = (given["a"].flatten(0, 1) @ b).unflatten(0, (-1, len(a)))
        if "b" in given:
            beside = given["b"].mT.flatten(0, 1)  # [K O, I]: K matrices are one product
            products = (a @ beside.T).unflatten(1, (-1, b.shape[1])).transpose(0, 1)
            total = products if total is None else total.add_(products)
        if "c" in given:
            c = aligned(given["c"], 2)
            total = c.expand(-1, len(a), b.shape[1]) if total is None else total + c
        assert total is not None
        return (Terms(total),)

    def pull(self, saved: Tensors, cotangents: Sequence[Terms | None]) -> Sequence[Tensor]:
        """The cotangents of the active values, [K, ...] each, from those of the outputs."""
        a, b = saved
        assert cotangents[0] is not None
        g = cotangents[0].whole
        pulled = []
        for part in self.parts:
            if part == "a":
                pulled.append((g.flatten(0, 1) @ b.T).unflatten(0, (-1, len(a))))
            elif part == "b":
                beside = g.transpose(0, 1).flatten(1)  # [rows, K O]
                pulled.append((beside.T @ a).unflatten(0, (len(g), -1)).mT)
            else:
                pulled.append(summed_to(g, self.shapes["c"]))
        return pulled


@dataclass(frozen=True)
class MaxPoolRule:
    """The tangent of a maximum is that of the entry that is largest."""

    shape: torch.Size  # of the inputs

    def save(self, values: Sequence[Any], result: Any) -> Tensors:
        """What `push` and `pull` need of the forward pass."""
        return (result[1].permute(0, 2, 3, 1),)  # [B, H', W', C], places among H W

    def push(self, saved: Tensors, tangents: Sequence[Terms]) -> Sequence[Terms]:
        """The tangents of the outputs, [K, B, ...], from those of the active values."""
        t = tangents[0].whole
        (places,) = saved
        largest = _rows_of_channels(t).gather(2, places.flatten(1, 2).expand(len(t), -1, -1, -1))
        return (Terms(largest.unflatten(2, places.shape[1:3]).movedim(-1, 2)),)

    def pull(self, saved: Tensors, cotangents: Sequence[Terms | None]) -> Sequence[Tensor]:
        """The cotangents of the active values, [K, ...] each, from those of the outputs."""
        assert cotangents[0] is not None
        g = cotangents[0].whole
        (places,) = saved
        b, c, h, w = self.shape
        pulled = g.new_zeros(len(g), b, h * w, c)
        pulled.scatter_add_(2, places.flatten(1, 2).expand(len(g), -1, -1, -1), _rows_of_channels(g))
        return (pulled.unflatten(2, (h, w)).movedim(-1, 2),)


def _rows_of_channels(t: Tensor) -> Tensor:
    """[K, B, C, H, W] as [K, B, H W, C]."""
    return t.permute(0, 1, 3, 4, 2).flatten(2, 3)
