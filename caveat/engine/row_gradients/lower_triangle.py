"""Sums of products left^T right that make a symmetric matrix: the lower triangle only, a block of columns at a time."""

import functools

import torch
from torch import Tensor

__all__ = ["add_products", "is_large", "mirror", "split", "sums_in_float32"]

LARGE = 4096
BLOCK = {"cpu": 512, "cuda": 4096}  # columns that are updated at once: half a block of each is above the diagonal


def is_large(total: Tensor) -> bool:
    """Whether a total [n, n] is worth another arithmetic."""
    return len(total) >= LARGE


def add_products(total: Tensor, pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Add left^T right of pairs of matrices [m, n], whose sum is symmetric, to the lower triangle of a total [n, n]."""
    n, single, width = len(total), total.dtype == torch.float32, BLOCK[total.device.type]
    for start in range(0, n, width):
        stop = min(start + width, n)
        target = total[start:, start:stop]
        for whole, other in pairs:
            left, right = whole[:, start:].T, other[:, start:stop]
            if left.dtype == torch.bfloat16 and single and sums_in_float32(left.device):
                target += torch.mm(left, right, out_dtype=target.dtype)
            else:
                target.addmm_(left.to(target.dtype), right.to(target.dtype))


def split(f: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Pairs in bfloat16 whose products, left^T right, sum to F^T F but for rounding."""
    high = f.bfloat16()
    low = (f - high).bfloat16()
    return [(high, high), (high, low), (low, high)]


def mirror(total: Tensor) -> None:
    """Make the upper triangle of a matrix [n, n] that of the lower one, in place."""
    n, width = len(total), BLOCK[total.device.type]
    for start in range(0, n, width):
        stop = min(start + width, n)
        square = total[start:stop, start:stop]
        square.tril_().diagonal().mul_(0.5)
        square.copy_(square + square.T)
        total[start:stop, stop:] = total[stop:, start:stop].T


@functools.cache
def sums_in_float32(device: torch.device) -> bool:
    """Whether torch gives products of bfloat16 as float32 on a device; a GPU needs torch 2.8 for it."""
    if device.type != "cuda":
        return False
    f = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    try:
        torch.mm(f, f, out_dtype=torch.float32)
    except (TypeError, RuntimeError):
        return False
    return True
