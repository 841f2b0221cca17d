"""Parts of sections that the page of runs and the page of a bench share."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from caveat.report.draw.html_pieces import fold, plot_grid
from caveat.report.draw.joint_plots import severity_curves
from caveat.report.numbers import Answer, verdicts
from caveat.report.saved import SavedRun
from caveat.report.wording import joined_by_and

__all__ = ["severity_folds", "verdict_list"]

OPEN_FAMILIES = 3  # further shift families are folded


def severity_folds(runs: Sequence[SavedRun], families: Sequence[str]) -> str:
    """Draw curves against severity, in one part that opens and closes for each shift family that has any."""
    drawn = [(family, severity_curves(runs, family)) for family in families]
    shown = [(family, plots) for family, plots in drawn if plots]
    return "".join(fold(family, "", plot_grid(plots), i < OPEN_FAMILIES) for i, (family, plots) in enumerate(shown))


def verdict_list(answer: Answer, base: str) -> str:
    """List which runs are better than the baseline, not distinguishable from it, and worse."""
    words = {
        "better": f"Better than {base}",
        "level": f"Level with {base} to the digits shown",
        "not distinguishable": f"Not distinguishable from {base}",
        "worse": f"Worse than {base}",
    }
    items = "".join(
        f'<li class="{verdict.split()[0]}"><b>{escape(words[verdict])}:</b> {escape(joined_by_and(labels))}</li>'
        for verdict, labels in verdicts(answer).items()
        if labels
    )
    return f'<ul class="verdicts">{items}</ul>'
