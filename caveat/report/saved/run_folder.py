"""Reads a results folder: every sub-folder with a `metrics.json` is one run, with its predictions beside it.

Only saved files are read, never a model. A file that is missing, cut short, of another format version, or at odds with
the other runs is refused here, with its path and what to do, so that tables and plots can trust what they get.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from caveat.evaluate.comparison import UNKNOWN, MeanAndError, over_conditions
from caveat.evaluate.predictions import by_row
from caveat.storage import CorruptFile, read_arrays, read_json

__all__ = ["Arrays", "SavedData", "SavedRun", "matched", "mean_over_data", "read", "run_of"]

Arrays = dict[str, np.ndarray]
NEEDED = {
    ("classification", "test"): ("rows", "targets", "probs", "entropy", "log_prob"),
    ("classification", "ood"): ("rows", "probs", "entropy"),
    ("regression", "test"): ("targets", "mean", "variance", "log_prob", "pit", "lower_90", "upper_90"),
    ("regression", "ood"): ("mean", "variance"),
}


@dataclass(frozen=True)
class SavedData:
    """One data set as one run scored it: `role` is "test" (with targets) or "ood" (out of distribution, without)."""

    name: str
    family: str
    severity: float | None
    role: str
    rows: int
    metrics: dict[str, MeanAndError]
    path: Path
    kind: str
    classes: int
    arrays: Arrays | None = None  # of predictions that were never written
    warnings: tuple[str, ...] = ()  # such as that predictions are worse than the marginals of the targets

    @cached_property
    def predictions(self) -> Arrays:
        """The arrays of this data set's npz file (all but those of single draws), checked against metrics.json."""
        if self.arrays is not None:
            return self.arrays
        if not self.path.exists():
            raise FileNotFoundError(f"{self.path} is missing although metrics.json names it: evaluate this run again")
        try:
            arrays = read_arrays(self.path, NEEDED[self.kind, self.role], skip=("samples", "joint_log_prob"))
        except CorruptFile as error:
            raise CorruptFile(f"{error}; evaluate this run again") from error
        arrays.setdefault("rows", np.arange(self.rows))
        self._check_shapes(arrays)
        return arrays

    def _check_shapes(self, arrays: Arrays) -> None:
        for key, array in arrays.items():
            if by_row(key) and (array.ndim == 0 or len(array) != self.rows):
                raise ValueError(f"{self.path}: {key} has shape {array.shape}, metrics.json says {self.rows} rows")
        shape = arrays["probs"].shape if "probs" in arrays else ()
        if self.classes and shape and shape[-1] not in (self.classes, 2):  # independent labels are rows of no and yes
            raise ValueError(f"{self.path}: probs has shape {shape}, metrics.json names {self.classes} classes")
        if "thumbnails" in arrays:
            images, positions = arrays["thumbnails"], arrays.get("thumbnail_rows", np.empty(0, int))
            colours = images.shape[3:] in ((), (3,)) and images.ndim >= 3
            if images.dtype != np.uint8 or not colours or len(images) != len(positions):
                raise ValueError(
                    f"{self.path}: thumbnails must be uint8 [K, H, W] or [K, H, W, 3] with K thumbnail_rows, "
                    f"given {images.dtype} {images.shape} with {len(positions)}"
                )
            if len(positions) and not 0 <= positions.min() <= positions.max() < self.rows:
                raise ValueError(f"{self.path}: thumbnail_rows point outside the {self.rows} rows")


@dataclass(frozen=True)
class SavedRun:
    """One evaluated posterior, as saved: what it is, how it was fitted (`info`), and how it scored on each data set."""

    label: str
    method: str
    fields: dict[str, Any]
    kind: str
    class_names: tuple[str, ...]
    info: dict[str, Any]
    data: tuple[SavedData, ...]
    folder: Path
    target: str = ""  # what the target is called, with its unit
    notes: tuple[str, ...] = ()  # what beside the method differs from the reference that it was compared with

    @cached_property
    def by_name(self) -> dict[str, SavedData]:
        """The scored data sets by name."""
        return {scored.name: scored for scored in self.data}

    @cached_property
    def clean(self) -> SavedData | None:
        """The unshifted test data: the family "clean", or else the first data set with targets."""
        tests = [scored for scored in self.data if scored.role == "test"]
        return next((scored for scored in tests if scored.family == "clean"), tests[0] if tests else None)

    @cached_property
    def shifts(self) -> dict[str, tuple[SavedData, ...]]:
        """The data sets with targets that are not clean, by family, mildest first."""
        tests = [scored for scored in self.data if scored.role == "test" and scored is not self.clean]
        families = dict.fromkeys(scored.family for scored in tests)
        mild_first = sorted(tests, key=lambda scored: scored.severity or 0.0)
        return {family: tuple(s for s in mild_first if s.family == family) for family in families}

    @cached_property
    def ood(self) -> tuple[SavedData, ...]:
        """The out-of-distribution data sets."""
        return tuple(scored for scored in self.data if scored.role == "ood")


