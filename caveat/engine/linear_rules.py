"""Rules for the linear parts of a network's operations.

Convolutions, matrix products and pooling have rules of their own (`linear_products`). Operations on each number have
slopes, made once in the forward pass. All others go through `torch.func`, one operation at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from caveat.engine.linear_products import Convolution, MaxPool, Product
from caveat.engine.linear_site import Rule, Site, Tensors, aligned, summed_to, times

__all__ = ["rule_for"]

aten = torch.ops.aten
_RESHAPING = (aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.dim)


def rule_for(site: Site, values: Sequence[Any], result: Any) -> Rule:
    """The rule of a call, with values of the shapes that it will have."""
    shapes = [values[place].shape for place in site.active]
    if site.target is aten.convolution.default and not site.leaves[3 * values[0].ndim - 3]:
        return Convolution(site, values[1].shape, result.shape)
    if site.target in (aten.mm.default, aten.addmm.default) and len(site.leaves) == len(values):
        return Product(site, shapes)
    if site.target is aten.max_pool2d_with_indices.default and values[0].ndim == 4:
        return MaxPool(values[0].shape)
    if site.target in (aten.add.Tensor, aten.sub.Tensor) and len(site.leaves) == 2:
        signs = tuple(-1 if site.target is aten.sub.Tensor and place == 1 else 1 for place in site.active)
        return _Sum(signs, shapes, result.shape)
    if site.target is aten.t.default and values[0].ndim == 2:
        return _Transposed()
    if site.target in _RESHAPING:
        return _Reshaped(values[0].shape, result.shape)
    if isinstance(result, Tensor) and torch.Tag.pointwise in getattr(site.target, "tags", ()):
        return _Pointwise(site, shapes)
    return _General(site)


@dataclass(frozen=True)
class _General:
    """Any operation, through torch.func."""

    site: Site

    def save(self, values: Sequence[Any], result: Any) -> Tensors:
        return tuple(values)

    def push(self, saved: Tensors, tangents: Sequence[Tensor]) -> Sequence[Tensor]:
        function, at = self.site.of_active(saved)

        def one(*own: Tensor) -> Tensors:
            found: Tensors = torch.func.jvp(function, at, own)[1]
            return found

        return torch.vmap(one)(*tangents)

    def pull(self, saved: Tensors, cotangents: Sequence[Tensor | None]) -> Sequence[Tensor]:
        function, at = self.site.of_active(saved)
        some = [i for i, g in enumerate(cotangents) if g is not None]
        pullback = torch.func.vjp(lambda *own: tuple(function(*own)[i] for i in some), *at)[1]
        return torch.vmap(pullback)(tuple(cotangents[i] for i in some))


@dataclass(frozen=True)
class _Reshaped:
    """The same numbers in another shape."""

    before: torch.Size
    after: torch.Size

    def save(self, values: Sequence[Any], result: Any) -> Tensors:
        return ()

    def push(self, saved: Tensors, tangents: Sequence[Tensor]) -> Sequence[Tensor]:
        return [t.reshape(-1, *self.after) for t in tangents]

    def pull(self, saved: Tensors, cotangents: Sequence[Tensor | None]) -> Sequence[Tensor]:
        return [g.reshape(-1, *self.before) for g in cotangents if g is not None]


@dataclass(frozen=True)
class _Transposed:
    """A matrix with its axes exchanged, as a linear layer's product takes its weights."""

    def save(self, values: Sequence[Any], result: Any) -> Tensors:
        return ()

    def push(self, saved: Tensors, tangents: Sequence[Tensor]) -> Sequence[Tensor]:
        return [t.mT for t in tangents]

    def pull(self, saved: Tensors, cotangents: Sequence[Tensor | None]) -> Sequence[Tensor]:
        return [g.mT for g in cotangents if g is not None]


@dataclass(frozen=True)
class _Pointwise:
    """Operations on each number: the derivatives are numbers too."""

    site: Site
    shapes: Sequence[torch.Size]

    def save(self, values: Sequence[Any], result: Any) -> Tensors:
        function, at = self.site.of_active(values)
        slopes = []
        for i in range(len(at)):
            directions = tuple(torch.ones_like(a) if i == j else torch.zeros_like(a) for j, a in enumerate(at))
            slopes.append(torch.func.jvp(function, at, directions)[1][0])
        return tuple(slopes)

    def push(self, saved: Tensors, tangents: Sequence[Tensor]) -> Sequence[Tensor]:
        total = times(aligned(tangents[0], saved[0].ndim), saved[0])
        for slope, t in zip(saved[1:], tangents[1:], strict=True):
            total = torch.addcmul(total, aligned(t, slope.ndim), slope)
        return (total,)

    def pull(self, saved: Tensors, cotangents: Sequence[Tensor | None]) -> Sequence[Tensor]:
        (g,) = cotangents
        assert g is not None
        return [summed_to(times(g, slope), shape) for slope, shape in zip(saved, self.shapes, strict=True)]


@dataclass(frozen=True)
class _Sum:
    """a + b or a - b."""

    signs: tuple[int, ...]
    shapes: Sequence[torch.Size]
    shape: torch.Size

    def save(self, values: Sequence[Any], result: Any) -> Tensors:
        return ()

    def push(self, saved: Tensors, tangents: Sequence[Tensor]) -> Sequence[Tensor]:
        first, *others = (aligned(t, len(self.shape)) for t in tangents)
        total = first if self.signs[0] > 0 else -first
        for sign, other in zip(self.signs[1:], others, strict=True):
            total = torch.add(total, other, alpha=sign)
        return (total.expand(-1, *self.shape),)

    def pull(self, saved: Tensors, cotangents: Sequence[Tensor | None]) -> Sequence[Tensor]:
        (g,) = cotangents
        assert g is not None
        found = [summed_to(g, shape) for shape in self.shapes]
        return [own if sign > 0 else -own for sign, own in zip(self.signs, found, strict=True)]
