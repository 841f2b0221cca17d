"""Predictions as a table for people: one line a row, under the names that the classes and files have."""

import csv
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from caveat.files import whole_file

__all__ = ["write_prediction_csv"]


def write_prediction_csv(path: Path, arrays: Mapping[str, np.ndarray]) -> list[str]:
    """Write the arrays of a prediction file as a csv (row, prediction, how sure it is); returns its columns."""
    rows = arrays["rows"]
    columns = {"file": arrays["files"][rows]} if "files" in arrays else {"row": rows}
    columns |= _class_columns(arrays) if "probs" in arrays else _number_columns(arrays)
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


def _number_columns(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Mean, spread and interval of each output; where there are several outputs, each has columns of its own."""
    outputs = {"mean": arrays["mean"], "standard_deviation": np.sqrt(arrays["variance"])}
    outputs |= {name: arrays[name] for name in ("aleatoric", "epistemic", "lower_90", "upper_90")}
    single = arrays["mean"].shape[-1] == 1
    return {
        name if single else f"{name}_{output}": column
        for name, values in outputs.items()
        for output, column in enumerate(values.T)
    }
