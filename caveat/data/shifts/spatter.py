"""Spatter: drops of water that bend the light (severities 1 to 3), splashes of mud (4 and 5).

Where the water lies is smoothed noise above a threshold. Its shading comes from the distance to the outline of the
drops, evened out in its histogram and embossed. The suite does all that on bytes with OpenCV; the steps here are the
same ones, on many images at a time: Canny's edges, a chamfer distance, an equalised histogram, two small filters.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from caveat.data.shifts.draws import Corruptions, RowDraws
from caveat.data.shifts.operators import CLOSE, convolve, cut_bytes, gaussian_blurred
from caveat.data.shifts.weather import grey

__all__ = ["SPATTER"]

WATER, MUD = (175 / 255, 238 / 255, 238 / 255), (63 / 255, 42 / 255, 20 / 255)
EDGES = (50.0, 150.0)  # gradients from which a pixel may be, and is, an edge
FARTHEST = 20.0  # distances beyond are all alike


def spatter(x: Tensor, constants: tuple[float, float, float, float, float, bool], draws: RowDraws) -> Tensor:
    """(mean and spread of the noise, its smoothness, threshold, strength or softness, whether it is mud)."""
    mean, spread, smooth, threshold, strength, is_mud = constants
    liquid = gaussian_blurred(mean + spread * draws.normal(1, *x.shape[2:]), smooth)  # [N, 1, H, W]
    colour = x.new_tensor(MUD if is_mud else WATER).view(1, 3, 1, 1)
    colour = grey(colour) if x.shape[1] == 1 else colour
    if is_mud:
        cover = gaussian_blurred((liquid > threshold).float(), strength)
        cover = cover.masked_fill(cover < 0.8, 0.0)
        return x * (1 - cover) + colour * cover
    # bytes that start again from 0 beyond 255, as those of the published images do
    liquid = (cut_bytes(liquid.masked_fill(liquid < threshold, 0.0)) * 255).round().remainder(256)
    water = liquid * shading(liquid)
    most = water.amax((1, 2, 3), keepdim=True)
    return x + strength * water / most.clamp_min(1) * colour


def shading(liquid: Tensor) -> Tensor:
    """How light the water is, bytes as float."""
    distance = _mean_of_nine(_distances(canny(liquid)))
    levels = equalised((distance + CLOSE).floor().long())
    emboss = torch.tensor([[-2.0, -1.0, 0.0], [-1.0, 1.0, 1.0], [0.0, 1.0, 2.0]])
    return _mean_of_nine(convolve(levels, emboss).clamp(0, 255)).round()


def canny(image: Tensor) -> Tensor:
    """Edges [N, 1, H, W] of bytes: thin ridges of the gradient |gx| + |gy|, those that hang on a strong one."""
    across = torch.tensor([[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]])
    gx, gy = convolve(image, across, "edge"), convolve(image, across.T, "edge")
    size = gx.abs() + gy.abs()
    around = F.pad(size, (1, 1, 1, 1))  # nothing beyond the border

    def at(down: int, right: int) -> Tensor:
        height, width = size.shape[2:]
        return around[:, :, 1 + down : 1 + down + height, 1 + right : 1 + right + width]

    tangent = 13573 / 32768  # of 22.5 degrees, to as many bits
    flat, steep = gy.abs() < tangent * gx.abs(), gy.abs() > (tangent + 2) * gx.abs()
    falling = gx * gy < 0
    ridge = torch.where(
        flat,
        (size > at(0, -1)) & (size >= at(0, 1)),
        torch.where(
            steep,
            (size > at(-1, 0)) & (size >= at(1, 0)),
            torch.where(falling, (size > at(-1, 1)) & (size > at(1, -1)), (size > at(-1, -1)) & (size > at(1, 1))),
        ),
    )
    weak = (ridge & (size > EDGES[0])).float()
    edges = weak * (size > EDGES[1])
    while True:
        grown = F.max_pool2d(edges, 3, 1, 1) * weak
        if torch.equal(grown, edges):
            return edges
        edges = grown


def _distances(edges: Tensor) -> Tensor:
    """To the nearest edge, at most FARTHEST: the shortest way in steps to neighbours, diagonals and knight's moves."""
    height, width = edges.shape[2:]
    steps = [(y, x) for y in range(-2, 3) for x in range(-2, 3) if max(abs(y), abs(x)) == 1 or abs(y * x) == 2]
    cost = {1: 1.0, 2: 1.4, 5: 2.1969}  # by squared length
    found = torch.full_like(edges, FARTHEST).masked_fill(edges > 0, 0.0)
    while True:
        around = F.pad(found, (2, 2, 2, 2), value=FARTHEST)
        nearer = found
        for y, x in steps:
            nearer = torch.minimum(
                nearer, around[:, :, 2 + y : 2 + y + height, 2 + x : 2 + x + width] + cost[y * y + x * x]
            )
        if torch.equal(nearer, found):
            return found
        found = nearer


def equalised(levels: Tensor) -> Tensor:
    """Bytes [N, 1, H, W] whose histogram is stretched evenly over 0..255, the lowest level to 0."""
    flat = levels.flatten(1)
    counts = torch.zeros(len(levels), 256).scatter_add_(1, flat, torch.ones_like(flat, dtype=torch.float32))
    below = counts.cumsum(1)
    lowest = counts.gather(1, flat.amin(1, keepdim=True))  # how many are at the lowest level
    others = flat.shape[1] - lowest
    stretched = ((below - lowest) * (255 / others.clamp_min(1))).round()
    stretched = torch.where(others > 0, stretched, torch.arange(256.0))  # one level stays
    return stretched.gather(1, flat).view(levels.shape)


def _mean_of_nine(x: Tensor) -> Tensor:
    return convolve(x, torch.full((3, 3), 1 / 9))


SPATTER: Corruptions = {
    spatter: (
        (0.62, 0.1, 0.7, 0.7, 0.5, False),
        (0.65, 0.1, 0.8, 0.7, 0.5, False),
        (0.65, 0.3, 1.0, 0.69, 0.5, False),
        (0.65, 0.1, 0.7, 0.69, 0.6, True),
        (0.65, 0.1, 0.5, 0.68, 0.6, True),
    ),
}
