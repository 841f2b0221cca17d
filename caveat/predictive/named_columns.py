"""Predictions as columns with names that people read: for csv files, frames and notebooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from caveat.notebooks import table_html

__all__ = ["named_columns", "percent", "prediction_frame", "prediction_html"]

SHOWN_ROWS = 5  # of a prediction in a notebook


def named_columns(
    arrays: Mapping[str, np.ndarray], class_names: Sequence[str] = (), levels: Sequence[float] = (0.9,)
) -> dict[str, np.ndarray]:
    """Flat columns of one row a decision, [N, ...], each [N] under its name.

    Classes have what is predicted, its probability, those of all classes and the uncertainty; numbers have mean,
    deviations in the target's unit and the ends of the intervals of `levels`. Several outputs have columns each.
    """
    return _of_classes(arrays, class_names) if "probs" in arrays else _of_numbers(arrays, levels)


def percent(level: float) -> str:
    """How the level of an interval is written in the names of columns: 90, or 97.5."""
    return f"{100 * level:.10g}"


def prediction_frame(prediction: Any, class_names: Sequence[str], levels: Sequence[float]) -> Any:
    """A prediction as a frame of pandas, one row a decision."""
    try:
        import pandas
    except ImportError as error:
        raise ImportError('to_frame() makes a frame of pandas: pip install "caveat[frames]"') from error
    arrays = {name: column.detach().cpu().numpy() for name, column in prediction.columns().items()}
    if "probs" not in arrays:
        for level in levels:
            ends = (end.detach().cpu().flatten(0, -2).numpy() for end in prediction.interval(level))
            arrays[f"lower_{percent(level)}"], arrays[f"upper_{percent(level)}"] = ends
    return pandas.DataFrame({"row": arrays["rows"], **named_columns(arrays, class_names, levels)})


def prediction_html(prediction: Any) -> str:
    """The first rows of a prediction as a table, and how many more there are."""
    if prediction.kind == "classification":
        table = prediction.columns()
        columns = {"predicted": table["probs"].argmax(-1), "probability": table["probs"].amax(-1)}
        columns |= {name: table[name] for name in ("entropy", "aleatoric", "epistemic")}
    else:
        deviations = {"standard deviation": "variance", "aleatoric": "aleatoric", "epistemic": "epistemic"}
        columns = {"mean": prediction.mean.flatten()}
        columns |= {name: getattr(prediction, part).sqrt().flatten() for name, part in deviations.items()}
    values = [column[:SHOWN_ROWS].tolist() for column in columns.values()]
    rows = [(str(number), *row) for number, row in enumerate(zip(*values, strict=True))]
    left = len(columns[next(iter(columns))]) - len(rows)
    return table_html(repr(prediction), ["", *columns], rows, f"<p>{left:,} more</p>" if left else "")


def _of_classes(arrays: Mapping[str, np.ndarray], class_names: Sequence[str]) -> dict[str, np.ndarray]:
    probs = arrays["probs"]
    names = np.array(class_names) if len(class_names) == probs.shape[-1] else np.arange(probs.shape[-1]).astype(str)
    best = probs.argmax(-1)
    columns = {"predicted": names[best], "probability": probs[np.arange(len(best)), best]}
    columns |= {f"prob_{name}": column for name, column in zip(names, probs.T, strict=True)}
    columns |= {name: arrays[name] for name in ("entropy", "aleatoric", "epistemic")}
    if "set_90" in arrays:
        columns["set_90"] = np.array([" ".join(names[row]) for row in arrays["set_90"].astype(bool)])
    return columns


def _of_numbers(arrays: Mapping[str, np.ndarray], levels: Sequence[float]) -> dict[str, np.ndarray]:
    outputs = {"mean": arrays["mean"], "standard_deviation": np.sqrt(arrays["variance"])}
    outputs |= {f"{part}_deviation": np.sqrt(arrays[part]) for part in ("aleatoric", "epistemic")}
    ends = [f"{end}_{percent(level)}" for level in levels for end in ("lower", "upper")]
    outputs |= {end: arrays[end] for end in ends}
    single = arrays["mean"].shape[-1] == 1
    return {
        name if single else f"{name}_{output}": column
        for name, values in outputs.items()
        for output, column in enumerate(values.T)
    }
