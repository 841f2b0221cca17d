"""Random numbers that belong to an image, not to its place in a batch.

    generator of image x = Philox(key = blake2b(bytes of x; seed, name of the shift))

Two calls with the same seed give an image the same numbers whatever comes with it and in whichever order, and at every
severity: from one severity to the next only the strength changes. Equal images get equal numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Corruptions", "RowDraws"]


class RowDraws:
    """Numbers for rows known by their content [N, ...], one generator a row: `[N, *shape]` in float32."""

    def __init__(self, content: Tensor, seed: int, name: str) -> None:
        self._content = content.numpy()
        self._key = hashlib.sha256(f"{seed}/{name}".encode()).digest()

    @cached_property
    def _generators(self) -> list[np.random.Generator]:
        digests = (hashlib.blake2b(row.tobytes(), digest_size=16, key=self._key).digest() for row in self._content)
        return [np.random.Generator(np.random.Philox(key=int.from_bytes(d, "little"))) for d in digests]

    def __len__(self) -> int:
        return len(self._content)

    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers, [N, *shape]."""
        return self._filled(shape, lambda generator, row: generator.standard_normal(dtype=np.float32, out=row))

    def uniform(self, *shape: int) -> Tensor:
        """Uniform numbers in [0, 1), [N, *shape]."""
        return self._filled(shape, lambda generator, row: generator.random(dtype=np.float32, out=row))

    def poisson(self, rates: Tensor) -> Tensor:
        """A Poisson count for each rate, [N, ...]."""
        out = np.empty(rates.shape, dtype=np.float32)
        for generator, rate, row in zip(self._generators, rates.numpy(), out, strict=True):
            row[...] = generator.poisson(rate)
        return torch.from_numpy(out)

    def shared(self, *shape: int) -> Tensor:
        """Uniform in [0, 1), the same for every row: `[*shape]`."""
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(self._key[:16], "little")))
        return torch.from_numpy(generator.random(shape, dtype=np.float32))

    def _filled(self, shape: tuple[int, ...], fill: Callable[[np.random.Generator, NDArray], object]) -> Tensor:
        out = np.empty((len(self), *shape), dtype=np.float32)
        for generator, row in zip(self._generators, out, strict=True):
            fill(generator, row)
        return torch.from_numpy(out)


Corruptions = dict[Callable[[Tensor, Any, RowDraws], Tensor], tuple[Any, ...]]  # functions, and constants by severity
