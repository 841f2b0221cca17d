"""Metrics: one number a row from what was predicted and what was true, and their means with standard errors.

    mean = 1/N sum_i s_i,        stderr = std(s) / sqrt(N)        over test rows, not over training runs

`per_row` has accuracy, Brier score, squared error and how often intervals and sets hold the target; `joint` scores
labels of several rows at once; `class_counts` says which classes are taken for which; `calibration` asks whether
probabilities are met by frequencies; `refusal` what the error is on the rows kept when the others may be refused;
`detection` how well uncertainty tells out-of-distribution data apart; `against_marginals` whether predictions are
better than the marginals of their targets. `catalogue` is the one place with the names of metrics, their directions and
how their values are written.

Called by `evaluate.scoring`, `evaluate.fidelity`, `evaluate.comparison`, `bench` and `report`.
"""

from caveat.evaluate.metrics.against_marginals import Baseline, MarginalGain, gain_over_marginals
from caveat.evaluate.metrics.calibration import (
    Reliability,
    central_coverage,
    marginal_calibration_error,
    pit_calibration_error,
    pooled_reliability,
    reliability,
    share_interval,
    top_label_ece,
)
from caveat.evaluate.metrics.catalogue import METRICS, Metric
from caveat.evaluate.metrics.class_counts import ByClass, by_class
from caveat.evaluate.metrics.detection import ood_scores, placements, roc_curve
from caveat.evaluate.metrics.joint import joint_nll
from caveat.evaluate.metrics.number_text import format_bytes, format_error, format_number, format_seconds
from caveat.evaluate.metrics.per_row import (
    accuracy,
    brier,
    interval_coverage,
    mean_and_stderr,
    rmse,
    set_coverage,
    squared_error,
)
from caveat.evaluate.metrics.refusal import risk_at_coverage, risk_coverage, risk_coverage_area
from caveat.evaluate.metrics.score import Columns, Score

__all__ = [
    "METRICS",
    "Baseline",
    "ByClass",
    "Columns",
    "MarginalGain",
    "Metric",
    "Reliability",
    "Score",
    "accuracy",
    "brier",
    "by_class",
    "central_coverage",
    "format_bytes",
    "format_error",
    "format_number",
    "format_seconds",
    "gain_over_marginals",
    "interval_coverage",
    "joint_nll",
    "marginal_calibration_error",
    "mean_and_stderr",
    "ood_scores",
    "pit_calibration_error",
    "placements",
    "pooled_reliability",
    "reliability",
    "risk_at_coverage",
    "risk_coverage",
    "risk_coverage_area",
    "rmse",
    "roc_curve",
    "set_coverage",
    "share_interval",
    "squared_error",
    "top_label_ece",
]
