"""Rules for the linear parts of a network's operations.

Convolutions, matrix products and pooling have rules of their own (`product_rules`). Operations on each number have
slopes, made once in the forward pass. All others go through `torch.func`, one operation at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from caveat.engine.tangents.call_site import Rule, Site, Tensors, aligned, is_floating, summed_to
from caveat.engine.tangents.lazy_sums import Terms, times_slope
from caveat.engine.tangents.product_rules import ConvolutionRule, MatrixProductRule, MaxPoolRule
from caveat.engine.torch_settings import jvp

__all__ = ["rule_for"]

aten = torch.ops.aten
_RESHAPING = (aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim)


def rule_for(site: Site, values: Sequence[Any], result: Any) -> Rule:
    """The rule of a call, with values of the shapes that it will have."""
    shapes = [values[place].shape for place in site.active]
    if site.target is aten.convolution.default and not site.leaves[3 * values[0].ndim - 3]:
        return ConvolutionRule(site, values[1].shape, result)
    if site.target in (aten.mm.default, aten.addmm.default) and len(site.leaves) == len(values):
        return MatrixProductRule(site, shapes)
    if site.target is aten.max_pool2d_with_indices.default and values[0].ndim == 4:
        return MaxPoolRule(values[0].shape)
    if site.target in (aten.add.Tensor, aten.sub.Tensor) and len(site.leaves) == 2:
        signs = tuple(-1 if site.target is aten.sub.Tensor and place == 1 else 1 for place in site.active)
        return _Sum(signs, shapes, result.shape)
    if site.target is aten.t.default and values[0].ndim == 2:
        return _Transposed()
    if site.target in _RESHAPING:
        return _Reshaped(values[0].shape, result.shape)
    if site.target in (aten._to_copy.default, aten.clone.default) and is_floating(result):
        return _Copied(values[0].dtype, result.dtype)
    if isinstance(result, Tensor) and torch.Tag.pointwise in getattr(site.target, "tags", ()):
        return _Pointwise(site, shapes)
    return _General(site)


@dataclass(frozen=True)
class _General:
    """Any operation, through torch.func."""

    site: Site

    def save(self, values: Sequence[Any], result: Any) -> Tensors:
        # Some of torch's own formulas take views of numbers in the order of the axes.
        return tuple(value.contiguous() if isinstance(value, Tensor) else value for value in values)

    def push(self, saved: Tensors, tangents: Sequence[Terms]) -> Sequence[Terms]:
        function, at = self.site.of_active(saved)

        def one(*tangent: Tensor) -> Tensors:
            derivatives: Tensors = jvp(function, at, tangent)[1]
            return derivatives

        return [Terms(t) for t in torch.vmap(one)(*(t.whole for t in tangents))]

    def pull(self, saved: Tensors, cotangents: Sequence[Terms | None]) -> Sequence[Tensor]:
        function, at = self.site.of_active(saved)
        some = {i: g.whole for i, g in enumerate(cotangents) if g is not None}
        pullback = torch.func.vjp(lambda *active_values: tuple(function(*active_values)[i] for i in some), *at)[1]
        return torch.vmap(pullback)(tuple(some.values()))


@dataclass(frozen=True)
class _Reshaped:
    """The same numbers in another shape."""

    before: torch.Size
    after: torch.Size

    def save(self, values: Sequence[Any], result: Any) -> Tensors:
        return ()

    def push(self, saved: Tensors, tangents: Sequence[Terms]) -> Sequence[Terms]:
        return [Terms(t.whole.reshape(-1, *self.after)) for t in tangents]

    def pull(self, saved: Tensors, cotangents: Sequence[Terms | None]) -> Sequence[Tensor]:
        return [g.whole.reshape(-1, *self.before) for g in cotangents if g is not None]


@dataclass(frozen=True)
class _Copied:
    """The same numbers, of another type where a lower precision is asked for."""

    before: torch.dtype
    after: torch.dtype

    def save(self, values: Sequence[Any], result: Any) -> Tensors:
        return ()

    def push(self, saved: Tensors, tangents: Sequence[Terms]) -> Sequence[Terms]:
        return [Terms(t.whole.to(self.after)) for t in tangents]

    def pull(self, saved: Tensors, cotangents: Sequence[Terms | None]) -> Sequence[Tensor]:
        return [g.whole.to(self.before) for g in cotangents if g is not None]


@dataclass(frozen=True)
class _Transposed:
    """A matrix with its axes exchanged, as a linear layer's product takes its weights."""

    def save(self, values: Sequence[Any], result: Any) -> Tensors:
        return ()

    def push(self, saved: Tensors, tangents: Sequence[Terms]) -> Sequence[Terms]:
        return [Terms(t.whole.mT) for t in tangents]

    def pull(self, saved: Tensors, cotangents: Sequence[Terms | None]) -> Sequence[Tensor]:
        return [g.whole.mT for g in cotangents if g is not None]


@dataclass(frozen=True)
class _Pointwise:
    """Operations on each number: the derivatives are numbers too."""

    site: Site
    shapes: Sequence[torch.Size]

    def save(self, values: Sequence[Any], result: Any) -> Tensors:
        if self.site.target is aten.relu.default:
            return (torch.gt(result, 0, out=torch.empty_like(result)),)
        function, at = self.site.of_active(values)
        slopes = []
        for i in range(len(at)):
            directions = tuple(torch.ones_like(a) if i == j else torch.zeros_like(a) for j, a in enumerate(at))
            slopes.append(jvp(function, at, directions)[1][0])
        return tuple(slopes)

    def push(self, saved: Tensors, tangents: Sequence[Terms]) -> Sequence[Terms]:
        if len(saved) == 1 and self.shapes[0] == saved[0].shape:
            return (Terms(tangents[0].times(saved[0])),)
        total = times_slope(aligned(tangents[0].whole, saved[0].ndim), saved[0])
        for slope, t in zip(saved[1:], tangents[1:], strict=True):
            total = torch.addcmul(total, aligned(t.whole, slope.ndim), slope)
        return (Terms(total),)

    def pull(self, saved: Tensors, cotangents: Sequence[Terms | None]) -> Sequence[Tensor]:
        (g,) = cotangents
        assert g is not None
        if len(saved) == 1:
            return (summed_to(g.times(saved[0]), self.shapes[0]),)
        return [summed_to(times_slope(g.whole, slope), shape) for slope, shape in zip(saved, self.shapes, strict=True)]


@dataclass(frozen=True)
class _Sum:
    """a + b or a - b."""

    signs: tuple[int, ...]
    shapes: Sequence[torch.Size]
    shape: torch.Size

    def save(self, values: Sequence[Any], result: Any) -> Tensors:
        return ()

    def push(self, saved: Tensors, tangents: Sequence[Terms]) -> Sequence[Terms]:
        if all(shape == self.shape for shape in self.shapes) and min(self.signs) > 0:
            return (sum(tangents[1:], start=tangents[0]),)
        first, *others = (aligned(t.whole, len(self.shape)) for t in tangents)
        total = first if self.signs[0] > 0 else -first
        for sign, other in zip(self.signs[1:], others, strict=True):
            total = torch.add(total, other, alpha=sign)
        return (Terms(total.expand(-1, *self.shape)),)

    def pull(self, saved: Tensors, cotangents: Sequence[Terms | None]) -> Sequence[Tensor]:
        (g,) = cotangents
        assert g is not None
        summed = [summed_to(g.whole, shape) for shape in self.shapes]
        return [cotangent if sign > 0 else -cotangent for sign, cotangent in zip(self.signs, summed, strict=True)]
