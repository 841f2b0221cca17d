"""What methods say of single inputs: images that they disagree about, and toy data of one or two dimensions.

Everything is of one seed, the first that every method has.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from caveat.evaluate.comparison import disagreement
from caveat.evaluate.metrics import format_number
from caveat.evaluate.predictions import by_row, row_uncertainty
from caveat.report.draw import Exhibit, Plot, exhibit_fold, figure, graph_objects, line, styles
from caveat.report.saved import Arrays, BenchGroup, SavedData, SavedRun, matched

__all__ = ["disagreement_gallery", "toy_plots"]

SHOWN = 6  # images of a condition


def _first_common_seed(group: BenchGroup) -> dict[str, SavedRun]:
    """The runs of the first seed that every method has, by method; none where there is no such seed."""
    common = sorted(set.intersection(*(set(group.cells[run.label]) for run in group.done)))
    return {run.label: group.cells[run.label][common[0]].run for run in group.done} if common else {}


def disagreement_gallery(group: BenchGroup) -> str:
    """Show the images of every condition that the methods disagree most about."""
    runs = _first_common_seed(group)
    if group.kind != "classification" or len(runs) < 2:
        return ""
    names = [data.name for data in next(iter(runs.values())).data]
    candidates = [_most_disputed(group, runs, name) for name in names]
    shown = [exhibit for exhibit in candidates if exhibit is not None]
    return "".join(exhibit_fold(group.runs, exhibit, index == 0) for index, exhibit in enumerate(shown))


def _most_disputed(group: BenchGroup, runs: dict[str, SavedRun], name: str) -> Exhibit | None:
    """The images of one condition that the methods disagree most about; None where no images were kept."""
    by_label = {label: run.by_name[name] for label, run in runs.items() if name in run.by_name}
    first = next(iter(by_label.values()))
    inputs = group.shown_inputs(first)
    if "images" not in inputs or inputs["images"].shape[-1] not in (1, 3):
        return None
    predictions = {label: matched(data, first)[0] for label, data in by_label.items()}
    predicted, positions = _predicted_inputs(inputs["rows"], first)
    probs = np.stack([arrays["probs"][positions] for arrays in predictions.values()]).astype(np.float64)  # [M, K, C]
    order = np.argsort(-disagreement(probs), kind="stable")[:SHOWN]
    images = inputs["images"][predicted[order]]
    images = images[..., 0] if images.shape[-1] == 1 else images
    return Exhibit(name, positions[order], list(images), predictions, first.predictions.get("targets"))


def _predicted_inputs(rows: np.ndarray, data: SavedData) -> tuple[np.ndarray, np.ndarray]:
    """Which of the inputs with these row numbers have a prediction, and where in the prediction file; [K] each."""
    _, predicted, positions = np.intersect1d(rows, data.predictions["rows"], return_indices=True)
    return predicted, positions


def toy_plots(group: BenchGroup) -> list[Plot]:
    """Draw predictions over the input space, one panel a method, where the data have one or two inputs."""
    plots = []
    for label, run in _first_common_seed(group).items():
        inputs = group.shown_inputs(run.clean) if run.clean else {}
        if run.clean is None or "x" not in inputs or inputs["x"].ndim != 2 or inputs["x"].shape[1] > 2:
            return []
        predicted, positions = _predicted_inputs(inputs["rows"], run.clean)
        x = inputs["x"][predicted]
        arrays = {key: value[positions] for key, value in run.clean.predictions.items() if by_row(key)}
        # The second of two inputs may be a feature of the first, its square.
        one_dimensional = x.shape[1] == 1 or np.allclose(x[:, 1], x[:, 0] ** 2, atol=1e-3)
        panel = _curve_panel if one_dimensional and group.kind == "regression" else _plane_panel
        plots.append(panel(group, label, x, arrays))
    return plots


def _curve_panel(group: BenchGroup, label: str, x: np.ndarray, arrays: Arrays) -> Plot:
    """A regression of one input: mean, 90% interval, targets."""
    go, style = graph_objects(), styles(group.runs)[label]
    order = np.argsort(x[:, 0], kind="stable")
    inputs = x[order, 0].astype(np.float32)
    mean, low, high, targets = (
        arrays[key].reshape(len(order), -1)[order, 0].astype(np.float32)
        for key in ("mean", "lower_90", "upper_90", "targets")
    )
    interval = go.Scatter(
        x=np.concatenate([inputs, inputs[::-1]]),
        y=np.concatenate([high, low[::-1]]),
        fill="toself",
        fillcolor=style.faint(0.22),
        line={"width": 0},
        mode="lines",
        hoverinfo="skip",
    )
    truth = go.Scatter(
        x=inputs,
        y=targets,
        mode="markers",
        marker={"size": 4, "color": "#8a939c"},
        hovertemplate="x %{x:.3~g}<br>true %{y:.3~g}<extra></extra>",
    )
    curve = line(style, label, inputs, mean, "x %{x:.3~g}<br>predicted %{y:.3~g}", markers=False)
    inside = float(((low <= targets) & (targets <= high)).mean())
    text = f"Predictions of {label} over the input: {inside:.0%} of the targets shown lie in the 90% interval."
    span = float(targets.max() - targets.min())  # of the targets, so that all panels have the same axes
    y = {"title": {"text": "Target"}, "range": [float(targets.min()) - span, float(targets.max()) + span]}
    drawn = figure([interval, truth, curve], {"title": {"text": "Input"}}, y)
    return Plot(f"{label} · {inside:.0%} inside", text, drawn, style.index)


def _plane_panel(group: BenchGroup, label: str, x: np.ndarray, arrays: Arrays) -> Plot:
    """Inputs of a plane or a line: colour is how unsure the method is, a cross is a mistake."""
    go, style = graph_objects(), styles(group.runs)[label]
    unsure, is_class = row_uncertainty(arrays), group.kind == "classification"
    wrong = arrays["probs"].argmax(1) != arrays["targets"] if is_class else np.zeros(len(x), bool)
    name = "entropy, nats" if is_class else "variance"
    bar: dict[str, Any] = {"thickness": 10, "title": {"text": name, "side": "right"}, "outlinewidth": 0}
    points = go.Scatter(
        x=x[:, 0].astype(np.float32),
        y=(x[:, 1] if x.shape[1] > 1 else unsure).astype(np.float32),
        mode="markers",
        customdata=unsure.astype(np.float32),
        marker={
            "size": np.where(wrong, 10, 7),
            "symbol": np.where(wrong, "x", "circle"),
            "color": unsure.astype(np.float32),
            "colorscale": "Viridis",
            "colorbar": bar,
        },
        hovertemplate=f"{name} %{{customdata:.3~g}}<extra></extra>",
    )
    y = {"title": {"text": "Second input" if x.shape[1] > 1 else name}}
    ends = f"{name} from {format_number(float(unsure.min()))} to {format_number(float(unsure.max()))}"
    mistakes = f"; {int(wrong.sum())} of {len(x)} inputs shown are classified wrongly" if is_class else ""
    text = f"Uncertainty of {label} over the inputs: {ends}{mistakes}."
    return Plot(label, text, figure([points], {"title": {"text": "First input"}}, y), style.index)
