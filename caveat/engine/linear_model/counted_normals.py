"""Standard normal numbers that are computed, not stored: each is a function of (seed, stream, sample, place).

    u = mix(key + place * golden) / 2^63 in (-1, 1),   e = sqrt(2) erfinv(u),   key = sha256(seed, stream, sample)

`mix` is the finaliser of SplitMix64 (Steele, Lea and Flood 2014). A place is a row and output, or a parameter, counted
through the whole data set or the whole network. A row's noise is therefore the same in whatever batch it comes, and two
layers never share theirs.
"""

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["standard_normals"]

_AT_ONCE = 1 << 20  # numbers computed at a time, in a working memory of some 30 MB


def standard_normals(
    seed: int, stream: str, samples: Sequence[int], places: Tensor, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Standard normal numbers [len(samples), *places.shape], on the device of the places (64-bit integers)."""
    flat = places.reshape(-1)
    keys = torch.tensor([_key(seed, stream, sample) for sample in samples], device=places.device).unsqueeze(1)
    numbers = torch.empty(len(samples), len(flat), dtype=dtype, device=places.device)
    length = max(_AT_ONCE // len(samples), 1)
    for part, out in zip(flat.split(length), numbers.split(length, 1), strict=True):
        bits = _mix(part * _signed(0x9E3779B97F4A7C15) + keys)
        out.copy_(torch.erfinv(((bits >> 11).double() + 0.5) / 2**52).mul_(math.sqrt(2)))
    return numbers.reshape(len(samples), *places.shape)


@lru_cache(4096)
def _key(seed: int, stream: str, sample: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{stream}/{sample}".encode()).digest()[:8], "big", signed=True)


def _signed(bits: int) -> int:
    """Sixty-four bits as the signed number that torch reads them as; products wrap around."""
    return bits - (1 << 64) if bits >> 63 else bits


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, by: int) -> Tensor:
    """Bits shifted to the right, filled with zeros, where torch would fill with the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)
