"""Selective prediction: what is the error on the rows a model keeps when it may refuse the ones it is unsure of?

Keep the k least uncertain of N rows: coverage k / N, risk = mean error of those k. Where rows tie in uncertainty the
risk is its expectation over a random order of the tied, which is the risk after giving each tied row the mean error of
its group: then nothing depends on the order of rows, and a constant uncertainty has the same risk at every coverage.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from caveat.evaluate.metrics.per_row import check_scores

__all__ = ["RiskCoverage", "risk_at_coverage", "risk_coverage", "risk_coverage_area"]


@dataclass(frozen=True)
class RiskCoverage:
    """The risk, which is the mean error of the rows kept, at coverage 1/N, 2/N, ..., 1."""

    coverage: Tensor  # [N]
    risk: Tensor  # [N]


def risk_coverage(uncertainty: Tensor, error: Tensor) -> RiskCoverage:
    """Return the risk-coverage curve of uncertainties [N]; `error` [N] is any loss a row, such as 0/1 mistakes."""
    uncertainty, error = check_scores("uncertainty", uncertainty), check_scores("error", error)
    if uncertainty.shape != error.shape:
        raise ValueError(f"uncertainty and error must have as many rows; given {len(uncertainty)} and {len(error)}")
    _, group, size = torch.unique(uncertainty, return_inverse=True, return_counts=True)  # groups by rising uncertainty
    group_mean = torch.zeros(len(size), dtype=torch.float64).index_add(0, group, error) / size
    rows_kept = torch.arange(1, len(error) + 1, dtype=torch.float64)
    return RiskCoverage(rows_kept / len(error), group_mean.repeat_interleave(size).cumsum(0) / rows_kept)


def risk_coverage_area(uncertainty: Tensor, error: Tensor) -> float:
    """Return the area under the risk-coverage curve (AURC), the mean risk over coverages 1/N ... 1; less is better."""
    return risk_coverage(uncertainty, error).risk.mean().item()


def risk_at_coverage(uncertainty: Tensor, error: Tensor, coverages: Tensor) -> Tensor:
    """Return the risk [K] on the least uncertain rows at each coverage, which is rounded up to whole rows.

    Args:
        uncertainty: higher is refused first  # [N]
        error: any loss a row, such as 1 for a mistake and 0 for a correct row  # [N]
        coverages: shares of rows kept, within (0, 1]  # [K]
    """
    if not ((coverages > 0) & (coverages <= 1)).all():
        raise ValueError(f"coverages must lie within (0, 1]; given {coverages.tolist()}")
    risk = risk_coverage(uncertainty, error).risk
    rows_kept = (coverages.double() * len(risk) - 1e-6).ceil().long().clamp_min(1)  # 0.7 * 10 rows are 7, not 8
    return risk[rows_kept - 1]
