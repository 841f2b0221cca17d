"""The rows of a data set in blocks large enough that making a posterior draw is cheap beside using it."""

from collections.abc import Iterator

import torch

from caveat.batches import Inputs, concatenate, tensors
from caveat.rows import Batch, Rows

__all__ = ["blocks"]


def blocks(rows: Rows, size: int) -> Iterator[Batch]:
    """All rows once, in order: whole batches joined until they hold at least `size` rows, or differ in shape."""
    held: list[Batch] = []
    for batch in rows.ordered():
        fits = not held or _row_shapes(batch) == _row_shapes(held[0])  # batches padded to a length of their own do not
        if not fits or sum(len(y) for _, y in held) >= size:
            yield _joined(held)
            held = []
        held.append(batch)
    yield _joined(held)


def _joined(held: list[Batch]) -> Batch:
    return concatenate([x for x, _ in held]), torch.cat([y for _, y in held])


def _row_shapes(batch: Inputs) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape[1:]) for tensor in tensors(batch)]
