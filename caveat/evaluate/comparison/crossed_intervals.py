"""How sure is a difference between two methods, given few training seeds and a finite test set?

Two methods are compared within pairs: d_si is how much better the method's score of row i is than the baseline's, both
trained with seed s. Seeds and rows are crossed, d_si = delta + a_s + b_i + e_si, and both are samples: of the trainings
and of the rows that could have been. With S seeds, N rows and the mean squares of that layout,

    Var(mean d) = (MS_seeds + MS_rows - MS_rest) / (S N),     at least max(MS_seeds, MS_rows) / (S N),

and the interval is Student's t with Satterthwaite's degrees of freedom: near S - 1 where seeds make the difference,
near N - 1 where rows do. A t over seeds alone would not know that the test set is finite, a bootstrap over rows alone
not that another seed gives another network. With one seed the interval is over rows, and says so.

The AUROC is a mean of placements (DeLong, DeLong and Clarke-Pearson, 1988), once over the rows inside and once over
those outside: two layouts of one mean, whose row terms add. Intervals are 95%, each for itself: of twenty that compare
equals, one is expected to say otherwise.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Interval", "crossed_interval", "seeds_interval", "student_quantile"]

LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """How much better a method is than the baseline (positive is better), with a 95% interval where there is one."""

    gain: float | None  # infinite where one of the two gave a target no probability at all
    low: float | None
    high: float | None
    over: str  # what the interval speaks of: seeds and rows, rows, or seeds

    @property
    def verdict(self) -> str:
        """`better`, `worse`, or `not distinguishable` where the interval holds zero or there is none."""
        if self.gain == math.inf or (self.low is not None and self.low > 0):
            return "better"
        return "worse" if self.gain == -math.inf or (self.high is not None and self.high < 0) else "not distinguishable"


def crossed_interval(layouts: Sequence[np.ndarray]) -> Interval:
    """Return the interval of a mean gain over seeds and rows.

    Each layout holds the gains [S, N] of the same seeds on one set of rows. Several layouts, which have the same mean,
    are over independent sets of rows.
    """
    seeds = len(layouts[0])
    over = "seeds and rows" if seeds > 1 else "rows"
    if not all(np.isfinite(gains).all() for gains in layouts):
        with np.errstate(invalid="ignore"):
            mean = float(layouts[0].mean())
        return Interval(None if math.isnan(mean) else mean, None, None, over)
    mean = float(layouts[0].mean())
    by_seed = float(layouts[0].mean(1).var(ddof=1) / seeds) if seeds > 1 else 0.0
    by_rows = [float(gains.mean(0).var(ddof=1) / gains.shape[1]) for gains in layouts if gains.shape[1] > 1]
    rest = [_rest(gains) for gains in layouts if gains.shape[1] > 1]
    if len(by_rows) < len(layouts):  # one row has no spread to judge by
        return Interval(mean, None, None, over)
    # Both by_seed and by_rows hold the share of the rest, which is counted once.
    variance = max(by_seed + sum(max(b - r, 0.0) for b, r in zip(by_rows, rest, strict=True)), sum(by_rows))
    if variance == 0.0:
        return Interval(mean, mean, mean, over)
    shares = [(b, gains.shape[1] - 1) for b, gains in zip(by_rows, layouts, strict=True)]
    shares += [(by_seed, seeds - 1)] if seeds > 1 else []
    freedom = variance**2 / sum(share**2 / free for share, free in shares)
    reach = student_quantile(freedom) * math.sqrt(variance)
    return Interval(mean, mean - reach, mean + reach, over)


def seeds_interval(gains: np.ndarray) -> Interval:
    """Return Student's interval of a mean gain over seeds; `gains` is [S]."""
    mean = float(gains.mean())
    if len(gains) < 2 or not np.isfinite(gains).all():
        return Interval(mean if math.isfinite(mean) else None, None, None, "seeds")
    reach = student_quantile(len(gains) - 1.0) * float(gains.std(ddof=1)) / math.sqrt(len(gains))
    return Interval(mean, mean - reach, mean + reach, "seeds")


def _rest(gains: np.ndarray) -> float:
    """Return MS_rest / (S N), the spread of gains [S, N] that neither seed nor row explains."""
    seeds, rows = gains.shape
    if seeds == 1:
        return 0.0
    left = gains - gains.mean(0) - gains.mean(1, keepdims=True) + gains.mean()
    return float((left**2).sum() / ((seeds - 1) * (rows - 1)) / (seeds * rows))


def student_quantile(freedom: float, level: float = LEVEL) -> float:
    """Return the t for which a share `level` of Student's distribution lies within [-t, t].

    With t = sqrt(freedom) tan(a), the density of the angle a is proportional to cos(a)^(freedom - 1).
    """
    freedom = min(max(freedom, 1.0), 1e4)
    angle = np.linspace(0.0, math.pi / 2, 40_001)
    density = np.cos(angle) ** (freedom - 1)
    share = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return math.sqrt(freedom) * math.tan(float(np.interp(level * share[-1], share, angle)))
