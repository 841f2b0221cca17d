"""What methods say of single inputs: images that they disagree about, and toy data of one or two dimensions.

Disagreement about an input is how far the methods' probabilities p_m lie from their mean q, in total variation:
    1/M sum_m 1/2 sum_c |p_mc - q_c|.
All is of one seed, the first that every method has.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from caveat.report.bench_runs import Group
from caveat.report.compare import matched, uncertainty
from caveat.report.drawing import Plot, figure, graph_objects, line, styles
from caveat.report.gallery import Exhibit, exhibit_fold
from caveat.report.runs import Arrays, Run, Scored
from caveat.report.tables import format_number

__all__ = ["disagreement", "disagreement_gallery", "toy_plots"]

SHOWN = 6  # images of a condition


def common_seed(group: Group) -> tuple[int | None, dict[str, Run]]:
    """The first seed that every method has, and its runs by method; none where there is no such seed."""
    seeds = [set(group.cells[run.label]) for run in group.done]
    common = sorted(set.intersection(*seeds))
    return (common[0], {run.label: group.cells[run.label][common[0]] for run in group.done}) if common else (None, {})


def disagreement(probs: np.ndarray) -> np.ndarray:
    """Of methods with probabilities [M, N, C] about each of N inputs: 0 where all say the same."""
    return np.asarray(0.5 * np.abs(probs - probs.mean(0)).sum(2).mean(0))


def disagreement_gallery(group: Group) -> str:
    """The images of every condition that the methods disagree most about."""
    _, runs = common_seed(group)
    if group.kind != "classification" or len(runs) < 2:
        return ""
    names = [scored.name for scored in next(iter(runs.values())).data]
    found = [_exhibit(group, runs, name) for name in names]
    shown = [exhibit for exhibit in found if exhibit is not None]
    return "".join(exhibit_fold(group.runs, exhibit, index == 0) for index, exhibit in enumerate(shown))


def _exhibit(group: Group, runs: dict[str, Run], name: str) -> Exhibit | None:
    scored = {label: run.by_name[name] for label, run in runs.items() if name in run.by_name}
    first = next(iter(scored.values()))
    inputs = group.shown_inputs(first)
    if "images" not in inputs or inputs["images"].shape[-1] not in (1, 3):
        return None
    said = {label: matched(one, first)[0] for label, one in scored.items()}
    place, positions = _positions(inputs["rows"], first)
    probs = np.stack([arrays["probs"][positions] for arrays in said.values()]).astype(np.float64)  # [M, K, C]
    order = np.argsort(-disagreement(probs), kind="stable")[:SHOWN]
    images = inputs["images"][place[order]]
    images = images[..., 0] if images.shape[-1] == 1 else images
    return Exhibit(name, positions[order], list(images), said, first.predictions.get("targets"))


def _positions(rows: np.ndarray, scored: Scored) -> tuple[np.ndarray, np.ndarray]:
    """Which of the inputs have a prediction, and where it is in the prediction file."""
    _, place, positions = np.intersect1d(rows, scored.predictions["rows"], return_indices=True)
    return place, positions


def toy_plots(group: Group) -> list[Plot]:
    """Predictions over the input space, one panel a method, where the data have one or two inputs."""
    seed, runs = common_seed(group)
    if seed is None:
        return []
    plots = []
    for label, run in runs.items():
        inputs = group.shown_inputs(run.clean) if run.clean else {}
        if run.clean is None or "x" not in inputs or inputs["x"].ndim != 2 or inputs["x"].shape[1] > 2:
            return []
        place, positions = _positions(inputs["rows"], run.clean)
        x = inputs["x"][place]
        arrays = {key: value[positions] for key, value in run.clean.predictions.items() if "thumbnail" not in key}
        one_dimensional = x.shape[1] == 1 or np.allclose(
            x[:, 1], x[:, 0] ** 2, atol=1e-3
        )  # a feature made of the other
        draw = _along if one_dimensional and group.kind == "regression" else _across
        plots.append(draw(group, label, x, arrays))
    return plots


def _along(group: Group, label: str, x: np.ndarray, arrays: Arrays) -> Plot:
    """A regression of one input: mean, 90% interval, targets."""
    go, style = graph_objects(), styles(group.runs)[label]
    order = np.argsort(x[:, 0], kind="stable")
    across = x[order, 0].astype(np.float32)
    mean, low, high, targets = (
        arrays[key].reshape(len(order), -1)[order, 0].astype(np.float32)
        for key in ("mean", "lower_90", "upper_90", "targets")
    )
    interval = go.Scatter(
        x=np.concatenate([across, across[::-1]]),
        y=np.concatenate([high, low[::-1]]),
        fill="toself",
        fillcolor=style.faint(0.22),
        line={"width": 0},
        mode="lines",
        hoverinfo="skip",
    )
    truth = go.Scatter(
        x=across,
        y=targets,
        mode="markers",
        marker={"size": 4, "color": "#8a939c"},
        hovertemplate="x %{x:.3~g}<br>true %{y:.3~g}<extra></extra>",
    )
    curve = line(style, label, across, mean, "x %{x:.3~g}<br>predicted %{y:.3~g}", markers=False)
    inside = float(((low <= targets) & (targets <= high)).mean())
    text = f"Predictions of {label} over the input: {inside:.0%} of the targets shown lie in the 90% interval."
    span = float(targets.max() - targets.min())  # of the targets, so that all panels have the same axes
    y = {"title": {"text": "Target"}, "range": [float(targets.min()) - span, float(targets.max()) + span]}
    drawn = figure([interval, truth, curve], {"title": {"text": "Input"}}, y)
    return Plot(f"{label} · {inside:.0%} inside", text, drawn, style.index)


def _across(group: Group, label: str, x: np.ndarray, arrays: Arrays) -> Plot:
    """Inputs of a plane (or a line): colour is how unsure the method is, a cross a mistake."""
    go, style = graph_objects(), styles(group.runs)[label]
    unsure = uncertainty(arrays)
    wrong = arrays["probs"].argmax(1) != arrays["targets"] if "probs" in arrays else np.zeros(len(x), bool)
    name = "entropy, nats" if "probs" in arrays else "variance"
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
    text = f"Uncertainty of {label} over the inputs: {name} from {format_number(float(unsure.min()))} to "
    text += f"{format_number(float(unsure.max()))}; {int(wrong.sum())} of {len(x)} inputs shown are taken wrongly."
    return Plot(label, text, figure([points], {"title": {"text": "First input"}}, y), style.index)
