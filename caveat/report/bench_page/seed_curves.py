"""Plots of a bench from all rows and seeds: calibration, rejection, out-of-distribution data. Bands are over seeds.

A curve is computed for each seed on a common grid, then averaged: mean and standard error s / sqrt(n) at every point.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from caveat.evaluate.comparison import curve_over_seeds
from caveat.evaluate.metrics import Reliability, format_number, pooled_reliability, risk_at_coverage, roc_curve
from caveat.report.draw import (
    Plot,
    band,
    diagonal,
    figure,
    histogram_panels,
    line,
    reliability_panel,
    styles,
    uncertainty_dots,
)
from caveat.report.numbers import OOD
from caveat.report.saved import BenchCell, BenchGroup, SavedRun

__all__ = ["calibration_plots", "histogram_plots", "ood_dots", "rejection_plot", "roc_plot"]

REJECTED = np.linspace(0, 0.95, 77)  # shares of rows
FALSE_ALARMS = np.linspace(0, 1, 101)
BINS = 24  # of a histogram


def calibration_plots(group: BenchGroup) -> list[Plot]:
    """Draw accuracy against confidence, one panel a method: clean rows, and those of all shifts together."""
    plots = []
    for run in group.done:
        shifted = [data.name for family in run.shifts.values() for data in family]
        names_by_kind = {"clean": [run.clean.name] if run.clean else [], "shifted": shifted}
        diagrams = {kind: _diagram(group.seeds(run.label), names) for kind, names in names_by_kind.items() if names}
        plots.append(reliability_panel(run, styles(group.runs)[run.label], diagrams))
    return plots


def _diagram(cells: Sequence[BenchCell], names: Sequence[str]) -> Reliability:
    """The diagram of some conditions over all seeds; counts are those of one seed, as seeds see the same rows."""
    keys = ("bin_confidence", "bin_accuracy", "bin_count")
    scores = [cell.row_scores(name) for cell in cells for name in names]
    pooled = pooled_reliability([Reliability(*(torch.from_numpy(part[key]) for key in keys)) for part in scores])
    return replace(pooled, count=pooled.count / len(cells))


def rejection_plot(group: BenchGroup, title: str, names: Sequence[str]) -> Plot:
    """Draw accuracy (or RMSE) on the rows that are left against the share rejected, the most uncertain first."""
    is_class = group.kind == "classification"
    score = "accuracy" if is_class else "RMSE"
    form = ".2%" if is_class else ".4~g"
    traces, words = [], []
    for run in group.done:
        curves = np.stack([_rejection_curve(cell, names) for cell in group.seeds(run.label)])  # [S, R]
        hover = f"rejected %{{x:.0%}}<br>{score} on the rest %{{y:{form}}}"
        traces += _seed_curve(group, run, REJECTED, curves, hover)
        mean = curves.mean(0)
        at = [f"{mean[i]:.1%}" if is_class else format_number(float(mean[i])) for i in (0, len(REJECTED) // 2)]
        words.append(f"{run.label} {at[0]} on all rows, {at[1]} with {REJECTED[len(REJECTED) // 2]:.0%} rejected")
    x = {"title": {"text": "Share of rows rejected"}, "tickformat": ".0%", "range": [0, 1], "dtick": 0.25}
    y = {"title": {"text": f"{score[0].upper()}{score[1:]} on the rest"}} | ({"tickformat": ".0~%"} if is_class else {})
    text = f"{score} against the share rejected on {title}: {'; '.join(words)}."
    return Plot(title, text[0].upper() + text[1:], figure(traces, x, y))


def _rejection_curve(cell: BenchCell, names: Sequence[str]) -> np.ndarray:
    """Accuracy or RMSE of one seed at each share rejected, [R]."""
    is_class = cell.run.kind == "classification"
    scores = [cell.row_scores(name) for name in names]
    uncertainty = np.concatenate([cell.row_uncertainty(name) for name in names])
    losses = [1.0 - part["correct"] if is_class else _mean_of_row(part["squared_error"]) for part in scores]
    loss = torch.from_numpy(np.concatenate(losses).astype(np.float64))
    risk = risk_at_coverage(torch.from_numpy(uncertainty), loss, torch.from_numpy(1 - REJECTED)).numpy()
    return np.asarray(1 - risk if is_class else np.sqrt(risk))


def _mean_of_row(values: np.ndarray) -> np.ndarray:
    return values.reshape(len(values), -1).mean(1)


def ood_dots(group: BenchGroup, name: str) -> Plot | None:
    """Draw medians and quartiles of the same, all methods in one plot."""
    is_class = group.kind == "classification"
    return uncertainty_dots(group.runs, name, _both_sides(group, name), "Entropy, nats" if is_class else "Variance")


def _both_sides(group: BenchGroup, name: str) -> dict[str, list[np.ndarray]]:
    """How unsure each method is of clean rows and of one out-of-distribution set, all seeds together."""
    values = {}
    for run in group.done:
        pairs = [_clean_and_ood(cell, name) for cell in _scored_on(group, run, name)]
        if pairs:
            values[run.label] = [np.concatenate(side) for side in zip(*pairs, strict=True)]
    return values


def histogram_plots(group: BenchGroup, name: str) -> list[Plot]:
    """Draw how unsure each method is of clean rows and of one out-of-distribution set, all seeds together."""
    values = _both_sides(group, name)
    if not values:
        return []
    if group.kind == "classification":
        classes = max(len(group.runs[0].class_names), 2)
        return histogram_panels(group.runs, name, values, np.linspace(0, math.log(classes), BINS + 1), "Entropy, nats")
    values = {label: [np.log10(side.clip(1e-30)) for side in both] for label, both in values.items()}
    ends = np.quantile(np.concatenate([side for both in values.values() for side in both]), [0.001, 0.999])
    edges = np.linspace(ends[0], ends[1] + 1e-6, BINS + 1)
    return histogram_panels(group.runs, name, values, edges, "Variance, log10")


def _scored_on(group: BenchGroup, run: SavedRun, name: str) -> list[BenchCell]:
    """The cells of a method that were scored on clean data and on the set `name`."""
    return [cell for cell in group.seeds(run.label) if cell.run.clean and name in cell.run.by_name]


def _clean_and_ood(cell: BenchCell, name: str) -> tuple[np.ndarray, np.ndarray]:
    """The uncertainty of every clean row, [N], and of every row of the set `name`, [M]."""
    assert cell.run.clean is not None
    return cell.row_uncertainty(cell.run.clean.name), cell.row_uncertainty(name)


def roc_plot(group: BenchGroup, name: str) -> Plot:
    """Draw the share of out-of-distribution rows that are noticed against that of clean rows taken for such."""
    traces, words = [], []
    for run in group.done:
        cells = _scored_on(group, run, name)
        if not cells:
            continue
        curves = np.stack([np.interp(FALSE_ALARMS, *roc_curve(*_clean_and_ood(cell, name))) for cell in cells])
        traces += _seed_curve(group, run, FALSE_ALARMS, curves, "false alarms %{x:.0%}<br>noticed %{y:.1%}")
        words.append(f"{run.label} {format_number(run.by_name[name].metrics[OOD[group.kind]].mean)}")
    x = {"title": {"text": "Clean rows taken for out of distribution"}, "tickformat": ".0%", "range": [0, 1.01]}
    y = {"title": {"text": "Out-of-distribution rows noticed"}, "tickformat": ".0%", "range": [0, 1.02]}
    text = f"ROC of telling {name} from clean data; area under the curve: {', '.join(words)}."
    return Plot(f"{name} · ROC", text, figure(traces, x, y, height=340, layout={"shapes": [diagonal()]}))


def _seed_curve(group: BenchGroup, run: SavedRun, x: np.ndarray, curves: np.ndarray, hover: str) -> list[object]:
    """The mean over seeds of curves [S, X] as a line, and its standard error as a band where there are several."""
    style = styles(group.runs)[run.label]
    mean, error = curve_over_seeds(curves)
    curve = line(style, run.label, x, mean, hover, markers=False)
    return [curve] if error is None else [band(style, x, mean, error), curve]
