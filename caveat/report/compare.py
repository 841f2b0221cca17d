"""Is one run better than another, given that the test set is finite?

Two runs are compared row by row on the same data. The gain in log-likelihood is g_i = log p(y_i) - log p'(y_i); over K
data sets the estimate is the mean of the K means. Rows of one data set at several severities are the same images, so
the variance is summed over row ids c, not over points (the influence function of the mean of means):
    se^2 = C / (C - 1)  sum_c ( sum_{k, i in c} (g_ki - mean_k) / (K n_k) )^2.
The AUROC is a mean of placements, P(outside > inside_i) and P(outside_j > inside), whose spread gives its variance in
the same way (DeLong, DeLong and Clarke-Pearson, 1988). Intervals are +-1.96 standard errors: they speak of test rows,
not of what another training seed would give.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from caveat.report.runs import Arrays, Run, Scored

Z95 = 1.959964


@dataclass(frozen=True)
class Gain:
    """How much better a run is than another: positive is better, with its 95% interval."""

    mean: float
    low: float
    high: float
    level: bool = False  # the two scores are equal to the digits shown

    @property
    def verdict(self) -> str:
        """`not distinguishable` where the interval holds zero; else `better`, `worse`, or `level` where none shows."""
        word = "better" if self.low > 0 else "worse" if self.high < 0 else "not distinguishable"
        return "level" if self.level and word in ("better", "worse") else word


def log_prob_gain(run: Run, other: Run, names: Sequence[str]) -> Gain | None:
    """Gain in log-likelihood, nats a row, averaged over the data sets named; None where one is missing or infinite."""
    means, influences, rows = [], [], []
    for name in names:
        if name not in run.by_name or name not in other.by_name:
            return None
        ours, theirs = matched(run.by_name[name], other.by_name[name])
        gain = ours["log_prob"].astype(np.float64) - theirs["log_prob"].astype(np.float64)  # [N]
        if not np.isfinite(gain).all():
            return None
        means.append(gain.mean())
        influences.append((gain - gain.mean()) / (len(gain) * len(names)))
        rows.append(ours["rows"])
    if not means:
        return None
    return _gain(float(np.mean(means)), _variance(np.concatenate(influences), np.concatenate(rows)))


def auroc_gain(run: Run, other: Run, name: str) -> Gain | None:
    """Gain in AUROC of telling the data set `name` from clean data; None where a run lacks either."""
    if run.clean is None or other.clean is None or name not in run.by_name or name not in other.by_name:
        return None
    if run.clean.name != other.clean.name:
        return None
    inside = matched(run.clean, other.clean)
    outside = matched(run.by_name[name], other.by_name[name])
    ours, theirs = (
        placements(uncertainty(inside[which]), uncertainty(outside[which])) for which in (0, 1)
    )  # each: [N] for inside rows, [M] for outside rows
    variance = 0.0
    for mine, yours, arrays in zip(ours, theirs, (inside[0], outside[0]), strict=True):
        difference = mine - yours
        variance += _variance((difference - difference.mean()) / len(difference), arrays["rows"])
    return _gain(float(ours[0].mean() - theirs[0].mean()), variance)


def matched(scored: Scored, other: Scored) -> tuple[Arrays, Arrays]:
    """The predictions of two runs on one data set, refused where they are not about the same rows."""
    ours, theirs = scored.predictions, other.predictions
    for key in ("rows", "targets"):
        if key in ours and key in theirs and not np.array_equal(ours[key], theirs[key]):
            raise ValueError(f"{scored.path} and {other.path} have different {key}: evaluate both on the same data")
    return ours, theirs


def uncertainty(arrays: Arrays) -> np.ndarray:
    """One number a row that is high where the run is unsure: entropy, or for regression the summed variance."""
    if "entropy" in arrays:
        return arrays["entropy"].astype(np.float64)
    return arrays["variance"].astype(np.float64).reshape(len(arrays["variance"]), -1).sum(axis=1)


def placements(inside: np.ndarray, outside: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """P(outside > x) for each x inside, and P(x > inside) for each x outside: the mean of either is the AUROC."""

    def share_below(values: np.ndarray, reference: np.ndarray) -> np.ndarray:  # ties count one half
        ordered = np.sort(reference)
        below = np.searchsorted(ordered, values, "left") + np.searchsorted(ordered, values, "right")
        return below / (2 * len(ordered))

    return 1 - share_below(inside, outside), share_below(outside, inside)


def _variance(influence: np.ndarray, rows: np.ndarray) -> float:
    _, cluster = np.unique(rows, return_inverse=True)
    sums = np.bincount(cluster, influence)  # [C]
    return float(len(sums) / (len(sums) - 1) * (sums**2).sum()) if len(sums) > 1 else math.inf


def _gain(mean: float, variance: float) -> Gain:
    reach = Z95 * math.sqrt(variance)
    return Gain(mean, mean - reach, mean + reach)
