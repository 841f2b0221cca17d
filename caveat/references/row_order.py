"""Which row of a data set each row of published predictions is about.

Publishers shuffle: the library that they read a data set with has an order of its own. Their inputs tell, whatever they
did to them, as long as it was one scale and one shift for each channel: what is compared of an image are its channels,
each brought to mean 0 and standard deviation 1; of a table the columns, likewise, over all rows.
"""

import numpy as np
import torch
from torch import Tensor

__all__ = ["match_inputs", "stretch_of_labels"]

SAME = 0.02  # largest difference of a standardised number between two copies of a row, rounded to a byte or so
_DIRECTIONS = 24  # onto which rows are projected to find candidates
_BLOCK = 1000  # rows that are compared with all others at once


def match_inputs(known: Tensor, published: np.ndarray) -> Tensor:
    """For each row of a data set, [N, ...], the row of published inputs that is the same; -1 where there is none.

    Published images may be flat, or have their channels last.
    """
    ours, numbers = _standardised(known), torch.from_numpy(np.ascontiguousarray(published)).double()
    found = [_nearest(ours, _standardised(layout)) for layout in _layouts(known, numbers)]
    if not found:
        raise ValueError(
            f"the published inputs have shape {list(published.shape)}, the data set's {list(known.shape)}: give "
            "as many numbers a row"
        )
    return max(found, key=lambda places: int((places >= 0).sum()))


def stretch_of_labels(known: Tensor, published: Tensor) -> int | None:
    """Where published labels begin among a data set's; None where they are not there, or at more than one place."""
    windows = known.unfold(0, len(published), 1) if len(published) <= len(known) else known.new_zeros(0, 1)
    starts = (windows == published).all(1).nonzero().flatten() if len(windows) else known.new_zeros(0)
    return int(starts[0]) if len(starts) == 1 else None


def _layouts(known: Tensor, published: Tensor) -> list[Tensor]:
    """The published inputs in the shape of the data set's, each way that this can be meant."""
    shape = known.shape[1:]
    if published.shape[1:].numel() != shape.numel():
        return []
    last = (*shape[1:], shape[0]) if len(shape) == 3 else None
    layouts = []
    if published.ndim == 2 or published.shape[1:] == shape or (len(shape) == 3 and published.shape[1:] == shape[1:]):
        layouts.append(published.reshape(-1, *shape))
    if last is not None and (published.ndim == 2 or published.shape[1:] == last):
        layouts.append(published.reshape(-1, *last).movedim(-1, 1))
    return layouts


def _standardised(x: Tensor) -> Tensor:
    """Rows as flat numbers that a change of scale or of zero leaves alone, [N, D] in float32."""
    x = x.double()
    x = x.flatten(2) if x.ndim > 2 else x
    axis = -1 if x.ndim == 3 else 0
    centred = x - x.mean(axis, keepdim=True)
    scale = centred.square().mean(axis, keepdim=True).sqrt()
    flat = (centred / torch.where(scale > 1e-9, scale, 1)).flatten(1)
    return flat.float()


def _nearest(ours: Tensor, published: Tensor) -> Tensor:
    """The published row next to each of ours in a few directions, where all its numbers are the same."""
    directions = torch.randn(ours.shape[1], _DIRECTIONS, generator=torch.Generator().manual_seed(0))
    near = published @ directions
    places = torch.cat([torch.cdist(block @ directions, near).argmin(1) for block in ours.split(_BLOCK)])
    apart = torch.cat(
        [
            (block - published[chosen]).abs().amax(1)
            for block, chosen in zip(ours.split(_BLOCK), places.split(_BLOCK), strict=True)
        ]
    )
    return torch.where(apart <= SAME, places, -1)
