"""Plots of a bench from all rows and seeds: calibration, rejection, data from outside. Bands are over seeds.

A curve is computed for each seed on a common grid, then averaged: mean and standard error s / sqrt(n) at every point.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from caveat.evaluate.calibration import Reliability
from caveat.evaluate.selective import risk_coverage
from caveat.report.bench_runs import Group, row_scores
from caveat.report.drawing import Plot, diagonal, figure, line, styles
from caveat.report.panels import histogram_panels, reliability_panel
from caveat.report.plots import band
from caveat.report.runs import Run
from caveat.report.tables import OUTSIDE, format_number

__all__ = ["calibration_plots", "histogram_plots", "rejection_plot", "roc_curve", "roc_plot"]

REJECTED = np.linspace(0, 0.95, 77)  # shares of rows
FALSE_ALARMS = np.linspace(0, 1, 101)
BINS = 24  # of a histogram


def calibration_plots(group: Group) -> list[Plot]:
    """Accuracy against confidence, one panel a method: clean rows, and those of all shifts together."""
    plots = []
    for run in group.done:
        shifted = [scored.name for family in run.shifts.values() for scored in family]
        groups = {"clean": [run.clean.name] if run.clean else [], "shifted": shifted}
        diagrams = {which: _diagram(group.seeds(run.label), names) for which, names in groups.items() if names}
        plots.append(reliability_panel(run, styles(group.runs)[run.label], diagrams))
    return plots


def _diagram(seeds: Sequence[Run], names: Sequence[str]) -> Reliability:
    """The diagram of some conditions over all seeds; counts are of one seed, as seeds see the same rows."""
    parts = [row_scores(run, run.by_name[name]) for run in seeds for name in names]
    count = np.stack([part["bin_count"] for part in parts]).astype(np.float64)  # [parts, bins]
    total = count.sum(0)
    with np.errstate(invalid="ignore"):
        mean = [
            (np.nan_to_num(np.stack([part[key] for part in parts])) * count).sum(0) / total
            for key in ("bin_confidence", "bin_accuracy")
        ]
    return Reliability(*map(torch.from_numpy, (*mean, total / len(seeds))))


def rejection_plot(group: Group, title: str, names: Sequence[str]) -> Plot:
    """Accuracy (or RMSE) on the rows kept, against the share rejected, the most uncertain first."""
    is_class = group.kind == "classification"
    score = "accuracy" if is_class else "RMSE"
    form = ".2%" if is_class else ".4~g"
    traces, words = [], []
    for run in group.done:
        curves = np.stack([_rejection(seed, names, is_class) for seed in group.seeds(run.label)])  # [S, R]
        hover = f"rejected %{{x:.0%}}<br>{score} on the rest %{{y:{form}}}"
        traces += _curve(group, run, REJECTED, curves, hover)
        mean = curves.mean(0)
        at = [f"{mean[i]:.1%}" if is_class else format_number(float(mean[i])) for i in (0, len(REJECTED) // 2)]
        words.append(f"{run.label} {at[0]} on all rows, {at[1]} with {REJECTED[len(REJECTED) // 2]:.0%} rejected")
    x = {"title": {"text": "Share of rows rejected"}, "tickformat": ".0%", "range": [0, 1], "dtick": 0.25}
    y = {"title": {"text": f"{score[0].upper()}{score[1:]} on the rest"}} | ({"tickformat": ".0~%"} if is_class else {})
    text = f"{score} against the share rejected on {title}: {'; '.join(words)}."
    return Plot(title, text[0].upper() + text[1:], figure(traces, x, y))


def _rejection(run: Run, names: Sequence[str], is_class: bool) -> np.ndarray:
    parts = [row_scores(run, run.by_name[name]) for name in names]
    unsure = np.concatenate([part["entropy" if is_class else "variance"] for part in parts]).astype(np.float64)
    error = [1.0 - part["correct"] if is_class else _per_row(part["squared_error"]) for part in parts]
    loss = np.concatenate(error).astype(np.float64)
    risk = risk_coverage(torch.from_numpy(unsure), torch.from_numpy(loss)).risk.numpy()
    kept = np.ceil((1 - REJECTED) * len(risk) - 1e-6).astype(int).clip(1)
    return np.asarray(1 - risk[kept - 1] if is_class else np.sqrt(risk[kept - 1]))


def _per_row(values: np.ndarray) -> np.ndarray:
    return values.reshape(len(values), -1).mean(1)


def histogram_plots(group: Group, name: str) -> list[Plot]:
    """How unsure each method is of clean rows and of one set from outside, all seeds together."""
    values = {}
    for run in group.done:
        seeds = [seed for seed in group.seeds(run.label) if seed.clean and name in seed.by_name]
        if seeds:
            values[run.label] = [np.concatenate([_unsure(seed, which) for seed in seeds]) for which in (None, name)]
    if not values:
        return []
    if group.kind == "classification":
        classes = max(len(group.runs[0].class_names), 2)
        return histogram_panels(group.runs, name, values, np.linspace(0, math.log(classes), BINS + 1), "Entropy, nats")
    values = {label: [np.log10(one.clip(1e-30)) for one in both] for label, both in values.items()}
    ends = np.quantile(np.concatenate([one for both in values.values() for one in both]), [0.001, 0.999])
    edges = np.linspace(ends[0], ends[1] + 1e-6, BINS + 1)
    return histogram_panels(group.runs, name, values, edges, "Variance, log10")


def _unsure(run: Run, name: str | None) -> np.ndarray:
    """Entropy or variance of every row of a set, of the clean one unless named."""
    scored = run.clean if name is None else run.by_name[name]
    assert scored is not None
    return row_scores(run, scored)["entropy" if run.kind == "classification" else "variance"].astype(np.float64)


def roc_plot(group: Group, name: str) -> Plot:
    """Rows from outside that are noticed, against clean rows that are taken for such, at every threshold."""
    traces, words = [], []
    for run in group.done:
        seeds = [seed for seed in group.seeds(run.label) if seed.clean and name in seed.by_name]
        if not seeds:
            continue
        curves = np.stack([np.interp(FALSE_ALARMS, *roc_curve(_unsure(s, None), _unsure(s, name))) for s in seeds])
        traces += _curve(group, run, FALSE_ALARMS, curves, "false alarms %{x:.0%}<br>noticed %{y:.1%}")
        words.append(f"{run.label} {format_number(run.by_name[name].metrics[OUTSIDE[group.kind]].mean)}")
    x = {"title": {"text": "Clean rows taken for outside"}, "tickformat": ".0%", "range": [0, 1.01]}
    y = {"title": {"text": "Outside rows noticed"}, "tickformat": ".0%", "range": [0, 1.02]}
    text = f"ROC of telling {name} from clean data; area under the curve: {', '.join(words)}."
    return Plot(f"{name} · ROC", text, figure(traces, x, y, height=340, layout={"shapes": [diagonal()]}))


def roc_curve(inside: np.ndarray, outside: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Shares of inside and of outside values at or above each threshold, from (0, 0) to (1, 1); ties are slopes."""
    thresholds = np.unique(np.concatenate([inside, outside]))[::-1]

    def share(values: np.ndarray) -> np.ndarray:
        return np.r_[0.0, 1 - np.searchsorted(np.sort(values), thresholds, "left") / len(values)]

    return share(inside), share(outside)


def _curve(group: Group, run: Run, x: np.ndarray, curves: np.ndarray, hover: str) -> list[object]:
    """The mean over seeds [S, X] as a line, and its standard error as a band where there are several."""
    style, mean = styles(group.runs)[run.label], curves.mean(0)
    drawn = [line(style, run.label, x, mean, hover, markers=False)]
    if len(curves) > 1:
        drawn.insert(0, band(style, x, mean, curves.std(0, ddof=1) / math.sqrt(len(curves))))
    return drawn
