"""How large a temporary tensor may be: work goes in pieces of so many numbers, whatever the network or the batch."""

from torch import Tensor

__all__ = ["working_numbers"]

# In one temporary tensor: 8 MB, which caches hold, and 1 GB, of float32.
WORKING_NUMBERS = {"cpu": 2**21, "cuda": 2**28}


def working_numbers(like: Tensor) -> int:
    """How many numbers a temporary tensor may hold."""
    return WORKING_NUMBERS[like.device.type]
