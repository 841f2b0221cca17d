"""Plots that show all runs together: curves against severity, risk against coverage, gains, cost against quality."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from caveat.evaluate.comparison import UNKNOWN
from caveat.evaluate.metrics import METRICS, format_number, risk_coverage
from caveat.evaluate.predictions import row_uncertainty
from caveat.report.draw.figures import (
    BASELINE_COLOUR,
    LINE_HEIGHT,
    Plot,
    band,
    figure,
    graph_objects,
    line,
    safe,
    styles,
)
from caveat.report.numbers import CURVES, FIDELITY, Answer
from caveat.report.saved import SavedData, SavedRun, clean_of

__all__ = ["cost_plots", "gain_plot", "risk_coverage_plot", "severity_curves"]


def severity_curves(runs: Sequence[SavedRun], family: str) -> list[Plot]:
    """Draw each metric against the severity of one shift family, clean data at 0, with bands of one standard error."""
    kind = runs[0].kind
    plots = [_severity_curve(runs, family, metric) for metric in (*CURVES[kind], FIDELITY[kind][-1])]
    return [plot for plot in plots if plot.figure.data]


def _severity_curve(runs: Sequence[SavedRun], family: str, metric: str) -> Plot:
    title, style = METRICS[metric].title, styles(runs)
    traces, ends, ticks = [], [], set()
    for run in runs:
        conditions = _with_clean(run, family)
        scores = [data.metrics.get(metric, UNKNOWN) for data in conditions]
        if sum(score.mean is not None for score in scores) < 2:
            continue
        severity = np.array([data.severity or 0.0 for data in conditions])
        means, errors = (np.array(values, float) for values in zip(*((s.mean, s.stderr) for s in scores), strict=True))
        if np.isfinite(means + errors).all():
            traces.append(band(style[run.label], severity, means, errors))
        hover = f"severity %{{x}}<br>{title} %{{y:.3~f}}"
        traces.append(line(style[run.label], run.label, severity, means, hover, markers=True))
        ends.append(f"{run.label} {format_number(scores[0].mean)} to {format_number(scores[-1].mean)}")
        ticks.update(severity.tolist())
    few = sorted(ticks)[:: math.ceil(len(ticks) / 8) or 1]
    x = {"title": {"text": f"{safe(family)}: severity (0 is clean)"}, "tickvals": few}
    y: dict[str, Any] = {"title": {"text": f"{title}, nats a row" if metric == "nll" else title}}
    if (runs[0].kind, metric) != ("regression", "nll"):  # the log of a density has no natural zero
        y["rangemode"] = "tozero"
    words = f"{title} against the severity of {family}, from clean to the most severe: {'; '.join(ends)}."
    return Plot(title, words, figure(traces, x, y))


def _with_clean(run: SavedRun, family: str) -> list[SavedData]:
    """The clean data and those of a shift, mildest first; nothing where the shift has no severities."""
    shifted = [data for data in run.shifts.get(family, ()) if data.severity is not None]
    return [run.clean, *shifted] if run.clean and shifted else shifted


def risk_coverage_plot(runs: Sequence[SavedRun], title: str, names: Sequence[str]) -> Plot:
    """Draw the error rate on the rows kept against the share kept, when the most uncertain are refused first."""
    style, traces, words = styles(runs), [], []
    for run in runs:
        arrays = [run.by_name[name].predictions for name in names if name in run.by_name]
        if not arrays:
            continue
        wrong = np.concatenate([one["probs"].argmax(axis=1) != one["targets"] for one in arrays])
        unsure = np.concatenate([row_uncertainty(one) for one in arrays])
        curve = risk_coverage(torch.from_numpy(unsure), torch.from_numpy(wrong.astype(np.float64)))
        chosen = np.unique(np.linspace(max(len(wrong) // 50, 1) - 1, len(wrong) - 1, 120).astype(int))
        share, risk = curve.coverage.numpy()[chosen], curve.risk.numpy()[chosen]
        hover = "kept %{x:.0%}<br>error on those %{y:.2%}"
        traces.append(line(style[run.label], run.label, share, risk, hover, markers=False))
        half = risk[np.searchsorted(share, 0.5)]
        words.append(f"{run.label} {half:.1%} at half coverage, {risk[-1]:.1%} on all rows")
    x = {"title": {"text": "Share of rows kept"}, "tickformat": ".0%", "range": [0, 1.02]}
    y = {"title": {"text": "Error rate on rows kept"}, "tickformat": ".0~%", "rangemode": "tozero"}
    return Plot(title, f"Error rate against coverage on {title}: {'; '.join(words)}.", figure(traces, x, y))


def gain_plot(runs: Sequence[SavedRun], answer: Answer) -> Plot:
    """Draw each run's gain over the baseline with its 95% interval; left of zero is worse."""
    go, style = graph_objects(), styles(runs)
    traces, words = [], []
    for label, gain in reversed(answer.against_baseline.items()):
        run_style = style[label]
        hover = (
            f"{format_number(gain.mean)} ({format_number(gain.low)} to {format_number(gain.high)})<br>{gain.verdict}"
        )
        traces.append(
            go.Scatter(
                x=[gain.mean],
                y=[safe(label)],
                error_x={"array": [gain.high - gain.mean], "thickness": 2, "width": 0, "color": run_style.colour},
                mode="markers",
                marker={"symbol": run_style.symbol, "size": 9, "color": run_style.colour},
                hovertemplate=f"<b>{safe(label)}</b><br>{hover}<extra></extra>",
                meta=run_style.index,
            )
        )
        words.append(f"{label} {hover.replace('<br>', ', ')}")
    ends = {"x0": 0, "x1": 0, "y0": 0, "y1": 1, "yref": "paper"}
    zero = {"type": "line", **ends, "line": {"width": 1.5}, "layer": "below"}
    gains = answer.against_baseline.values()
    low, high = min(0.0, *(gain.low for gain in gains)), max(0.0, *(gain.high for gain in gains))
    reach = [low - 0.05 * (high - low), high + 0.05 * (high - low)]
    x = {"title": {"text": f"Gain, {answer.unit.removeprefix('in ')}"}, "nticks": 5, "range": reach}
    y = {"ticks": "", "showgrid": False, "range": [-0.6, len(traces) - 0.4]}
    height = 90 + LINE_HEIGHT * len(traces)
    drawn = figure(traces, x, y, height=height, layout={"shapes": [zero], "meta": LINE_HEIGHT})
    return Plot(answer.question, f"{answer.question}, gain: {'; '.join(words[::-1])}.", drawn)


