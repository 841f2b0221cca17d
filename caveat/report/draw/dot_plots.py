"""One plot for all runs: how unsure each is of clean rows, and of rows that are out of distribution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from caveat.evaluate.metrics import format_number
from caveat.report.draw.figures import LEGEND_ABOVE, LINE_HEIGHT, Plot, figure, graph_objects, safe, styles
from caveat.report.saved import SavedRun

__all__ = ["uncertainty_dots"]

_FRAME = 110  # pixels around the lines


def uncertainty_dots(
    runs: Sequence[SavedRun], name: str, values: Mapping[str, Sequence[np.ndarray]], axis: str
) -> Plot | None:
    """Draw medians and quartiles of uncertainty, one line a run: clean rows (ring) and the set `name` (disc).

    `values` are, by label, the uncertainties about clean rows and about those of the set, [N] and [M].
    """
    shown = [run.label for run in runs if run.label in values]
    if not shown:
        return None
    go, traces, words = graph_objects(), [], []
    for label in reversed(shown):  # plotly counts from below
        style = styles(runs)[label]
        for what, one, symbol in (("clean", values[label][0], "circle-open"), (name, values[label][1], "circle")):
            low, middle, high = (float(value) for value in np.quantile(one, (0.25, 0.5, 0.75)))
            words.append(f"{label}, {what}: {format_number(middle)}")
            traces.append(
                go.Scatter(
                    x=[middle],
                    y=[safe(label)],
                    error_x={"array": [high - middle], "arrayminus": [middle - low], "thickness": 1.5, "width": 0},
                    mode="markers",
                    marker={"color": style.colour, "size": 11, "symbol": symbol, "line": {"width": 2}},
                    hovertemplate=f"<b>{safe(label)}</b><br>{safe(what)}<br>median %{{x:.3g}}<extra></extra>",
                    meta=style.index,
                    showlegend=False,
                )
            )
    for what, symbol in (("clean", "circle-open"), (safe(name), "circle")):
        marker = {"color": "#7F7F7F", "size": 10, "symbol": symbol, "line": {"width": 2}}
        traces.append(go.Scatter(x=[None], y=[None], mode="markers", marker=marker, name=what))
    height, layout = _FRAME + LINE_HEIGHT * len(shown), {**LEGEND_ABOVE, "meta": LINE_HEIGHT}
    drawn = figure(traces, {"title": {"text": axis}}, {"automargin": True}, height=height, layout=layout)
    return Plot(f"clean against {name}", f"Median {axis.split(',')[0].lower()}: {'; '.join(words)}.", drawn)
