"""Labels of positions in texts that a collator pads by batch: the collator pads every batch to the longest row instead.

A label for every token makes targets as wide as the longest text of their batch, and sums over the data need one width.
The user's own collator knows how to pad, so every batch is collated with the longest row of the data beside it, which
is then taken off. That is done where the labels of padding are negative, as those are that count for nothing.
"""

import copy
from collections.abc import Callable, Mapping, Sized
from typing import Any

import numpy
import torch
from torch import Tensor

__all__ = ["padded_to_one_width"]

Collate = Callable[[list[Any]], Any]


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
