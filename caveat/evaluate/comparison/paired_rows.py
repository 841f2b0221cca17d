"""Is one posterior better than another, given that the test set is finite?

Two posteriors are compared row by row on the same data. The gain in log-likelihood is g_i = log p(y_i) - log p'(y_i);
over K data sets the estimate is the mean of the K means. Rows of one data set at several severities are the same
images, so the variance is summed over row ids c, not over points (the influence function of the mean of means):
    se^2 = C / (C - 1)  sum_c ( sum_{k, i in c} (g_ki - mean_k) / (K n_k) )^2.
The AUROC is a mean of placements, P(ood > inside_i) and P(outside_j > inside), whose spread gives its variance in
the same way (DeLong, DeLong and Clarke-Pearson, 1988). Intervals are +-1.96 standard errors: they speak of test rows,
not of what another training seed would give.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from caveat.evaluate.metrics import placements

__all__ = ["Gain", "gain_in_auroc", "gain_over_rows"]

Z95 = 1.959964


@dataclass(frozen=True)
class Gain:
    """How much better one posterior is than another: positive is better, with its 95% interval."""

    mean: float
    low: float
    high: float
    level: bool = False  # whether the two scores are equal to the digits shown

    @property
    def verdict(self) -> str:
        """`not distinguishable` where the interval holds zero; else `better`, `worse`, or `level` where none shows."""
        word = "better" if self.low > 0 else "worse" if self.high < 0 else "not distinguishable"
        return "level" if self.level and word in ("better", "worse") else word


def gain_over_rows(gains: Sequence[np.ndarray], rows: Sequence[np.ndarray]) -> Gain | None:
    """Return the mean over data sets of each one's mean gain; None without data sets, or where a gain is not finite.

    Args:
        gains: for each data set, what every row gains  # [N_k]
        rows: for each data set, the ids of its rows; the same id in two data sets is the same input  # [N_k]
    """
    if not gains or not all(np.isfinite(gain).all() for gain in gains):
        return None
    influences = [(gain - gain.mean()) / (len(gain) * len(gains)) for gain in gains]
    mean = float(np.mean([gain.mean() for gain in gains]))
    return _with_interval(mean, _clustered_variance(np.concatenate(influences), np.concatenate(rows)))


def gain_in_auroc(
    ours: tuple[np.ndarray, np.ndarray], theirs: tuple[np.ndarray, np.ndarray], rows: tuple[np.ndarray, np.ndarray]
) -> Gain:
    """Return the gain in AUROC of telling rows ood from rows inside.

    Args:
        ours: our uncertainty about the rows inside and about those ood  # [N], [M]
        theirs: the same of the other posterior, about the same rows  # [N], [M]
        rows: the ids of the rows inside and of those ood  # [N], [M]
    """
    our_placements, their_placements = placements(*ours), placements(*theirs)
    variance = 0.0
    for our_side, their_side, ids in zip(our_placements, their_placements, rows, strict=True):
        difference = our_side - their_side
        variance += _clustered_variance((difference - difference.mean()) / len(difference), ids)
    return _with_interval(float(our_placements[0].mean() - their_placements[0].mean()), variance)


def _clustered_variance(influence: np.ndarray, rows: np.ndarray) -> float:
    """Return the variance of a mean from the influence of each point, [N]; points of the same row go together."""
    _, cluster = np.unique(rows, return_inverse=True)
    sums = np.bincount(cluster, influence)  # [C]
    return float(len(sums) / (len(sums) - 1) * (sums**2).sum()) if len(sums) > 1 else math.inf


def _with_interval(mean: float, variance: float) -> Gain:
    reach = Z95 * math.sqrt(variance)
    return Gain(mean, mean - reach, mean + reach)