COST_TITLES = {  # cost -> the title of its plot, and of its axis
    "seconds": ("Fit time", "Fit time (log scale)"),
    "stored_bytes": ("Size on disk", "Stored (log scale)"),
    "gradient_evaluations": ("Gradient evaluations", "Gradient evaluations (log scale)"),
    "predict_seconds_per_row": ("Prediction time", "Prediction time a row (log scale)"),
}


def cost_plots(runs: Sequence[SavedRun]) -> list[Plot]:
    """Draw the NLL on clean data against what a run cost, one plot for every cost in which the runs differ."""
    return [
        _cost_plot(runs, key) for key in COST_TITLES if len({run.info.get(key) or None for run in runs} - {None}) > 1
    ]


def _cost_plot(runs: Sequence[SavedRun], key: str) -> Plot:
    (title, axis), show = COST_TITLES[key], METRICS[key].text
    style, traces, words, costs = styles(runs), [], [], []
    for run in runs:
        clean = clean_of(runs, run)
        cost, nll = run.info.get(key), clean.metrics.get("nll", UNKNOWN) if clean else UNKNOWN
        if not cost or nll.mean is None:
            continue
        run_style = style[run.label]
        traces.append(
            graph_objects().Scatter(
                x=[cost],
                y=[nll.mean],
                error_y={"array": [nll.stderr or 0.0], "thickness": 1.25, "width": 0},
                mode="markers",
                marker={"symbol": run_style.symbol, "size": 12, "color": run_style.colour},
                hovertemplate=f"<b>{safe(run.label)}</b><br>{show(cost)}<br>NLL %{{y:.3~f}}<extra></extra>",
                meta=run_style.index,
            )
        )
        costs.append(cost)
        words.append(f"{run.label} {show(cost)}, NLL {format_number(nll.mean)}")
    traces.append(_front())
    x = {"title": {"text": axis}, "type": "log", **_log_ticks(costs, show)}
    y = {"title": {"text": "NLL on clean data, nats a row"}}
    return Plot(title, f"NLL on clean data against {title.lower()}: {'; '.join(words)}.", figure(traces, x, y))


def _front() -> Any:
    """The Pareto front: runs that none beats in both. page.js draws it through those that are shown."""
    line = {"shape": "hv", "width": 1.5, "dash": "dot", "color": BASELINE_COLOUR}
    return graph_objects().Scatter(x=[], y=[], mode="lines", line=line, hoverinfo="skip", meta="front")


def _log_ticks(values: Sequence[float], show: Callable[[float], str]) -> dict[str, Any]:
    """Range and a few ticks of a log axis, in the reader's units."""
    if not values:
        return {}
    low, high = min(values) / 1.8, max(values) * 1.8
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 2, 5), (1, 3), (1,)):
        ticks = [step * 10.0**power for power in powers for step in steps if low <= step * 10.0**power <= high]
        if len(ticks) <= 5:
            break
    ticks = ticks[:: math.ceil(len(ticks) / 5)] if ticks else []
    return {
        "range": [math.log10(low), math.log10(high)],
        "tickvals": ticks,
        "ticktext": [show(tick) for tick in ticks],
    }
