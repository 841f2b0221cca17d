"""Joint predictions: how probable are the labels of several rows at once, under one and the same function?

    -1/T log 1/S sum_s prod_t p_s(y_t | x_t)        T labels of few rows, S draws of the posterior

Single rows cannot tell ignorance from noise: averaged over draws, both are a flat prediction. Several labels can, since
a function that is right of one row is right of it again. Rows drawn at random hardly have anything in common, so pairs
of rows are drawn and ten labels from each pair, with replacement (dyadic sampling, Osband et al. 2022).
"""

import math

import torch
from torch import Tensor

__all__ = ["joint_nll"]


def joint_nll(log_prob: Tensor, pairs: int = 2000, labels: int = 10) -> float:
    """Compute the joint negative log-likelihood a label, in nats.

    Args:
        log_prob: of each row's target under each draw, [N, S].
        pairs: how many pairs of rows.
        labels: how many labels of each pair.
    """
    if log_prob.ndim != 2 or not log_prob.numel():
        raise ValueError(f"joint_nll needs log probabilities [rows, draws], got shape {tuple(log_prob.shape)}")
    rows, draws = log_prob.shape
    rng = torch.Generator().manual_seed(0)  # the same pairs for every posterior
    pair = torch.randint(rows, (pairs, 2), generator=rng)
    chosen = pair.gather(1, torch.randint(2, (pairs, labels), generator=rng))  # [pairs, labels]
    together = log_prob.double()[chosen].sum(1)  # [pairs, S]
    return -float((together.logsumexp(1) - math.log(draws)).mean()) / labels
