"""A choice among candidates by evidence, which validation rows overrule only where they can tell.

    told apart:  mean_n (l_kn - l_bn) > max(ERRORS * standard error over rows n, WORTH),    b the best on these rows

With few validation rows the curve of their mean loss is flat and its minimum lies anywhere; the evidence, which is of
all training rows, hardly moves. So the candidate nearest to the evidence's is taken that the rows cannot tell from the
best. Fewer than twenty rows tell nothing: the rare row that a sure network gets wrong is as likely not among them.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["EvidenceChoice", "nearest_to"]

ERRORS = 1.0  # standard errors that rows need to tell two candidates apart
WORTH = 0.01  # nats a row: what no one would notice
LEAST_ROWS = 20


@dataclass(frozen=True)
class EvidenceChoice:
    """Which candidate was taken, and those that the validation rows would have let pass as well."""

    place: int
    anchor: int  # the evidence's
    passed: Tensor  # [K], bool
    rows: int

    def report(self, values: Tensor) -> dict[str, Any]:
        """What was chosen and between which values [K] of the candidates the rows could not tell."""
        allowed = values[self.passed]
        overruled = self.place != self.anchor
        return {
            "precision_from": "evidence, overruled by validation" if overruled else "evidence",
            "evidence_multiple": float(values[self.anchor]),
            "not_told_apart": [float(allowed.min()), float(allowed.max())],
            "validation_rows": self.rows,
        }


def nearest_to(anchor: int, places: Tensor, losses: Tensor) -> EvidenceChoice:
    """The candidate nearest to the anchor that is not told apart from the best.

    Args:
        anchor: the candidate that the evidence prefers.
        places: of the candidates, [K, D]: distances between them say what is near.
        losses: of each validation row under each candidate, [K, rows]; infinite where there is no posterior.
    """
    rows = losses.shape[1]
    means = torch.where(losses.isfinite().all(1), losses.mean(1), torch.inf)
    best = int(means.argmin())
    differences = losses - losses[best]
    error = differences.std(1) / rows**0.5 if rows >= LEAST_ROWS else torch.full_like(means, torch.inf)
    limit = (ERRORS * torch.where(error.isfinite(), error, torch.inf)).clamp_min(WORTH)
    passed = means.isfinite() & (means - means[best] <= limit)
    distances = torch.where(passed, (places - places[anchor]).norm(dim=1), torch.inf)
    return EvidenceChoice(int(distances.argmin()), anchor, passed, rows)
