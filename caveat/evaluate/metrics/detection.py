"""How well a score tells out-of-distribution data (ood, the positives) from data like the training set (inside).

A higher score must mean "more likely ood" (entropy, epistemic uncertainty). Calling everything with a score >= t
ood gives, as t falls through the distinct scores, a detection rate TPR(t) and a false-alarm rate FPR(t). Rows that
tie enter together, so nothing depends on their order:

- auroc = P(ood > inside) + 1/2 P(ood = inside), the area under TPR against FPR with straight lines over ties;
- aupr  = sum_t (TPR(t) - TPR(t before)) precision(t), the average precision; its floor is the share of ood rows;
- fpr95 = FPR(t) at the highest t among the scores with TPR(t) >= 0.95: false alarms at 95% detection, less is better.
"""

import numpy as np
import torch
from torch import Tensor

from caveat.evaluate.metrics.per_row import check_scores

__all__ = ["ood_scores", "placements", "roc_curve"]


def ood_scores(inside: Tensor, ood: Tensor) -> dict[str, float]:
    """Return `auroc`, `aupr` and `fpr95` of telling ood from inside, as defined above.

    Args:
        inside: scores on data like the training set  # [N]
        ood: scores on out-of-distribution data  # [M]
    """
    inside, ood = check_scores("inside", inside), check_scores("ood", ood)
    values, index = torch.unique(torch.cat([ood, inside]), return_inverse=True)  # [U] ascending, [M + N]
    at_score = torch.stack(
        [part.bincount(minlength=len(values)) for part in (index[: len(ood)], index[len(ood) :])]
    ).flip(1)  # [2, U], ood and inside rows with each score, highest score first
    detected, alarms = at_score.cumsum(dim=1)  # [U] each, exact integers
    new_detected, new_alarms = at_score.double()
    half_tied = detected - new_detected / 2
    within = detected * 100 >= len(ood) * 95
    return {
        "auroc": ((new_alarms * half_tied).sum() / (len(inside) * len(ood))).item(),
        "aupr": ((new_detected * detected / (detected + alarms)).sum() / len(ood)).item(),
        "fpr95": alarms[within][0].item() / len(inside),
    }


def placements(inside: np.ndarray, ood: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return P(ood > x) for each x inside, [N], and P(x > inside) for each x ood, [M].

    The mean of either is the AUROC, and their spreads give its variance (DeLong, DeLong and Clarke-Pearson, 1988).
    """

    def share_below(values: np.ndarray, reference: np.ndarray) -> np.ndarray:  # ties count one half
        ordered = np.sort(reference)
        below = np.searchsorted(ordered, values, "left") + np.searchsorted(ordered, values, "right")
        return below / (2 * len(ordered))

    return 1 - share_below(inside, ood), share_below(ood, inside)


def roc_curve(inside: np.ndarray, ood: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return false-alarm rates and detection rates at every threshold, from (0, 0) to (1, 1); ties are slopes.

    Args:
        inside: scores on data like the training set  # [N]
        ood: scores on out-of-distribution data  # [M]
    """
    thresholds = np.unique(np.concatenate([inside, ood]))[::-1]

    def share_at_or_above(values: np.ndarray) -> np.ndarray:
        return np.r_[0.0, 1 - np.searchsorted(np.sort(values), thresholds, "left") / len(values)]

    return share_at_or_above(inside), share_at_or_above(ood)
