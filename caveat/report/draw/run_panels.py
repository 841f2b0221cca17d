"""Small multiples: one panel a run, all on the same axes, so that panels can be compared at a glance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from caveat.evaluate.comparison import UNKNOWN
from caveat.evaluate.metrics import central_coverage, format_number
from caveat.evaluate.predictions import row_uncertainty
from caveat.report.draw.figures import (
    LEGEND_ABOVE,
    Plot,
    Style,
    diagonal,
    figure,
    graph_objects,
    line,
    safe,
    styles,
)
from caveat.report.numbers import OOD
from caveat.report.saved import SavedRun

__all__ = [
    "coverage_plot",
    "entropies",
    "entropy_panels",
    "histogram_panels",
    "interval_panels",
]

LEVELS = torch.arange(1, 20, dtype=torch.float64) / 20  # nominal levels of central intervals
INTERVAL = ("targets", "mean", "lower_90", "upper_90")
SHOWN_OUTPUTS = 3
SHOWN_ROWS = 150


def entropy_panels(runs: Sequence[SavedRun], name: str) -> list[Plot]:
    """Draw histograms of uncertainty on clean data (filled) and on one out-of-distribution set (line)."""
    values = entropies(runs, name)
    if not values:
        return []
    classes = next(run for run in runs if run.label in values).by_name[name].predictions["probs"].shape[1]
    return histogram_panels(runs, name, values, np.linspace(0, math.log(classes), 25), "Entropy, nats")


def entropies(runs: Sequence[SavedRun], name: str) -> dict[str, list[np.ndarray]]:
    """The entropies of clean rows and of an out-of-distribution set, [N] and [M], of each run that has both."""
    shown = [run for run in runs if run.clean and name in run.by_name and "probs" in run.by_name[name].predictions]
    return {
        run.label: [row_uncertainty(data.predictions) for data in (run.clean, run.by_name[name]) if data]
        for run in shown
    }


def histogram_panels(
    runs: Sequence[SavedRun], name: str, values: Mapping[str, Sequence[np.ndarray]], edges: np.ndarray, axis: str
) -> list[Plot]:
    """Draw histograms of uncertainty, one panel a run, all with the same axes.

    `values` are, by label, the uncertainties about clean rows and about those of the set `name`, [N] and [M].
    """
    shares = {
        label: [np.histogram(one.clip(edges[0], edges[-1]), edges)[0] / len(one) for one in both]
        for label, both in values.items()
    }
    top = max(float(share.max()) for pair in shares.values() for share in pair)
    shown = [run for run in runs if run.label in values]
    return [_histogram_panel(styles(runs)[run.label], run, name, edges, shares[run.label], top, axis) for run in shown]


def _histogram_panel(
    style: Style, run: SavedRun, name: str, edges: np.ndarray, shares: list[np.ndarray], top: float, axis: str
) -> Plot:
    go, middles, width = graph_objects(), (edges[1:] + edges[:-1]) / 2, edges[1] - edges[0]
    word = axis.split(",")[0]
    hover = f"{word.lower()} %{{x:.2f}}<br>%{{y:.1%}} of rows<extra></extra>"
    inside = go.Bar(
        x=middles.astype(np.float32),
        y=shares[0].astype(np.float32),
        width=width,
        marker={"color": style.faint(0.45), "line": {"width": 0}},
        name="clean",
        hovertemplate="clean<br>" + hover,
    )
    ood = go.Scatter(
        x=np.concatenate([edges[:1], middles, edges[-1:]]).astype(np.float32),
        y=np.concatenate([[0], shares[1], [0]]).astype(np.float32),
        line={"shape": "hvh", "color": style.colour, "width": 2.25},
        mode="lines",
        name=safe(name),
        hovertemplate=safe(name) + "<br>" + hover,
    )
    auroc = run.by_name[name].metrics.get(OOD[run.kind], UNKNOWN).mean
    x = {"title": {"text": axis}, "range": [float(edges[0]), float(edges[-1])]}
    y = {"title": {"text": "Share of rows"}, "tickformat": ".0%", "range": [0, top * 1.05]}
    means = [format_number(float(share @ middles)) for share in shares]
    text = f"{axis} under {run.label}: mean {means[0]} on clean data, {means[1]} on {name}."
    drawn = figure([inside, ood], x, y, height=260, layout={"bargap": 0, **LEGEND_ABOVE})
    return Plot(f"{run.label} · AUROC {format_number(auroc)}", text, drawn, style.index)


def coverage_plot(runs: Sequence[SavedRun], title: str, names: Sequence[str]) -> Plot:
    """Draw the share of targets inside the central interval of each nominal level, all runs together."""
    traces, words = [], []
    for run in runs:
        style = styles(runs)[run.label]
        pits = [run.by_name[name].predictions["pit"].ravel() for name in names if name in run.by_name]
        if not pits:
            continue
        share = central_coverage(torch.from_numpy(np.concatenate(pits)), LEVELS).numpy()  # [L]
        hover = "nominal %{x:.0%}<br>covered %{y:.1%}"
        traces.append(line(style, run.label, LEVELS.numpy(), share, hover, markers=True))
        words.append(f"{run.label} covers {share[17]:.0%} at 90%")
    x = {"title": {"text": "Nominal level of the interval"}, "range": [0, 1.02], "tickformat": ".0%"}
    y = {"title": {"text": "Targets inside it"}, "range": [0, 1.02], "tickformat": ".0%"}
    drawn = figure(traces, x, y, height=340, layout={"shapes": [diagonal()]})
    return Plot(title, f"Coverage against nominal level on {title}: {'; '.join(words)}.", drawn)


def interval_panels(runs: Sequence[SavedRun]) -> list[Plot]:
    """Draw predicted against true values of clean data with 90% intervals; crosses are targets outside theirs."""
    arrays = {run.label: run.clean.predictions for run in runs if run.clean}
    if not arrays:
        return []
    outputs = next(iter(arrays.values()))["targets"].shape[1]
    plots = []
    for output in range(min(outputs, SHOWN_OUTPUTS)):
        columns = {label: [one[key][:, output] for key in INTERVAL] for label, one in arrays.items()}
        ends = [value for column in columns.values() for value in (column[2].min(), column[3].max())]
        span = [float(min(ends)), float(max(ends))]
        suffix = f" · output {output}" if outputs > 1 else ""
        plots += [_interval_panel(runs, run, columns[run.label], span, suffix) for run in runs if run.label in columns]
    return plots


def _interval_panel(
    runs: Sequence[SavedRun], run: SavedRun, columns: list[np.ndarray], span: list[float], suffix: str
) -> Plot:
    style = styles(runs)[run.label]
    order = np.argsort(columns[0], kind="stable")
    chosen = order[np.unique(np.linspace(0, len(order) - 1, SHOWN_ROWS).astype(int))]
    targets, mean, lower, upper = (column[chosen].astype(np.float32) for column in columns)
    inside = (lower <= targets) & (targets <= upper)
    trace = graph_objects().Scatter(
        x=targets,
        y=mean,
        error_y={
            "array": upper - mean,
            "arrayminus": mean - lower,
            "thickness": 1,
            "width": 0,
            "color": style.faint(0.35),
        },
        mode="markers",
        marker={"color": style.colour, "size": np.where(inside, 4, 7), "symbol": np.where(inside, "circle", "x")},
        hovertemplate="true %{x:.4~g}<br>predicted %{y:.4~g}<extra></extra>",
    )
    low, high = float(targets.min()), float(targets.max())
    same = {**diagonal(), "x0": low, "y0": low, "x1": high, "y1": high}
    score = run.clean.metrics.get("rmse", UNKNOWN).mean if run.clean else None
    words = f"{inside.mean():.0%} of the {len(chosen)} rows shown lie in their interval"
    text = f"Predicted against true under {run.label}{suffix}: {words}."
    x: dict[str, Any] = {"title": {"text": f"True {safe(run.target or 'value')}"}}
    y = {"title": {"text": f"Predicted {safe(run.target or 'value')}"}, "range": span}
    drawn = figure([trace], x, y, layout={"shapes": [same]})
    return Plot(f"{run.label}{suffix} · RMSE {format_number(score)}", text, drawn, style.index)
