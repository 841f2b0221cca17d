"""Batches of inputs: one tensor, or a dict or tuple of tensors that share their first axis.

A dict is passed to the module as keyword arguments, a tuple as positional ones. Entries that are not tensors
(a flag, a string) ride along untouched.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Inputs", "concatenate", "count_rows", "first_not_finite", "map_tensors", "move", "slices", "tensors"]

Inputs = Any  # Tensor | dict[str, Tensor | Any] | tuple[Tensor | Any, ...]


def map_tensors(function: Callable[[Tensor], Tensor], x: Inputs) -> Inputs:
    """Apply a function to every tensor of the inputs, keeping their structure."""
    if isinstance(x, Tensor):
        return function(x)
    if isinstance(x, dict):
        return {key: map_tensors(function, value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return tuple(map_tensors(function, value) for value in x)
    return x


def tensors(x: Inputs) -> list[Tensor]:
    """Every tensor of the inputs, in order."""
    found: list[Tensor] = []
    map_tensors(lambda tensor: found.append(tensor) or tensor, x)  # type: ignore[func-returns-value]
    return found


def count_rows(x: Inputs) -> int:
    """The length of the shared first axis."""
    lengths = {len(tensor) for tensor in tensors(x) if tensor.ndim > 0}
    if len(lengths) != 1:
        raise ValueError(
            f"inputs must be tensors that share their first axis, got lengths {sorted(lengths)} in a {type(x).__name__}"
        )
    return lengths.pop()


def move(x: Inputs, device: torch.device) -> Inputs:
    """The inputs on a device."""
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), x)


def slices(x: Inputs, size: int) -> Iterator[Inputs]:
    """The inputs in consecutive pieces of at most `size` rows; one empty piece when there are none."""
    n = count_rows(x)
    for start in range(0, max(n, 1), size):
        yield map_tensors(lambda tensor, a=start: tensor[a : a + size] if tensor.ndim else tensor, x)  # type: ignore[misc]


def concatenate(pieces: Sequence[Inputs]) -> Inputs:
    """Join batches of one structure along their first axis."""
    first = pieces[0]
    if isinstance(first, Tensor):
        return torch.cat(list(pieces)) if first.ndim else first
    if isinstance(first, dict):
        return {key: concatenate([piece[key] for piece in pieces]) for key in first}
    if isinstance(first, list | tuple):
        return tuple(concatenate(list(group)) for group in zip(*pieces, strict=True))
    return first


def first_not_finite(x: Inputs) -> int | None:
    """The first row that holds NaN or infinity, or None."""
    worst: int | None = None
    for tensor in tensors(x):
        if tensor.ndim and tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            bad = ~torch.isfinite(tensor).reshape(len(tensor), -1).all(1)
            row = int(bad.nonzero()[0])
            worst = row if worst is None else min(worst, row)
    return worst
