"""Mean and variance of values that come one after the other, none of which is kept (Welford 1962).

mean <- mean + (x - mean) / n,   squares <- squares + (x - old mean) (x - new mean),   variance = squares / n
"""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["RunningMoments"]


@dataclass
class RunningMoments:
    """Mean and summed squared deviations of the values seen so far, all of one shape; both are changed in place."""

    mean: Tensor
    squares: Tensor  # sum of (x - mean)^2 over the values
    count: int = 0

    @classmethod
    def like(cls, value: Tensor) -> "RunningMoments":
        """The moments before any value of this shape was seen."""
        return cls(torch.zeros_like(value), torch.zeros_like(value))

    def add(self, value: Tensor) -> None:
        """Take in one more value."""
        self.count += 1
        from_old_mean = value - self.mean
        self.mean += from_old_mean / self.count
        self.squares += from_old_mean * (value - self.mean)
