"""Weather: snow, frost, fog, and more light."""

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from caveat.data.shifts.draws import Corruptions, RowDraws
from caveat.data.shifts.operators import both_axes, cut_bytes, motion_blurred, zoom_matrix

__all__ = ["WEATHER", "grey"]

LUMINANCE = (0.299, 0.587, 0.114)  # of red, green and blue
# Panes of frost: mean colour and spread. The suite lays photographs over its images; these are made, and have the
# colours and spreads of those photographs at a fifth of their size, the scale at which the suite uses them.
PANES = (
    ((0.30, 0.58, 0.65), 0.07),
    ((0.79, 0.80, 0.84), 0.09),
    ((0.79, 0.80, 0.84), 0.09),
    ((0.54, 0.60, 0.65), 0.12),
    ((0.44, 0.48, 0.53), 0.17),
)


def grey(x: Tensor) -> Tensor:
    """Luminance [N, 1, H, W]."""
    return x if x.shape[1] == 1 else (x * x.new_tensor(LUMINANCE).view(1, 3, 1, 1)).sum(1, keepdim=True)


def snow(x: Tensor, constants: tuple[float, float, float, float, int, float, float], draws: RowDraws) -> Tensor:
    """Flakes (mean, spread, zoom, threshold), smeared (radius, sigma), over a paled image (share that is kept)."""
    mean, spread, zoom, threshold, radius, sigma, kept = constants
    flakes = mean + spread * draws.normal(1, *x.shape[2:])
    flakes = both_axes(flakes, lambda side: zoom_matrix(side, zoom))
    flakes = flakes.masked_fill(flakes < threshold, 0.0).clamp(0, 1)
    flakes = motion_blurred(cut_bytes(flakes), radius, sigma, degrees=90 * draws.uniform(1)[:, 0] - 135)
    paled = kept * x + (1 - kept) * torch.maximum(x, 1.5 * grey(x) + 0.5)
    return paled + flakes + flakes.rot90(2, (2, 3))


def frost(x: Tensor, constants: tuple[float, float], draws: RowDraws) -> Tensor:
    """A piece of a frosted pane over the image: (share of the image, share of the pane)."""
    of_image, of_pane = constants
    height, width = x.shape[2:]
    panes = frosted_panes(max(128, 1 << (max(height, width) - 1).bit_length()))  # [P, 3, S, S], periodic
    side = panes.shape[-1]
    which, top, left = (draws.uniform(3) * torch.tensor([len(panes), side, side])).long().T
    rows = (top[:, None] + torch.arange(height)) % side  # [N, H]
    columns = (left[:, None] + torch.arange(width)) % side  # [N, W]
    piece = panes.movedim(1, -1)[which[:, None, None], rows[:, :, None], columns[:, None, :]].movedim(-1, 1)
    return of_image * x + of_pane * (grey(piece) if x.shape[1] == 1 else piece)


@lru_cache(4)
def frosted_panes(side: int) -> Tensor:
    """The panes [P, 3, side, side]: needles of ice in all directions on uneven ground; the same in every run.

    A field of needles is the largest of twelve noises, each smoothed along a direction of its own (a Gaussian of 6
    pixels by 0.5, in Fourier space), to which noise with power 1/f is added.
    """
    rng = np.random.default_rng(2019)
    down, right = np.meshgrid(np.fft.fftfreq(side), np.fft.fftfreq(side), indexing="ij")
    panes = []
    for colour, spread in PANES:
        fields = []
        for angle in np.arange(12) * math.pi / 12:
            along, across = down * np.sin(angle) + right * np.cos(angle), down * np.cos(angle) - right * np.sin(angle)
            smooth = np.exp(-0.5 * (2 * math.pi) ** 2 * ((6 * along) ** 2 + (0.5 * across) ** 2))
            fields.append(_standard(np.fft.ifft2(np.fft.fft2(rng.normal(size=(side, side))) * smooth).real))
        ground = np.fft.fft2(rng.normal(size=(side, side))) / np.sqrt(np.hypot(down, right) + 1 / side)
        field = _standard(_standard(np.max(fields, axis=0)) + _standard(np.fft.ifft2(ground).real))
        panes.append(np.clip(np.array(colour)[:, None, None] + spread * field, 0, 1))
    return torch.from_numpy(np.stack(panes)).float()


def _standard(field: np.ndarray) -> np.ndarray:
    return (field - field.mean()) / field.std()


def fog(x: Tensor, constants: tuple[float, float], draws: RowDraws) -> Tensor:
    """A layer of plasma (thickness, decay of its detail), and the light drawn back to what the image had."""
    thickness, decay = constants
    height, width = x.shape[2:]
    most = x.amax((1, 2, 3), keepdim=True)
    layer = plasma(1 << (max(height, width) - 1).bit_length(), decay, draws)[:, None, :height, :width]
    return (x + thickness * layer) * most / (most + thickness)


def plasma(side: int, decay: float, draws: RowDraws) -> Tensor:
    """Diamond-square fractals [N, side, side] from 0 to 1, periodic; side is a power of two.

    Each halving of the step sets the middles of squares, then of diamonds, to the mean of their four corners plus
    noise, whose size shrinks by decay^2 a step: the suite applies its factor twice.
    """
    step, size = max(side, 2), 100.0
    found = torch.zeros(len(draws), step, step)

    def rough(total: Tensor) -> Tensor:
        return total / 4 + size**2 * (2 * draws.uniform(*total.shape[1:]) - 1)

    while step >= 2:
        half = step // 2
        corners = found[:, ::step, ::step]
        pairs = corners + corners.roll(-1, 1)
        found[:, half::step, half::step] = rough(pairs + pairs.roll(-1, 2))
        middles = found[:, half::step, half::step]
        above, beside = middles + middles.roll(1, 1), middles + middles.roll(1, 2)
        found[:, ::step, half::step] = rough(above + corners + corners.roll(-1, 2))
        found[:, half::step, ::step] = rough(beside + corners + corners.roll(-1, 1))
        step, size = half, size / decay
    found -= found.amin((1, 2), keepdim=True)
    return found / found.amax((1, 2), keepdim=True)


def brightness(x: Tensor, more: float, draws: RowDraws) -> Tensor:
    """Raise the value of HSV, the largest channel v: the others follow in proportion, x (v + more) / v."""
    value = x.amax(1, keepdim=True)
    raised = (value + more).clamp_max(1)
    return torch.where(value > 0, x * (raised / value.clamp_min(1e-12)), raised)


WEATHER: Corruptions = {
    snow: (
        (0.1, 0.2, 1.0, 0.6, 8, 3.0, 0.95),
        (0.1, 0.2, 1.0, 0.5, 10, 4.0, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4.0, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6.0, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12.0, 0.8),
    ),
    frost: ((1.0, 0.2), (1.0, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)),
    fog: ((0.2, 3.0), (0.5, 3.0), (0.75, 2.5), (1.0, 2.0), (1.5, 1.75)),
    brightness: (0.05, 0.1, 0.15, 0.2, 0.3),
}
