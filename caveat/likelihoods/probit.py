"""The probit formula: the mean probability of a class whose logit is Gaussian, in closed form (MacKay 1992).

E sigmoid(f) ~ sigmoid(mean / sqrt(1 + pi/8 variance)),   f ~ N(mean, variance)
"""

import math

from torch import Tensor

from caveat.likelihoods.protocol import Hyper, temperature

__all__ = ["probit"]


def probit(mean: Tensor, variance: Tensor, hyper: Hyper) -> Tensor:
    """Logits whose sigmoid is the mean sigmoid of Gaussian logits: MacKay's mean / sqrt(1 + pi/8 variance)."""
    heat = temperature(hyper, mean)
    return mean / (1 + math.pi / 8 * variance / heat**2).sqrt()
