"""Noise: Gaussian, Poisson counts, salt and pepper, and noise in proportion to the pixel.

Every function here and in the files beside takes pixels [N, C, H, W] in [0, 1], the constants of a severity and the
images' own `RowDraws`; what leaves [0, 1] is cut by the caller.
"""

from torch import Tensor

from caveat.data.shifts.draws import Corruptions, RowDraws

__all__ = ["NOISE"]


def gaussian_noise(x: Tensor, scale: float, draws: RowDraws) -> Tensor:
    """Add scale e with e standard normal."""
    return x + scale * draws.normal(*x.shape[1:])


def shot_noise(x: Tensor, photons: float, draws: RowDraws) -> Tensor:
    """A white pixel counts `photons` on average."""
    return draws.poisson(x * photons) / photons


def impulse_noise(x: Tensor, share: float, draws: RowDraws) -> Tensor:
    """A share of the values becomes 0 or 1, as likely the one as the other."""
    u = draws.uniform(*x.shape[1:])
    return x.masked_fill(u < share, 0.0).masked_fill(u < share / 2, 1.0)


def speckle_noise(x: Tensor, scale: float, draws: RowDraws) -> Tensor:
    """Add scale x e with e standard normal."""
    return x + scale * x * draws.normal(*x.shape[1:])


NOISE: Corruptions = {
    gaussian_noise: (0.04, 0.06, 0.08, 0.09, 0.10),
    shot_noise: (500.0, 250.0, 100.0, 75.0, 50.0),
    impulse_noise: (0.01, 0.02, 0.03, 0.05, 0.07),
    speckle_noise: (0.06, 0.1, 0.12, 0.16, 0.2),
}
