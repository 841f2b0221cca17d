"""Augmentation of training images, a batch at a time, from an explicit generator: `Task(augment=crop_and_flip)`."""

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["crop_and_flip"]


def crop_and_flip(images: Tensor, rng: torch.Generator, padding: int = 4) -> Tensor:
    """Move each image [B, C, H, W] by up to `padding` pixels (edges reflected) and mirror half of them."""
    if images.ndim != 4 or min(images.shape[-2:]) <= padding:
        raise ValueError(
            f"crop_and_flip is for images [B, C, H, W] of more than {padding} pixels a side, got a batch of shape "
            f"{tuple(images.shape)}: leave the augmentation out, or give one of your own"
        )
    batch, channels, height, width = images.shape
    device = images.device

    def draw(high: int) -> Tensor:
        return torch.randint(high, (batch,), generator=rng, device=rng.device).to(device)

    padded = F.pad(images, [padding] * 4, mode="reflect")
    rows = draw(2 * padding + 1)[:, None] + torch.arange(height, device=device)  # [B, H]
    columns = draw(2 * padding + 1)[:, None] + torch.arange(width, device=device)  # [B, W]
    columns = torch.where(draw(2)[:, None] == 1, columns.flip(1), columns)
    image = torch.arange(batch, device=device)[:, None, None, None]
    channel = torch.arange(channels, device=device)[None, :, None, None]
    return padded[image, channel, rows[:, None, :, None], columns[:, None, None, :]]
