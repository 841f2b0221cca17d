"""Digital: contrast, saturation, pixels, JPEG, and an elastic transform."""

import io

import numpy as np
import torch
from torch import Tensor

from caveat.data.dataset import import_extra
from caveat.data.shifts.draws import Corruptions, RowDraws
from caveat.data.shifts.operators import box_matrix, gaussian_blurred, round_bytes, warp

__all__ = ["DIGITAL"]


def contrast(x: Tensor, kept: float, draws: RowDraws) -> Tensor:
    """Draw every channel towards its mean over the image."""
    mean = x.mean((2, 3), keepdim=True)
    return mean + kept * (x - mean)


def saturate(x: Tensor, constants: tuple[float, float], draws: RowDraws) -> Tensor:
    """The saturation s of HSV becomes times s + plus; images of one channel have none and stay.

    With v the largest channel and m the smallest, s = (v - m)/v, and a channel's distance v - x from the largest goes
    with s. Grey pixels count as red of no saturation.
    """
    if x.shape[1] == 1:
        return x
    times, plus = constants
    value, least = x.amax(1, keepdim=True), x.amin(1, keepdim=True)
    spread = value - least
    saturation = spread / value.clamp_min(1e-12)
    wanted = (times * saturation + plus).clamp(0, 1)
    away = torch.where(
        spread > 0, (value - x) / spread.clamp_min(1e-12), x.new_tensor([0.0, 1.0, 1.0]).view(1, 3, 1, 1)
    )
    return value * (1 - wanted * away)


def pixelate(x: Tensor, share: float, draws: RowDraws) -> Tensor:
    """Shrink to a share of the sides and enlarge again, pixels as boxes; whole bytes after each step, as Pillow has."""
    height, width = x.shape[2:]
    small = max(1, int(height * share)), max(1, int(width * share))
    for down, across in (
        (box_matrix(height, small[0]), box_matrix(width, small[1])),
        (box_matrix(small[0], height), box_matrix(small[1], width)),
    ):
        x = round_bytes(down @ round_bytes(x @ across.T))
    return x


def jpeg_compression(x: Tensor, quality: int, draws: RowDraws) -> Tensor:
    """Send the image through Pillow's JPEG encoder and decoder."""
    image = import_extra("PIL.Image")
    pixels = np.ascontiguousarray((x * 255).round().to(torch.uint8).permute(0, 2, 3, 1).squeeze(3).numpy())
    found = np.empty_like(pixels)
    for before, after in zip(pixels, found, strict=True):
        file = io.BytesIO()
        image.fromarray(before).save(file, "JPEG", quality=quality)
        after[...] = image.open(file)
    return torch.from_numpy(found.reshape(*found.shape[:3], -1)).permute(0, 3, 1, 2) / 255


def elastic_transform(x: Tensor, constants: tuple[float, float, float], draws: RowDraws) -> Tensor:
    """An affine map that moves three points, then a smooth random field, both in shares of the shorter side.

    (size of the field, its smoothness, most that a point moves along an axis)
    """
    height, width = x.shape[2:]
    size, smooth, most = (share * min(height, width) for share in constants)
    centre, reach = torch.tensor([width // 2, height // 2]), min(height, width) // 3
    points = (centre + reach * torch.tensor([[1, 1], [1, -1], [-1, -1]])).float()  # [3, 2]
    moved = points + most * (2 * draws.uniform(3, 2) - 1)
    # where an output pixel comes from: the affine map that takes the moved points back
    back = torch.linalg.solve(torch.cat([moved, torch.ones(len(x), 3, 1)], 2), points.expand(len(x), -1, -1))
    first, second = torch.meshgrid(torch.arange(width).float(), torch.arange(height).float(), indexing="xy")  # [H, W]
    place = torch.stack([first, second, torch.ones_like(first)], -1).view(1, -1, 3) @ back  # [N, H W, 2]
    columns, rows = place.view(len(x), height, width, 2).unbind(-1)
    x = warp(x, rows, columns, "mirror")
    if not size:
        return x
    field = gaussian_blurred(2 * draws.uniform(2, height, width) - 1, smooth, "symmetric", truncate=3.0)
    across, down = (size * field).unbind(1)
    return warp(x, second + down, first + across, "symmetric")


DIGITAL: Corruptions = {
    contrast: (0.75, 0.5, 0.4, 0.3, 0.15),
    elastic_transform: ((0.0, 0.0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)),
    pixelate: (0.95, 0.9, 0.85, 0.75, 0.65),
    jpeg_compression: (80, 65, 58, 50, 40),
    saturate: ((0.3, 0.0), (0.1, 0.0), (1.5, 0.0), (2.0, 0.1), (2.5, 0.2)),
}
