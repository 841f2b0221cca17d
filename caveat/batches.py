"""Batches of inputs: one tensor, or a dict or tuple of tensors that share their first axis.

A dict is passed to the module as keyword arguments, a tuple as positional ones. Any mapping (what a tokenizer returns)
counts as a dict. Entries that are not tensors (a flag, a string) and tensors without axes ride along untouched.

`padded_to_one_width`: a label for every token makes targets as wide as the longest text of their
batch where a collator pads by batch, and sums over the data need one width. The user's own collator knows how to pad,
so every batch is collated with the longest row of the data beside it, which is then taken off. That is done where the
labels of padding are negative, as those are that count for nothing.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any

import numpy
import torch
from torch import Tensor

__all__ = ["Inputs", "as_inputs", "concatenate", "count_rows", "first_not_finite", "map_tensors", "move",
           "outside_inference_mode", "padded_to_one_width", "slices", "tensors"]  # fmt: skip

Inputs = Any  # Tensor | dict[str, Tensor | Any] | tuple[Tensor | Any, ...]
Collate = Callable[[list[Any]], Any]


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


def padded_to_one_width(
    collate: Collate, dataset: Any, rows: list[int], targets_of: Callable[[Any], Tensor]
) -> Collate:
    """The collator, which pads all batches to one width where the labels that it makes would have several."""
    first = dataset[rows[0]]
    try:
        labels = targets_of(collate([copy.deepcopy(first)]))
    except Exception:  # rows that do not fit are told of where they are read
        return collate
    if labels.ndim != 2 or labels.is_floating_point():
        return collate
    lengths = [_length(dataset[row]) for row in rows]
    longest, shortest = (dataset[rows[lengths.index(end)]] for end in (max(lengths), min(lengths)))
    wider = _WithLongest(collate, longest)
    if max(lengths) == min(lengths) or not _pads_with_nothing(collate, wider, shortest, targets_of):
        return collate
    return wider


class _WithLongest:
    """Collates rows with another beside them, and takes that one off."""

    def __init__(self, collate: Collate, longest: Any) -> None:
        self.collate, self.longest = collate, longest

    def __call__(self, rows: list[Any]) -> Any:
        # A collator may take entries out of the rows that it is given.
        return _without_last(self.collate([*rows, copy.deepcopy(self.longest)]), len(rows))


def _length(row: Any) -> int:
    """Of a row's longest entry that is a sequence."""
    entries = row.values() if isinstance(row, Mapping) else row if isinstance(row, list | tuple) else [row]
    sized = [entry for entry in entries if isinstance(entry, Sized) and not isinstance(entry, str | bytes)]
    return max((len(entry) for entry in sized if not isinstance(entry, Tensor) or entry.ndim), default=0)


def _pads_with_nothing(collate: Collate, wider: Collate, row: Any, targets_of: Callable[[Any], Tensor]) -> bool:
    """Whether what is put beside a row's labels, on either side, is one negative number."""
    alone, beside = (targets_of(each([copy.deepcopy(row)]))[0] for each in (collate, wider))
    extra = len(beside) - len(alone)
    if extra <= 0:
        return False
    for kept, padding in ((beside[:-extra], beside[-extra:]), (beside[extra:], beside[:extra])):
        if torch.equal(kept, alone) and bool((padding == padding[0]).all()) and int(padding[0]) < 0:
            return True
    return False


def _without_last(batch: Any, count: int) -> Any:
    """The first rows of everything in a batch."""
    if isinstance(batch, Mapping):
        return {name: _without_last(value, count) for name, value in batch.items()}
    if isinstance(batch, list | tuple) and any(isinstance(part, Tensor | Mapping) for part in batch):
        return tuple(_without_last(part, count) for part in batch)
    is_by_row = isinstance(batch, Tensor | list | tuple | numpy.ndarray) and len(batch) == count + 1
    return batch[:count] if is_by_row else batch
