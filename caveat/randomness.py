"""Randomness with an explicit seed: normal numbers, and where torch takes no generator the global state, forked."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["normals", "seeded"]

SMALL = 2**17  # numbers that a CPU makes in a millisecond


def normals(shape: Sequence[int], rng: torch.Generator, like: Tensor) -> Tensor:
    """Standard normals from a CPU's generator. A few are the same on every device; many are made where they go."""
    if like.device.type == "cpu" or math.prod(shape) <= SMALL:
        return torch.randn(tuple(shape), generator=rng, dtype=like.dtype).to(like.device)
    there = torch.Generator(like.device).manual_seed(int(torch.randint(2**62, (), generator=rng)))
    return torch.randn(tuple(shape), generator=there, dtype=like.dtype, device=like.device)


@contextmanager
def seeded(seed: int, device: torch.device | str = "cpu") -> Iterator[None]:
    """Seed the CPU's and one device's global generators for a block; no other device's is touched."""
    device = torch.device(device)
    cuda = device.type == "cuda"
    index = (torch.cuda.current_device() if device.index is None else device.index) if cuda else None
    with torch.random.fork_rng(devices=[] if index is None else [index]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reach devices that are not forked
        if index is not None:
            torch.cuda.default_generators[index].manual_seed(seed)
        yield
