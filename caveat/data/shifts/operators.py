"""Linear maps of images that more than one shift needs.

Smoothing, zooming and shrinking treat rows and columns alike and apart, so each is a matrix for either axis, with what
happens at the border inside it:

    y = A x B^T,    A [H', H],  B [W', W]

Warps take values at any place, bilinearly. All images are [N, C, H, W].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

__all__ = [
    "both_axes",
    "box_matrix",
    "convolve",
    "cut_bytes",
    "gaussian_blurred",
    "motion_blurred",
    "round_bytes",
    "warp",
    "zoom_matrix",
]

CLOSE = 1e-4  # of a byte: what float32 may be off below a whole number

Border = Literal["edge", "symmetric", "mirror"]  # aaa|abc, cba|abc and dcb|abcd before an image's first pixel


def cut_bytes(x: Tensor) -> Tensor:
    """Pixels from 0 to 1 as whole bytes, still from 0 to 1; what is between two goes to the lower one."""
    return (x * 255 + CLOSE).floor() / 255


def round_bytes(x: Tensor) -> Tensor:
    """The same, to the nearer one."""
    return (x * 255 + 0.5).floor() / 255


def both_axes(x: Tensor, matrix: Callable[[int], Tensor]) -> Tensor:
    """A x B^T, where `matrix` gives the map for an axis of given length."""
    rows, columns = (matrix(side) for side in x.shape[-2:])
    return rows @ (x @ columns.T)


def gaussian_blurred(x: Tensor, sigma: float, border: Border = "edge", truncate: float = 4.0) -> Tensor:
    """A Gaussian filter of standard deviation sigma, cut at `truncate` sigma."""
    radius = int(truncate * sigma + 0.5)
    taps = np.exp(-0.5 * (np.arange(-radius, radius + 1) / max(sigma, 1e-12)) ** 2)
    taps /= taps.sum()

    def matrix(side: int) -> Tensor:
        blur = np.zeros((side, side))
        place = np.arange(side)
        for offset, weight in zip(range(-radius, radius + 1), taps, strict=True):
            np.add.at(blur, (place, _inside(place + offset, side, border)), weight)
        return torch.from_numpy(blur).float()

    return both_axes(x, matrix) if radius else x


def zoom_matrix(side: int, factor: float) -> Tensor:
    """Cut out the middle 1/factor of an axis and stretch it to the whole, linearly between pixels, ends onto ends."""
    cut = math.ceil(side / factor)
    length = round(cut * factor)
    start, trimmed = (side - cut) // 2, (length - side) // 2
    place = (trimmed + np.arange(side)) * ((cut - 1) / max(length - 1, 1))  # within what was cut out
    low = np.minimum(np.floor(place), max(cut - 2, 0)).astype(int)
    zoom = np.zeros((side, side))
    zoom[np.arange(side), start + low] += 1 - (place - low)
    zoom[np.arange(side), start + np.minimum(low + 1, cut - 1)] += place - low
    return torch.from_numpy(zoom).float()


def box_matrix(side: int, length: int) -> Tensor:
    """Resize an axis to another length; a new pixel is the mean of the old ones whose centres it covers."""
    width = max(side / length, 1.0)
    centre = (np.arange(length)[:, None] + 0.5) * (side / length)
    away = (np.arange(side) + 0.5 - centre) / width
    covered = ((away > -0.5) & (away <= 0.5)).astype(float)
    return torch.from_numpy(covered / covered.sum(1, keepdims=True)).float()


def convolve(x: Tensor, kernel: Tensor, border: Border = "mirror") -> Tensor:
    """Correlate every channel with one kernel [K, K], K odd."""
    reach = len(kernel) // 2
    rows, columns = (torch.from_numpy(_inside(np.arange(-reach, side + reach), side, border)) for side in x.shape[-2:])
    padded = x[..., rows, :][..., columns].flatten(0, 1).unsqueeze(1)
    return F.conv2d(padded, kernel[None, None]).view_as(x)


def motion_blurred(x: Tensor, radius: int, sigma: float, degrees: Tensor) -> Tensor:
    """Smear each image in its own direction, degrees [N]: half a Gaussian along whole-pixel steps, edges repeated.

    As ImageMagick does it; the result is whole bytes.
    """
    images, channels, height, width = x.shape
    weights = torch.exp(-0.5 * (torch.arange(2 * radius + 1) / sigma) ** 2)
    weights /= weights.sum()
    radians = torch.deg2rad(degrees.double())
    steps = torch.arange(2 * radius + 1)
    down, right = ((steps * part.unsqueeze(1) - 0.5).ceil().long() for part in (radians.sin(), radians.cos()))  # [N, S]
    blurred, flat = torch.zeros_like(x), x.flatten(2)
    for step, weight in enumerate(weights.tolist()):
        rows = (torch.arange(height) + down[:, [step]]).clamp_(0, height - 1)  # [N, H]
        columns = (torch.arange(width) + right[:, [step]]).clamp_(0, width - 1)  # [N, W]
        place = (rows.unsqueeze(2) * width + columns.unsqueeze(1)).view(images, 1, -1).expand(-1, channels, -1)
        blurred.add_(flat.gather(2, place).view_as(x), alpha=weight)
    return round_bytes(blurred)


def warp(x: Tensor, rows: Tensor, columns: Tensor, border: Border | Literal["black"]) -> Tensor:
    """Values at the places rows, columns [N, H', W'], counted in pixels from the first one's centre."""
    height, width = x.shape[-2:]
    at_centres = border == "mirror"  # reflect about the centre of the last pixel, or about its outer edge
    if at_centres:
        grid = torch.stack([2 * columns / max(width - 1, 1) - 1, 2 * rows / max(height - 1, 1) - 1], -1)
    else:
        grid = torch.stack([(2 * columns + 1) / width - 1, (2 * rows + 1) / height - 1], -1)
    padding = {"black": "zeros", "edge": "border", "symmetric": "reflection", "mirror": "reflection"}[border]
    return F.grid_sample(x, grid.to(x.dtype), "bilinear", padding, align_corners=at_centres)


def _inside(place: NDArray[np.int_], side: int, border: Border) -> NDArray[np.int_]:
    """The pixel that stands for a place beyond the border."""
    if border == "edge" or side == 1:
        return place.clip(0, side - 1)
    period = 2 * side if border == "symmetric" else 2 * side - 2
    folded = place % period
    return np.where(folded < side, folded, period - folded - (border == "symmetric"))
