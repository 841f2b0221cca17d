"""The minimum of a function of one number."""

import math
from collections.abc import Callable

__all__ = ["golden_section"]


def golden_section(loss: Callable[[float], float], low: float, high: float, tolerance: float = 1e-6) -> float:
    """The place of the minimum of a function that has exactly one between `low` and `high`."""
    golden = (math.sqrt(5) - 1) / 2
    left, right = high - golden * (high - low), low + golden * (high - low)
    f_left, f_right = loss(left), loss(right)
    while high - low > tolerance:
        if f_left < f_right:
            high, right, f_right = right, left, f_left
            left = high - golden * (high - low)
            f_left = loss(left)
        else:
            low, left, f_left = left, right, f_right
            right = low + golden * (high - low)
            f_right = loss(right)
    return (low + high) / 2
