"""Whether a step of a network acts on each channel alone, found by trying: with all channels, and with half of them.

    f(x[kept channels]) = f(x)[kept channels]      for random x in float64

A step for which this holds may also move the channels to another dimension, or make several entries of one (flattening
a map); steps that mix channels, or that were made for a fixed number of them, fail.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from caveat.batches import tensors
from caveat.engine.channels.narrowing import Axis, axis_entries, resize

__all__ = ["axis_length", "close", "cut", "module_tensors", "trial"]


def trial(
    compute: Callable[[list[Tensor], Tensor | None], Any],
    inputs: list[tuple[torch.Size, int]],  # shapes, and which dimension has the channels
    axis: Axis,
    rng: torch.Generator,
) -> tuple[int, int] | str | None:
    """Where a step puts the channels: the dimension, and how many entries there for each one before.

    None where its result does not depend on them; where it does not act on each alone, how that shows.
    """
    axis = tuple(replace(segment, space=place) for place, segment in enumerate(axis))
    halves = {i: torch.randperm(s.width, generator=rng)[: (s.width + 1) // 2].sort().values for i, s in enumerate(axis)}
    kept = axis_entries(axis, halves)
    wide = [torch.randn(shape, generator=rng, dtype=torch.float64) for shape, _ in inputs]
    thin = [x.index_select(dimension, kept) for x, (_, dimension) in zip(wide, inputs, strict=True)]
    try:
        y, y_thin, y_zero = compute(wide, None), compute(thin, kept), compute([0 * x for x in wide], None)
    except Exception:  # whatever it raises on fewer channels than it was made for
        return "needs all of them"
    if not isinstance(y, Tensor):
        return None if isinstance(y, bool | int | float | torch.dtype | torch.device) and y == y_thin else "mixes them"
    if not y_zero.isfinite().all():
        return "is not finite where a channel is zero"
    if y.ndim != y_thin.ndim:
        return "mixes them"
    changed = [d for d, (n, m) in enumerate(zip(y.shape, y_thin.shape, strict=True)) if n != m]
    if not changed and close(y, y_thin):
        return None
    if len(changed) != 1 or y.shape[changed[0]] % axis_length(axis):
        return "mixes them"
    times = y.shape[changed[0]] // axis_length(axis)
    spread = axis_entries(tuple(replace(segment, block=segment.block * times) for segment in axis), halves)
    if len(spread) != y_thin.shape[changed[0]] or not close(y.index_select(changed[0], spread), y_thin):
        return "mixes them"
    return changed[0], times


def close(one: Any, other: Any) -> bool:
    """Whether all tensors of two results agree to rounding."""
    pairs = [(_real(a), _real(b)) for a, b in zip(tensors(one), tensors(other), strict=True) if a.numel()]
    scales = [float(a.nan_to_num(posinf=0, neginf=0).abs().max()) for a, _ in pairs]
    return all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-9, atol=1e-9 * scale, equal_nan=True)
        for (a, b), scale in zip(pairs, scales, strict=True)
    )


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x.double()


def cut(module: nn.Module, size: int, kept: Tensor) -> nn.Module:
    """A module with one number a channel in each of its tensors, for some of the channels."""
    memo: dict[int, Any] = {}
    for tensor in module_tensors(module).values():
        if tensor.numel() > 1:
            values = tensor.detach().index_select(tensor.shape.index(size), kept)
            memo[id(tensor)] = nn.Parameter(values) if isinstance(tensor, nn.Parameter) else values
    result: nn.Module = copy.deepcopy(module, memo)
    resize(result, size, len(kept))
    return result


def module_tensors(module: nn.Module) -> dict[str, Tensor]:
    """A module's parameters and buffers, by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def axis_length(axis: Axis) -> int:
    """How many entries an axis has."""
    return sum(segment.width * segment.block for segment in axis)
