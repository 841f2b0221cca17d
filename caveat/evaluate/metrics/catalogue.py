"""The catalogue of metrics: what each is called, what it says, which way is better, and how its values are written.

This is the one place that knows the direction of a metric. Tables, plots, ranks and paired comparisons ask here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from caveat.evaluate.metrics.number_text import format_bytes, format_error, format_number, format_seconds

__all__ = ["METRICS", "Metric"]


@dataclass(frozen=True)
class Metric:
    """A metric's title, its meaning in words, the better direction (or the best value), and its unit as text."""

    title: str
    meaning: str
    better: Literal["higher", "lower"] | float
    text: Callable[[float | None], str] = format_number

    def loss(self, value: float) -> float:
        """Turn a value round where necessary, so that smaller is better."""
        if self.better == "higher":
            return -value
        return value if self.better == "lower" else abs(value - self.better)

    @property
    def sign(self) -> int:
        """+1 where higher is better and -1 where lower is; a metric with a best value in between has none."""
        if self.better not in ("higher", "lower"):
            raise ValueError(f"{self.title} is best at {self.better}, so neither direction is better")
        return 1 if self.better == "higher" else -1

    def error_text(self, error: float) -> str:
        """Write a standard error of this metric, in its unit where it has one."""
        return format_error(error) if self.text is format_number else self.text(error)


def _scientific(value: float | None) -> str:
    return "–" if value is None else f"{value:.2g}"


def _count(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _rank(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


METRICS = {
    "accuracy": Metric("Accuracy", "share of rows named rightly; higher is better", "higher"),
    "nll": Metric("NLL", "negative log-likelihood in nats a row; lower is better", "lower"),
    "joint_nll": Metric(
        "Joint NLL",
        "negative log-likelihood of ten labels of two rows at once, in nats a label; lower is better",
        "lower",
    ),
    "brier": Metric("Brier", "squared error of the probabilities; lower is better", "lower"),
    "ece": Metric("ECE", "expected calibration error; lower is better", "lower"),
    "marginal_calibration_error": Metric(
        "Marginal calibration error",
        "debiased calibration error of every class's probability; lower is better",
        "lower",
    ),
    "risk_coverage_area": Metric(
        "AURC", "mean error rate over all shares of rows that may be kept; lower is better", "lower"
    ),
    "rmse": Metric("RMSE", "root mean squared error in the target's units; lower is better", "lower"),
    "crps": Metric("CRPS", "continuous ranked probability score; lower is better", "lower"),
    "coverage_90": Metric("90% coverage", "share of targets in the 90% interval; nearest to 0.9 is best", 0.9),
    "set_coverage_90": Metric("90% set coverage", "share of labels in the 90% set; nearest to 0.9 is best", 0.9),
    "set_size_90": Metric("90% set size", "labels in the 90% set on average; lower is better", "lower"),
    "calibration_error": Metric(
        "Calibration error", "distance of the predictive CDF at the targets from uniform; lower is better", "lower"
    ),
    "agreement": Metric("Agreement", "share of rows named as by the reference; higher is better", "higher"),
    "total_variation": Metric(
        "TV", "total variation distance from the reference's probabilities, 0 to 1; lower is better", "lower"
    ),
    "w1": Metric("W1", "Wasserstein-1 distance from the reference in the target's units; lower is better", "lower"),
    "w2": Metric("W2", "Wasserstein-2 distance from the reference in the target's units; lower is better", "lower"),
    "auroc_entropy": Metric("AUROC", "clean against this set by entropy; higher is better", "higher"),
    "auroc_variance": Metric("AUROC", "clean against this set by variance; higher is better", "higher"),
    "auroc_epistemic": Metric("AUROC", "clean against this set by epistemic uncertainty; higher is better", "higher"),
    "auroc_mahalanobis": Metric(
        "AUROC, Mahalanobis",
        "clean against this set by distance from the nearest class's features; higher is better",
        "higher",
    ),
    "auroc_knn": Metric(
        "AUROC, nearest rows",
        "clean against this set by distance from the nearest training rows' features; higher is better",
        "higher",
    ),
    "seconds": Metric("Fit time", "seconds; lower is better", "lower", format_seconds),
    "predict_seconds_per_row": Metric("Prediction", "seconds a row; lower is better", "lower", format_seconds),
    "peak_bytes": Metric("Peak memory", "bytes, of the whole process on a CPU; lower is better", "lower", format_bytes),
    "stored_bytes": Metric("Stored", "bytes on disk; lower is better", "lower", format_bytes),
    "flops": Metric("FLOPs", "floating-point operations of the fit; lower is better", "lower", _scientific),
    "gradient_evaluations": Metric("Gradients", "gradient evaluations of the fit; lower is better", "lower", _count),
    "rank": Metric("Mean rank", "mean place among the methods over shifts, by NLL; 1 is best", "lower", _rank),
}
