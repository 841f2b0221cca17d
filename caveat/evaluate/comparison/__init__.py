"""Comparisons of posteriors that were scored on the same rows: is a difference more than chance?

    gain = mean_i (s_i - s'_i) +- 1.96 se       over test rows: `paired_rows`, for runs of `caveat evaluate`
    gain +- t sqrt(Var)                         over training seeds and rows: `crossed_intervals`, for `caveat bench`

`averages` are means with standard errors over seeds and over the conditions of a shift; `between_methods` is how far
predictions lie from each other, whatever the truth is.

Called by `bench` (comparisons, ranks, summaries) and by `report` (verdicts, curves over seeds).
"""

from caveat.evaluate.comparison.averages import UNKNOWN, MeanAndError, curve_over_seeds, over_conditions, over_seeds
from caveat.evaluate.comparison.between_methods import disagreement, mean_distance, mean_total_variation
from caveat.evaluate.comparison.crossed_intervals import Interval, crossed_interval, seeds_interval
from caveat.evaluate.comparison.paired_rows import Gain, gain_in_auroc, gain_over_rows

__all__ = [
    "UNKNOWN",
    "Gain",
    "Interval",
    "MeanAndError",
    "crossed_interval",
    "curve_over_seeds",
    "disagreement",
    "gain_in_auroc",
    "gain_over_rows",
    "mean_distance",
    "mean_total_variation",
    "over_conditions",
    "over_seeds",
    "seeds_interval",
]