def read(folder: str | Path) -> list[SavedRun]:
    """Read every run of a results folder: MAP first, which is the baseline, the others by the names of folders."""
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder: give the results folder that `caveat evaluate` wrote")
    paths = sorted(folder.glob("*/metrics.json"))
    if not paths:
        hint = f"it is itself one run; give its parent {folder.resolve().parent}"
        advice = hint if (folder / "metrics.json").exists() else "run `caveat evaluate` first"
        raise FileNotFoundError(f"{folder} holds no */metrics.json: {advice}")
    runs = sorted((_read_run(path) for path in paths), key=lambda run: run.method != "map")
    _check_together(runs)
    return runs


def _read_run(path: Path) -> SavedRun:
    """Read the run that a metrics.json describes."""
    try:
        return run_of(read_json(path), path)
    except CorruptFile as error:
        raise CorruptFile(f"{error}; evaluate this run again") from error


def run_of(content: dict[str, Any], path: Path) -> SavedRun:
    """Build the run that the content of a metrics.json describes; what is amiss in it is refused with its path."""
    try:
        return _checked_run(content, path.parent)
    except KeyError as error:
        raise ValueError(f"{path} lacks {error}: evaluate this run again") from error
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{path} has an entry of the wrong type ({error}): evaluate this run again") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _checked_run(content: dict[str, Any], folder: Path) -> SavedRun:
    kind, names = content["kind"], tuple(str(name) for name in content["class_names"])
    if kind not in ("classification", "regression"):
        raise ValueError(f"kind is {kind!r}, not 'classification' or 'regression'")
    if not content["data"]:
        raise ValueError("it lists no data sets")
    return SavedRun(
        label=str(content["label"]),
        method=str(content["method"]["name"]),
        fields=dict(content["method"]["fields"]),
        kind=kind,
        class_names=names,
        info=_whole_cost(content),
        data=tuple(_saved_data(entry, folder, kind, len(names)) for entry in content["data"]),
        folder=folder,
        target=str(content.get("target", "")),
        notes=tuple(str(note) for note in content.get("reference", {}).get("notes", ())),
    )


def _whole_cost(content: dict[str, Any]) -> dict[str, Any]:
    """How a run was fitted; what it started from is counted in, and what a prediction took is beside it."""
    info = dict(content["info"])
    for name, cost in info.get("start", {}).items():
        info[name] += cost
    if "predict_seconds_per_row" in content:
        info["predict_seconds_per_row"] = content["predict_seconds_per_row"]
    return info


def _saved_data(entry: dict[str, Any], folder: Path, kind: str, classes: int) -> SavedData:
    name, role, severity = str(entry["name"]), entry["role"], entry["severity"]
    if role not in ("test", "ood"):
        raise ValueError(f"the data set {name!r} has role {role!r}, not 'test' or 'ood'")
    path = folder / entry["file"]
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"the predictions of {name!r} are at {entry['file']!r}, outside the run's folder")
    return SavedData(
        name=name,
        family=str(entry["family"]),
        severity=None if severity is None else float(severity),
        role=role,
        rows=int(entry["rows"]),
        metrics={
            str(name): MeanAndError(_finite(value["mean"]), _finite(value["stderr"]))
            for name, value in entry["metrics"].items()
        },
        path=path,
        kind=kind,
        classes=classes,
        warnings=tuple(str(text) for text in entry.get("warnings", ())),
    )


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def matched(data: SavedData, other: SavedData) -> tuple[Arrays, Arrays]:
    """Return the predictions of two runs on one data set, and refuse those that are not about the same rows."""
    ours, theirs = data.predictions, other.predictions
    for key in ("rows", "targets"):
        if key in ours and key in theirs and not np.array_equal(ours[key], theirs[key]):
            raise ValueError(f"{data.path} and {other.path} have different {key}: evaluate both on the same data")
    return ours, theirs


def mean_over_data(data: Sequence[SavedData], metric: str) -> MeanAndError:
    """Average a metric over data sets; the mean is unknown where one of them has no value."""
    return over_conditions([one.metrics.get(metric, UNKNOWN) for one in data])


def _check_together(runs: list[SavedRun]) -> None:
    """Refuse runs that cannot be compared: they need different labels, one task, and the same classes and rows."""
    first = runs[0]
    labels: dict[str, Path] = {}
    shapes: dict[str, tuple[int, str, Path]] = {}
    for run in runs:
        if run.label in labels:
            raise ValueError(
                f"{labels[run.label]} and {run.folder} are both labelled {run.label!r}: give each its own label"
            )
        labels[run.label] = run.folder
        if (run.kind, run.class_names) != (first.kind, first.class_names):
            raise ValueError(
                f"{first.folder} is {_task(first)}, {run.folder} is {_task(run)}: one folder holds one task"
            )
        if len(run.by_name) != len(run.data):
            raise ValueError(
                f"{run.folder / 'metrics.json'} names a data set twice: {[data.name for data in run.data]}"
            )
        for scored in run.data:
            rows, role, folder = shapes.setdefault(scored.name, (scored.rows, scored.role, run.folder))
            if (scored.rows, scored.role) != (rows, role):
                raise ValueError(
                    f"{scored.name!r} is {scored.rows} {scored.role} rows in {run.folder} but {rows} {role} rows "
                    f"in {folder}: evaluate both on the same data"
                )


def _task(run: SavedRun) -> str:
    return run.kind if run.kind == "regression" else f"classification into {', '.join(run.class_names)}"
