"""Geometry: the same images, rotated or moved.

An output pixel at q (pixel coordinates about the centre, y downwards) takes the value at R q of the input, where R is
the rotation by the given angle, or at q - t for a translation by t; values between pixels are bilinear, those outside
the image are `fill`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from caveat.data.shifts.draws import RowDraws
from caveat.data.shifts.operators import warp

__all__ = ["rotate", "rotation", "translation"]


def rotate(images: Tensor, degrees: float, fill: float | Sequence[float] = 0.0) -> Tensor:
    """Turn images [N, C, H, W] counter-clockwise about their centre; the shape stays.

    Multiples of 90 degrees are exact wherever they fit the shape. `fill` is the value of what comes into view, one
    for all channels or one a channel: for the images of a `DataSet`, its `preprocessing["black"]`.
    """
    if images.ndim != 4 or not images.is_floating_point():
        raise ValueError(f"rotate takes floating-point images [N, C, H, W], not {images.dtype} {tuple(images.shape)}")
    if not math.isfinite(degrees):
        raise ValueError(f"degrees={degrees} is not an angle")
    height, width = images.shape[-2:]
    turns = degrees / 90
    if turns == round(turns) and (turns % 2 == 0 or height == width):
        return torch.rot90(images, int(turns % 4), (-2, -1))
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    # affine_grid's coordinates run from -1 to 1 along both axes, whatever their lengths
    rotation = [[cosine, -sine * height / width, 0.0], [sine * width / height, cosine, 0.0]]
    theta = torch.tensor([rotation], dtype=images.dtype, device=images.device).expand(len(images), 2, 3)
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)  # [N, H, W, 2]
    background = torch.as_tensor(fill, dtype=images.dtype, device=images.device).reshape(1, -1, 1, 1)
    rotated = F.grid_sample(images - background, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    return rotated + background


def rotation(x: Tensor, degrees: float, draws: RowDraws) -> Tensor:
    """Rotated counter-clockwise; what comes into view is black."""
    return rotate(x, degrees)


def translation(x: Tensor, share: float, draws: RowDraws) -> Tensor:
    """Moved by a share of the shorter side, in a direction of each image's own; what comes into view is black."""
    height, width = x.shape[2:]
    angle = 2 * math.pi * draws.uniform(1, 1)  # [N, 1, 1]
    distance = share * min(height, width)
    rows, columns = torch.meshgrid(torch.arange(height).float(), torch.arange(width).float(), indexing="ij")
    return warp(x, rows - distance * angle.sin(), columns - distance * angle.cos(), "black")
