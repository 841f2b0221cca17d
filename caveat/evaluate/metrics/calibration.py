"""Calibration: does what is predicted with probability p happen a share p of the time?

Three numbers that are often all called "ECE", named apart here.

`top_label_ece` (Guo et al., 2017) looks at the most probable class only. Over equal-width bins of its probability,
    sum_b n_b / N |accuracy_b - confidence_b|.

`marginal_calibration_error` (Kumar, Liang and Ma, 2019) looks at the probability of every class. For class k, bins of
equal mass, s_b the mean probability and y_b the share of rows of class k in bin b,
    E_k = sum_b n_b / N [ (s_b - y_b)^2 - y_b (1 - y_b) / (n_b - 1) ],    result = sqrt( mean_k max(E_k, 0) ).
The subtracted term is the variance of y_b, which would otherwise count as miscalibration; a bin of one row has none and
adds nothing. Probabilities that tie share a bin, so the order of rows does not matter.

`pit_calibration_error` is for regression, where the predictive CDF at the target should be uniform.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from caveat.evaluate.metrics.per_row import check_classification

__all__ = [
    "Reliability",
    "central_coverage",
    "marginal_calibration_error",
    "pit_calibration_error",
    "pooled_reliability",
    "reliability",
    "share_interval",
    "top_label_ece",
]

TWENTIETHS = tuple(step / 20 for step in range(1, 20))  # 0.05, 0.10, ..., 0.95


@dataclass(frozen=True)
class Reliability:
    """One entry a bin, all float64: mean confidence, share correct, and rows; the first two NaN in an empty bin."""

    confidence: Tensor  # [bins]
    accuracy: Tensor  # [bins]
    count: Tensor  # [bins]

    @property
    def overconfidence(self) -> float:
        """Mean confidence minus mean accuracy, weighted by rows; negative where the network is under-confident."""
        weight = self.count / self.count.sum()
        return float((weight * (self.confidence - self.accuracy)).nansum())


def reliability(probs: Tensor, targets: Tensor, bins: int = 15) -> Reliability:
    """Return the reliability diagram of the top label, from probs [N, C] and targets [N].

    Bin b holds the rows with a confidence in (b / bins, (b + 1) / bins].
    """
    probs, targets = check_classification(probs, targets)
    _check_bins(bins)
    confidence, predicted = probs.max(dim=1)
    correct = (predicted == targets).double()
    inner_edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64)[1:-1]
    index = torch.searchsorted(inner_edges, confidence)  # [N]
    count, confidence_sum, correct_sum = (
        torch.zeros(bins, dtype=torch.float64).index_add(0, index, values)
        for values in (torch.ones_like(confidence), confidence, correct)
    )
    return Reliability(confidence_sum / count, correct_sum / count, count)


def pooled_reliability(diagrams: Sequence[Reliability]) -> Reliability:
    """Join several diagrams with the same bins into the diagram of all their rows."""
    count = torch.stack([diagram.count for diagram in diagrams]).double()  # [diagrams, bins]
    parts = [[diagram.confidence for diagram in diagrams], [diagram.accuracy for diagram in diagrams]]
    confidence, accuracy = ((torch.stack(part).nan_to_num(0.0) * count).sum(0) / count.sum(0) for part in parts)
    return Reliability(confidence, accuracy, count.sum(0))


def share_interval(share: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Return both ends [K] of Wilson's interval of one standard error, for shares [K] of counts [K].

    Unlike the share plus and minus its standard error, it keeps a width where the share is 0 or 1.
    """
    centre = (share + 0.5 / count) / (1 + 1 / count)
    reach = (share * (1 - share) / count + 0.25 / count**2).sqrt() / (1 + 1 / count)
    return torch.minimum(centre - reach, share), torch.maximum(centre + reach, share)


def top_label_ece(probs: Tensor, targets: Tensor, bins: int = 15) -> float:
    """Return the usual "ECE" of probs [N, C] and targets [N]: of the most probable class, with bins of equal width."""
    diagram = reliability(probs, targets, bins)
    gap = (diagram.accuracy - diagram.confidence).abs().nan_to_num(0.0)  # empty bins weigh nothing
    return ((diagram.count * gap).sum() / diagram.count.sum()).item()


def marginal_calibration_error(probs: Tensor, targets: Tensor, bins: int = 15) -> float:
    """Return the debiased l2 calibration error of every class's probability, averaged over classes.

    Probs are [N, C], targets [N]; the bins have equal mass.
    """
    probs, targets = check_classification(probs, targets)
    _check_bins(bins)
    rows, classes = probs.shape
    by_class = probs.T.contiguous()  # [C, N]
    indicator = torch.nn.functional.one_hot(targets, classes).T.double()  # [C, N]
    size, larger = divmod(rows, bins)  # the first `larger` bins hold one row more
    bin_number = torch.arange(1, bins)
    last = bin_number * size + bin_number.clamp_max(larger) - 1  # [bins - 1], the rank of each bin's largest
    inner_edges = by_class.sort(dim=1).values[:, last].contiguous()  # [C, bins - 1]
    index = torch.searchsorted(inner_edges, by_class)  # [C, N]; ties fall into the same bin
    count, prob_sum, hits = (
        torch.zeros(classes, bins, dtype=torch.float64).scatter_add(1, index, values)
        for values in (torch.ones_like(by_class), by_class, indicator)
    )
    share = hits / count.clamp_min(1)  # [C, bins]
    debiased = (prob_sum / count.clamp_min(1) - share).square() - share * (1 - share) / (count - 1).clamp_min(1)
    squared = (count / rows * torch.where(count > 1, debiased, 0.0)).sum(dim=1)  # [C]
    return squared.clamp_min(0).mean().sqrt().item()


def pit_calibration_error(pit: Tensor, levels: Sequence[float] = TWENTIETHS) -> float:
    """Return the mean of |share of rows with PIT <= p  -  p| over outputs and CDF levels p (not central intervals).

    The PIT is the predictive CDF at the target, uniform where calibrated. The largest value, near 0.5, is reached when
    every target lies beyond the same end of its predictive; N calibrated rows give about 0.3 / sqrt(N), not 0.

    Args:
        pit: predictive CDF at the target  # [N, D]
        levels: within (0, 1)
    """
    if pit.ndim != 2 or pit.numel() == 0:
        raise ValueError(f"pit must be [N, D] with at least one row; given shape {list(pit.shape)}")
    if not ((pit >= 0) & (pit <= 1)).all():  # also catches NaN
        raise ValueError("pit must lie in [0, 1] without NaN: give the predictive CDF at the target")
    if not levels or min(levels) <= 0 or max(levels) >= 1:
        raise ValueError(f"levels must be given, each within (0, 1); given {list(levels)}")
    nominal = torch.tensor(levels, dtype=torch.float64)[:, None]  # [L, 1]
    empirical = torch.stack([(pit <= level).double().mean(dim=0) for level in levels])  # [L, D]
    return (empirical - nominal).abs().mean().item()


def central_coverage(pit: Tensor, levels: Tensor) -> Tensor:
    """Return the share of targets inside the central interval of each level, |PIT - 1/2| <= level / 2.

    Args:
        pit: predictive CDF at the target  # [M]
        levels: nominal levels of the intervals  # [L]
    """
    distance = 2 * (pit.double() - 0.5).abs()  # [M]
    return (distance[:, None] <= levels + 1e-9).double().mean(dim=0)  # [L]


def _check_bins(bins: int) -> None:
    if bins < 1:
        raise ValueError(f"bins={bins}: at least one is needed (15 is usual)")
