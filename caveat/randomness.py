"""Where torch takes no generator: the global random state, forked, seeded, and put back."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["seeded"]


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
