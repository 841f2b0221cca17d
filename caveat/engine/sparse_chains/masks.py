"""Which nodes of a network are there: birth and death of nodes by Metropolis-Hastings (Kong et al. 2023).

    P(m) = prod over spaces  exp(-c s^2) / C(width, s) but for a constant,   s >= 1 nodes on,   c = (lambda log n)^5

A move is a death or a birth, each with probability 1/2, of 1 to `most` nodes, uniformly. Nodes die with probabilities
proportional to exp(-|d log p(D | m) / dm_i| / 2), one after the other without replacement: those that matter least to
first order are tried first. Nodes are born uniformly. With q(m -> m') the probability of a move, it is accepted with

    min(1, p(D | m') P(m') q(m' -> m) / (p(D | m) P(m) q(m -> m'))).

A move that cannot be made (more deaths than nodes, a space that would be empty) leaves everything as it is.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Evaluate", "MaskMove", "log_mask_prior", "log_probability_of_set", "penalty"]

Evaluate = Callable[[Tensor], tuple[float, Tensor]]  # of a mask: the log likelihood, and its gradient in the mask


def penalty(strength: float, rows: int) -> float:
    """The prior's constant c, of its strength lambda and the number of training rows."""
    return float((strength * math.log(max(rows, 2))) ** 5)


def log_mask_prior(mask: Tensor, widths: tuple[int, ...], c: float) -> float:
    """The log prior of a mask [sum of widths], but for a constant; -inf where a space has no node on."""
    total = 0.0
    for part, width in zip(mask.split(list(widths)), widths, strict=True):
        on = int(part.sum())
        if not on:
            return -math.inf
        total -= c * on**2 + math.log(math.comb(width, on))
    return total


def log_probability_of_set(log_weights: Tensor, chosen: Tensor) -> float:
    """The log probability of drawing just these, in any order, without replacement and with these weights."""
    weights, picked = log_weights.double(), chosen.tolist()
    left: dict[frozenset[int], float] = {}  # log of the weight that is left once some are drawn
    for size in range(len(picked)):
        for gone in itertools.combinations(picked, size):
            left[frozenset(gone)] = float(
                weights.index_fill(0, torch.tensor(gone, dtype=torch.long), -math.inf).logsumexp(0)
            )
    drawn = float(weights[chosen].sum())
    orders = [
        drawn - sum(left[frozenset(order[:place])] for place in range(len(order)))
        for order in itertools.permutations(picked)
    ]
    return float(torch.tensor(orders, dtype=torch.float64).logsumexp(0))


@dataclass(frozen=True)
class MaskMove:
    """A Metropolis-Hastings move: births or deaths of a few nodes."""

    widths: tuple[int, ...]  # of the spaces
    c: float  # of the prior
    most: int = 3  # nodes that one move changes

    def log_proposal(self, mask: Tensor, new: Tensor, gradient: Tensor) -> float:
        """Log q(mask -> new); `gradient` is that at `mask`, which a death depends on."""
        changed = (mask != new).nonzero()[:, 0]
        n, dying = len(changed), bool(mask[changed].all())
        if not 1 <= n <= self.most or (not dying and bool(mask[changed].any())):
            return -math.inf
        if dying:
            weights = torch.where(mask, -gradient.double().abs() / 2, -math.inf)
            chosen = log_probability_of_set(weights, changed)
        else:
            chosen = -math.log(math.comb(int((~mask).sum()), n))
        return chosen - math.log(2 * self.most)

    def log_ratio(self, mask: Tensor, new: Tensor, at: tuple[float, Tensor], at_new: tuple[float, Tensor]) -> float:
        """The log of the acceptance ratio; `at` and `at_new` are what `Evaluate` gives for the two masks."""
        prior = log_mask_prior(new, self.widths, self.c) - log_mask_prior(mask, self.widths, self.c)
        back, forth = self.log_proposal(new, mask, at_new[1]), self.log_proposal(mask, new, at[1])
        return at_new[0] - at[0] + prior + back - forth

    def move(self, mask: Tensor, evaluate: Evaluate, rng: torch.Generator) -> Tensor | None:
        """The mask after a move, or None where it stays as it is."""
        dying = bool(torch.rand((), generator=rng) < 0.5)
        n = int(torch.randint(1, self.most + 1, (), generator=rng))
        keys = torch.rand(len(mask), generator=rng, dtype=torch.float64)
        threshold = float(torch.rand((), generator=rng, dtype=torch.float64))
        pool = mask if dying else ~mask
        if int(pool.sum()) < n:
            return None
        at = evaluate(mask)
        weights = -at[1].double().abs() / 2 if dying else torch.zeros(len(mask), dtype=torch.float64)
        # The largest of log weights plus Gumbel noise are a draw without replacement.
        gumbel = torch.where(pool, weights - (-keys.log()).log(), -math.inf)
        new = mask.clone()
        new[gumbel.topk(n).indices] = not dying
        if not all(bool(part.any()) for part in new.split(list(self.widths))):
            return None
        ratio = self.log_ratio(mask, new, at, evaluate(new))
        return new if math.log(max(threshold, 1e-300)) < ratio else None
