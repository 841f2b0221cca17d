"""Batches of inputs: one tensor, or a dict or tuple of tensors that share their first axis.

A dict is passed to the module as keyword arguments, a tuple as positional ones. Any mapping (what a tokenizer returns)
counts as a dict. Entries that are not tensors (a flag, a string) and tensors without axes ride along untouched.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

__all__ = ["Inputs", "as_inputs", "concatenate", "count_rows", "first_not_finite", "map_tensors", "move",
           "outside_inference_mode", "slices", "tensors"]  # fmt: skip

Inputs = Any  # Tensor | dict[str, Tensor | Any] | tuple[Tensor | Any, ...]


def map_tensors(function: Callable[[Tensor], Tensor], x: Inputs) -> Inputs:
    """Apply a function to every tensor of the inputs, keeping their structure."""
    if isinstance(x, Tensor):
        return function(x)
    if isinstance(x, Mapping):
        return {key: map_tensors(function, value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return tuple(map_tensors(function, value) for value in x)
    return x


def as_inputs(x: Any, dtype: torch.dtype) -> Inputs:
    """What a person passes as inputs, with numpy arrays as tensors; their floating-point numbers become of a type.

    Numpy makes float64 of everything, so its type says nothing; that of a tensor was chosen and stays.
    """
    if isinstance(x, numpy.ndarray) and x.dtype.kind in "biuf":
        tensor = torch.as_tensor(numpy.ascontiguousarray(x))
        return tensor.to(dtype) if tensor.is_floating_point() else tensor
    if isinstance(x, Mapping):
        return {key: as_inputs(value, dtype) for key, value in x.items()}
    return tuple(as_inputs(value, dtype) for value in x) if isinstance(x, list | tuple) else x


def tensors(x: Inputs) -> list[Tensor]:
    """Every tensor of the inputs, in order."""
    if isinstance(x, Tensor):
        return [x]
    values = x.values() if isinstance(x, Mapping) else x if isinstance(x, list | tuple) else ()
    return [tensor for value in values for tensor in tensors(value)]


def count_rows(x: Inputs) -> int:
    """The length of the shared first axis."""
    lengths = {len(tensor) for tensor in tensors(x) if tensor.ndim}
    if len(lengths) != 1:
        raise ValueError(
            f"inputs must be tensors that share their first axis, got lengths {sorted(lengths)} in a "
            f"{type(x).__name__}: give every tensor one entry a row"
        )
    return lengths.pop()


def move(x: Inputs, device: torch.device) -> Inputs:
    """The inputs on a device."""
    # A copy to the CPU that does not block could be read before it is there.
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=device.type != "cpu"), x)


def outside_inference_mode(x: Inputs) -> Inputs:
    """The inputs, with copies of tensors that were made in inference mode: nothing is differentiated through those."""
    return map_tensors(lambda tensor: tensor.clone() if tensor.is_inference() else tensor, x)


def slices(x: Inputs, size: int) -> Iterator[Inputs]:
    """The inputs in consecutive pieces of at most `size` rows; one empty piece when there are none."""
    for start in range(0, max(count_rows(x), 1), size):
        rows = slice(start, start + size)
        yield map_tensors(lambda tensor, rows=rows: tensor[rows] if tensor.ndim else tensor, x)  # type: ignore[misc]


def concatenate(pieces: Sequence[Inputs]) -> Inputs:
    """Join batches of one structure along their first axis."""
    first = pieces[0]
    if isinstance(first, Tensor):
        return torch.cat(list(pieces)) if first.ndim else first
    if isinstance(first, Mapping):
        return {key: concatenate([piece[key] for piece in pieces]) for key in first}
    if isinstance(first, list | tuple):
        return tuple(concatenate(group) for group in zip(*pieces, strict=True))
    return first


def first_not_finite(x: Inputs) -> int | None:
    """The first row that holds NaN or infinity, or None."""
    numbers = (tensor for tensor in tensors(x) if tensor.ndim and tensor.is_floating_point())
    # A sum is quick, and finite only where all its terms are.
    bad = (~torch.isfinite(tensor) for tensor in numbers if not bool(tensor.sum().isfinite()))
    return min((int(rows.nonzero()[0, 0]) for rows in bad if bool(rows.any())), default=None)
