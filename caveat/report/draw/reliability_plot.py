"""Reliability plots: how often predictions of a stated confidence are right, run by run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from caveat.evaluate.comparison import UNKNOWN
from caveat.evaluate.metrics import Reliability, format_number, reliability, share_interval
from caveat.report.draw.figures import (
    LEGEND_ABOVE,
    Plot,
    Style,
    diagonal,
    figure,
    graph_objects,
    styles,
)
from caveat.report.saved import SavedData, SavedRun, shared_names

__all__ = ["reliability_panel", "reliability_panels"]

BINS = 15
FEWEST = 5  # rows that a bin of the reliability diagram needs to be drawn


def reliability_panels(runs: Sequence[SavedRun]) -> list[Plot]:
    """Draw accuracy against confidence: clean data as filled marks, all shifted data together as open marks."""
    plots = []
    for run in runs:
        names = {name for family in run.shifts for name in shared_names(runs, family)}
        shifted = [data for family in run.shifts.values() for data in family if data.name in names]
        groups = {"clean": [run.clean] if run.clean else [], "shifted": shifted}
        diagrams = {name: _joint_reliability(sets) for name, sets in groups.items() if sets}
        plots.append(reliability_panel(run, styles(runs)[run.label], diagrams))
    return plots


def reliability_panel(run: SavedRun, style: Style, diagrams: Mapping[str, Reliability]) -> Plot:
    """Draw the reliability diagrams of one run on `clean` and on `shifted` data."""
    traces = [_reliability_trace(style, name, diagram) for name, diagram in diagrams.items()]
    words = [f"on {name} data {_calibration_words(diagram)}" for name, diagram in diagrams.items()]
    ece = run.clean.metrics.get("ece", UNKNOWN).mean if run.clean else None
    x = {"title": {"text": "Confidence"}, "range": [0, 1.03], "tickformat": ".0%"}
    y = {"title": {"text": "Accuracy"}, "range": [0, 1.03], "tickformat": ".0%"}
    legend = LEGEND_ABOVE if len(traces) > 1 else {}
    drawn = figure(traces, x, y, height=280, layout={"shapes": [diagonal()], **legend})
    text = f"Reliability of {run.label}: {'; '.join(words)}."
    return Plot(f"{run.label} · ECE {format_number(ece)}", text, drawn, style.index)


def _joint_reliability(sets: Sequence[SavedData]) -> Reliability:
    probs = np.concatenate([data.predictions["probs"] for data in sets])
    targets = np.concatenate([data.predictions["targets"] for data in sets])
    return reliability(torch.from_numpy(probs), torch.from_numpy(targets), bins=BINS)


def _reliability_trace(style: Style, name: str, diagram: Reliability) -> Any:
    filled = diagram.count >= FEWEST
    parts = [part[filled] for part in (diagram.confidence, diagram.accuracy, diagram.count)]
    confidence, accuracy, count = (part.numpy() for part in parts)
    low, high = (end.numpy() for end in share_interval(*parts[1:]))
    clean = name == "clean"
    return graph_objects().Scatter(
        x=confidence.astype(np.float32),
        y=accuracy.astype(np.float32),
        customdata=count.astype(np.int32),
        error_y={"array": high - accuracy, "arrayminus": accuracy - low, "thickness": 1, "width": 0},
        mode="lines+markers",
        line={"color": style.colour, "width": 2 if clean else 1.25, "dash": "solid" if clean else "dash"},
        marker={
            "symbol": "circle" if clean else "circle-open",
            "color": style.colour,
            "size": 4 + 9 * np.sqrt(count / count.max(initial=1)),
            "line": {"width": 1.5, "color": style.colour},
        },
        name=name,
        cliponaxis=False,
        hovertemplate=f"{name}<br>confidence %{{x:.1%}}<br>accuracy %{{y:.1%}}<br>%{{customdata}} rows<extra></extra>",
    )


def _calibration_words(diagram: Reliability) -> str:
    direction = "over-confident" if diagram.overconfidence > 0 else "under-confident"
    return f"{direction} by {abs(diagram.overconfidence):.1%} on average"
