"""Predictions as a table for people: one line a row, under the names that the classes and files have."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from caveat.evaluate.predictions.file_arrays import percent
from caveat.files import whole_file

__all__ = ["write_prediction_csv"]


def write_prediction_csv(
    path: Path, arrays: Mapping[str, np.ndarray], levels: Sequence[float] = (0.9,), id_name: str | None = None
) -> list[str]:
    """Write the arrays of a prediction file as a csv (row, prediction, how sure it is); returns its columns.

    `levels` are of the intervals of numbers; `id_name` heads the names of the rows where they have some.
    """
    rows = arrays["rows"]
    columns = {name: arrays[key][rows] for name, key in (("file", "files"), (id_name or "id", "ids")) if key in arrays}
    columns = columns or {"row": rows}
    columns |= _class_columns(arrays) if "probs" in arrays else _number_columns(arrays, levels)
    with (
        whole_file(path) as temporary,
        temporary.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file,
    ):
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return list(columns)


def _class_columns(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    probs = arrays["probs"]
    names = arrays.get("class_names", np.arange(probs.shape[-1]).astype(str))
    best = probs.argmax(-1)
    columns = {"predicted": names[best], "probability": probs[np.arange(len(best)), best]}
    columns |= {f"prob_{name}": column for name, column in zip(names, probs.T, strict=True)}
    columns |= {name: arrays[name] for name in ("entropy", "aleatoric", "epistemic")}
    if "set_90" in arrays:
        columns["set_90"] = np.array([" ".join(names[row]) for row in arrays["set_90"].astype(bool)])
    return columns


def _number_columns(arrays: Mapping[str, np.ndarray], levels: Sequence[float]) -> dict[str, np.ndarray]:
    """Mean, deviations and intervals of each output, all in the target's unit; several outputs have columns each."""
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
