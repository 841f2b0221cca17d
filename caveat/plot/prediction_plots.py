"""Predictions as the runs that the report draws, and its figures in colours that suit light and dark pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch

from caveat.posterior import Posterior
from caveat.predictive import Predictive, RegressionPredictive
from caveat.report.draw import (
    LEGEND_ABOVE,
    band,
    entropy_panels,
    figure,
    graph_objects,
    interval_panels,
    line,
    palette_style,
    reliability_panels,
    risk_coverage_plot,
)
from caveat.report.saved import SavedData, SavedRun

__all__ = ["bands", "chosen_weights", "entropy", "intervals", "reliability", "risk_coverage"]

Predictions = Predictive | Mapping[str, Predictive]


def reliability(predictions: Predictions, targets: Any) -> Any:
    """How often predictions are right against how sure they are; below the dotted line they are too sure."""
    plots = reliability_panels(_runs(predictions, targets, "classification"))
    return _for_notebooks([plot.figure for plot in plots], [*_labelled(predictions)])


def risk_coverage(predictions: Predictions, targets: Any) -> Any:
    """The error rate on the rows kept when the most uncertain are refused first."""
    runs = _runs(predictions, targets, "classification")
    return _for_notebooks([risk_coverage_plot(runs, "", ["clean"]).figure], [])


def entropy(predictions: Predictions, ood: Predictions) -> Any:
    """Histograms of the entropy on data like those of the fit (filled) and out of distribution (line)."""
    runs = _runs(predictions, None, "classification", ood)
    if len(runs) > 1:
        raise ValueError(f"entropy shows one posterior at a time, got {len(runs)}: call it for each")
    return _for_notebooks([plot.figure for plot in entropy_panels(runs, "out of distribution")], [])


def intervals(prediction: RegressionPredictive, targets: Any) -> Any:
    """Predicted against true values with 90% intervals; crosses are targets outside theirs."""
    return _for_notebooks([plot.figure for plot in interval_panels(_runs(prediction, targets, "regression"))[:1]], [])


def bands(x: Any, prediction: RegressionPredictive, targets: Any = None, levels: Sequence[float] = (0.9, 0.5)) -> Any:
    """The mean over one input x [N] and the central intervals of `levels`, the wide ones first; targets are points."""
    place = _flat(x)
    mean = _flat(prediction.mean)
    if len(mean) != len(place):
        raise ValueError(
            f"bands are over one input and one output a row: x has {len(place)} numbers, the mean {len(mean)}"
        )
    order, style = np.argsort(place, kind="stable"), palette_style(0, 0)
    traces = []
    for level in sorted(levels, reverse=True):
        lower, upper = (_flat(end)[order] for end in prediction.interval(level))
        traces.append(band(style, place[order], (lower + upper) / 2, (upper - lower) / 2))
    traces.append(line(style, "mean", place[order], mean[order], "%{x:.4~g}<br>%{y:.4~g}", markers=False))
    if targets is not None:
        marks = {"size": 4, "color": "#7f8894"}
        points = graph_objects().Scatter(x=place, y=_flat(targets), mode="markers", marker=marks, name="targets")
        traces.append(points)
    return _for_notebooks([figure(traces, {}, {}, height=340)], [])


def chosen_weights(posterior: Posterior) -> Any:
    """How many weights of each parameter a subnetwork holds, as a share of that parameter."""
    chosen = posterior.state.get("subnetwork")
    if not chosen:
        name = type(posterior.method).__name__
        raise ValueError(f"{name} chooses no weights: this plot is for SubnetworkLaplace")
    sizes = {name: tensor.numel() for name, tensor in posterior.state["params"].items()}
    counts = {name: len(chosen[name]) if name in chosen else 0 for name in sizes}
    shares = [counts[name] / size for name, size in sizes.items()]
    said = [f"{counts[name]:,} of {size:,}" for name, size in sizes.items()]
    style = palette_style(0, 0)
    hover = "%{y}: %{text}<extra></extra>"
    bars = graph_objects().Bar(
        x=shares,
        y=[*sizes],
        orientation="h",
        text=said,
        marker={"color": style.colour},
        hovertemplate=hover,
    )
    x = {"title": {"text": "Share of the weights that are chosen"}, "tickformat": ".0%", "rangemode": "tozero"}
    drawn = figure([bars], x, {"autorange": "reversed", "automargin": True}, height=90 + 28 * len(sizes))
    return _for_notebooks([drawn], [])


def _labelled(predictions: Predictions) -> dict[str, Predictive]:
    return dict(predictions) if isinstance(predictions, Mapping) else {"prediction": predictions}


def _runs(predictions: Predictions, targets: Any, kind: str, ood: Predictions | None = None) -> list[SavedRun]:
    """Predictions as the runs that the report draws."""
    others = {} if ood is None else _labelled(ood)
    runs = []
    for label, prediction in _labelled(predictions).items():
        if prediction.kind != kind:
            raise TypeError(f"this plot is of a {kind}, and {label!r} is a {type(prediction).__name__}")
        data = [_data("clean", "test", prediction, targets)]
        if label in others:
            data.append(_data("out of distribution", "ood", others[label], None))
        runs.append(SavedRun(label, "", {}, kind, (), {}, tuple(data), Path()))
    return runs


def _data(name: str, role: str, prediction: Predictive, targets: Any) -> SavedData:
    columns = prediction.columns(None if targets is None else torch.as_tensor(targets).to(prediction.samples.device))
    arrays = {key: column.detach().cpu().numpy() for key, column in columns.items()}
    return SavedData(name, name, None, role, len(arrays["rows"]), {}, Path(), prediction.kind, 0, arrays)


def _for_notebooks(figures: Sequence[Any], labels: Sequence[str]) -> Any:
    """One figure with the traces of all, in colours of text and grid that suit light and dark pages."""
    drawn = figures[0]
    if len(figures) > 1:
        for one, label in zip(figures, labels, strict=True):
            one.update_traces(name=escape(label, quote=False))
        drawn = graph_objects().Figure([trace for one in figures for trace in one.data], drawn.layout)
        drawn.update_layout(LEGEND_ABOVE)
    grey, clear = "#7f8894", "rgba(0,0,0,0)"
    drawn.update_layout(paper_bgcolor=clear, plot_bgcolor=clear, font={"color": grey})
    drawn.update_shapes(line={"color": grey})
    for axis in (drawn.update_xaxes, drawn.update_yaxes):
        axis(gridcolor="rgba(127,136,148,.25)", zerolinecolor="rgba(127,136,148,.4)")
    return drawn


def _flat(values: Any) -> np.ndarray:
    tensor = torch.as_tensor(values).detach().cpu()
    flat: np.ndarray = tensor.reshape(-1).double().numpy()
    return flat
