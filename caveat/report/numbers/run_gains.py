"""The gain of one run over another, from their saved predictions on the same rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from caveat.evaluate.comparison import Gain, gain_in_auroc, gain_over_rows
from caveat.evaluate.predictions import row_uncertainty
from caveat.report.saved import SavedRun, matched

__all__ = ["auroc_gain", "log_prob_gain"]


def log_prob_gain(run: SavedRun, other: SavedRun, names: Sequence[str]) -> Gain | None:
    """Return the gain in log-likelihood, nats a row, averaged over data sets; None where one is missing or infinite."""
    if not all(name in run.by_name and name in other.by_name for name in names):
        return None
    pairs = [matched(run.by_name[name], other.by_name[name]) for name in names]
    gains = [ours["log_prob"].astype(np.float64) - theirs["log_prob"].astype(np.float64) for ours, theirs in pairs]
    return gain_over_rows(gains, [ours["rows"] for ours, _ in pairs])


def auroc_gain(run: SavedRun, other: SavedRun, name: str) -> Gain | None:
    """Return the gain in AUROC of telling the data set `name` from clean data; None where a run lacks either."""
    if run.clean is None or other.clean is None or name not in run.by_name or name not in other.by_name:
        return None
    if run.clean.name != other.clean.name:
        return None
    inside, ood = matched(run.clean, other.clean), matched(run.by_name[name], other.by_name[name])
    ours, theirs = ((row_uncertainty(inside[which]), row_uncertainty(ood[which])) for which in (0, 1))
    return gain_in_auroc(ours, theirs, (inside[0]["rows"], ood[0]["rows"]))
