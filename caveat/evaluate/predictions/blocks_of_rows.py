"""The rows of a data set in blocks large enough that making a posterior draw is cheap beside using it."""

from collections.abc import Iterator

import torch

from caveat.batches import Inputs, concatenate, tensors
from caveat.rows import Batch, Rows

__all__ = ["row_blocks"]


def row_blocks(rows: Rows, size: int) -> Iterator[Batch]:
    """Go through all rows once, in order, in batches joined until they hold `size` rows or more, or differ in shape."""
    waiting: list[Batch] = []
    for batch in rows.ordered():
        # Batches may have been padded to different lengths, and those cannot be joined.
        fits = not waiting or _row_shapes(batch) == _row_shapes(waiting[0])
        if not fits or sum(len(y) for _, y in waiting) >= size:
            yield _one_batch(waiting)
            waiting = []
        waiting.append(batch)
    yield _one_batch(waiting)


def _one_batch(batches: list[Batch]) -> Batch:
    return concatenate([x for x, _ in batches]), torch.cat([y for _, y in batches])


def _row_shapes(batch: Inputs) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape[1:]) for tensor in tensors(batch)]
