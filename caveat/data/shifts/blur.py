"""Blur: Gaussian, out of focus, through frosted glass, by motion and by zooming."""

import math

import numpy as np
import torch
from torch import Tensor

from caveat.data.shifts.draws import Corruptions, RowDraws
from caveat.data.shifts.operators import (
    both_axes,
    convolve,
    cut_bytes,
    gaussian_blurred,
    motion_blurred,
    zoom_matrix,
)

__all__ = ["BLUR"]


def gaussian_blur(x: Tensor, sigma: float, draws: RowDraws) -> Tensor:
    """Blur with a Gaussian filter of standard deviation sigma."""
    return gaussian_blurred(x, sigma)


def defocus_blur(x: Tensor, constants: tuple[float, float], draws: RowDraws) -> Tensor:
    """A disk, itself softened by a 3 x 3 Gaussian: (radius, sigma)."""
    radius, sigma = constants
    reach = math.floor(radius) + 2  # the softened disk, and nothing at the border
    place = torch.arange(-reach, reach + 1).double()
    disk = (place[:, None] ** 2 + place**2 <= radius**2).double()
    taps = torch.exp(-0.5 * (torch.arange(-1, 2) / sigma).double() ** 2)
    soft = convolve((disk / disk.sum())[None, None], torch.outer(taps, taps) / taps.sum() ** 2)
    return convolve(x, soft[0, 0].to(x.dtype))


def glass_blur(x: Tensor, constants: tuple[float, int], draws: RowDraws) -> Tensor:
    """Smooth, move pixels by up to one, smooth again: (sigma, times that they are moved).

    The suite means to swap neighbours, but its swap of colour pixels writes one over the other: each pixel takes the
    value of itself, or of the one above, to the left, or both. The published images are made that way, so are these.
    """
    sigma, times = constants
    x = cut_bytes(gaussian_blurred(x, sigma))
    _, channels, height, width = x.shape
    moved = torch.zeros(height, width, dtype=torch.bool)
    moved[2:, 2:] = True
    place = torch.arange(height * width).view(height, width)
    for _ in range(times):
        back = (draws.uniform(2, height, width) < 0.5) & moved  # [N, 2, H, W]: a step to the left, a step up
        source = place - back[:, 0].long() - width * back[:, 1].long()
        x = x.flatten(2).gather(2, source.flatten(1).unsqueeze(1).expand(-1, channels, -1)).view_as(x)
    return gaussian_blurred(x, sigma)


def motion_blur(x: Tensor, constants: tuple[int, float], draws: RowDraws) -> Tensor:
    """In a direction within 45 degrees of the horizontal: (radius, sigma)."""
    return motion_blurred(x, *constants, degrees=90 * draws.uniform(1)[:, 0] - 45)


def zoom_blur(x: Tensor, most: float, draws: RowDraws) -> Tensor:
    """The mean of the image (once more than the others) and of its zooms by 1, 1.01, 1.02, ... to just below `most`."""
    factors = np.arange(1, most, 0.01)
    total = x.clone()
    for factor in factors.tolist():
        total += both_axes(x, lambda side: zoom_matrix(side, factor))  # noqa: B023 - used at once
    return total / (len(factors) + 1)


BLUR: Corruptions = {
    defocus_blur: ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1.0, 0.2), (1.5, 0.1)),
    glass_blur: ((0.05, 1), (0.25, 1), (0.4, 1), (0.25, 2), (0.4, 2)),
    motion_blur: ((6, 1.0), (6, 1.5), (6, 2.0), (8, 2.0), (9, 2.5)),
    zoom_blur: (1.06, 1.11, 1.16, 1.21, 1.26),
    gaussian_blur: (0.4, 0.6, 0.7, 0.8, 1.0),
}
