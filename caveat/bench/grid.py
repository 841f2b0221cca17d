"""The grid: one cell for each data set, model, method and seed, its folder named by a digest of all that makes its fit.

A cell is fitted once and scored once. What is scored (shifts, outside data, reference) is not part of the fit, so that
another shift in the experiment file costs predictions, not training. A changed knob is another cell; the old one stays.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from caveat.bench.conditions import Source
from caveat.bench.experiment import MAP, TEMPERED, Experiment
from caveat.data import names as data_names
from caveat.methods import Method, method_name
from caveat.storage import CorruptFile, describe, read_json

__all__ = ["Cell", "cells_of", "evaluation_key", "is_done", "is_fitted"]


@dataclass(frozen=True)
class Cell:
    """One fit and its scores."""

    data: Source
    model: str  # its label
    label: str  # of the method in the tables
    method: Method
    seed: int
    name: str  # of its folder
    start: str | None  # the folder of the MAP that it starts from

    def __str__(self) -> str:
        return f"{self.data.label} {self.model} {self.label} seed {self.seed}"


def cells_of(experiment: Experiment) -> list[Cell]:
    """Every cell, those that others start from first."""
    found = []
    for source in experiment.data:
        for model in experiment.models:
            for seed in experiment.seeds:
                point = _cell(experiment, source, model, MAP, seed, None)
                found.append(point)
                for label, method in experiment.methods.items():
                    if label != MAP:
                        starts = label == TEMPERED or method.starts_from == "trained"
                        found.append(_cell(experiment, source, model, label, seed, point.name if starts else None))
    return sorted(found, key=lambda cell: cell.label != MAP)


def _cell(experiment: Experiment, source: Source, model: str, label: str, seed: int, start: str | None) -> Cell:
    method = experiment.methods[label]
    made_by = {
        "data": source.name if source.name in data_names() else _content(Path(source.name)),
        "choices": [source.split, source.gap, source.seed],
        "model": _model_identity(experiment.models[model]),
        "likelihood": experiment.likelihood,
        "prior_precision": experiment.prior_precision,
        "parameters": experiment.parameters,
        "validation": experiment.validation,
        "method": [method_name(method), describe(method)],
        "seed": seed,
        "start": start and start.rpartition("-")[2],
    }
    later = {"train_rows": experiment.train_rows, "augment": experiment.augment}
    made_by |= {key: value for key, value in later.items() if value is not None}  # unset, the digest is as without them
    kind = TEMPERED if label == TEMPERED else method_name(method)  # a label may change without a new fit
    name = f"{source.label}-{model}-{kind}-seed{seed}-{_digest(made_by)}"
    return Cell(source, model, label, method, seed, re.sub(r"[^A-Za-z0-9._-]+", "_", name), start)


def evaluation_key(experiment: Experiment, cell: Cell) -> str:
    """A digest of all that a cell is scored on."""
    reference = experiment.reference.get(cell.data.label)
    asked = [experiment.shifts, experiment.ood, reference, experiment.test_rows, experiment.kept_rows]
    return _digest(asked)


def is_fitted(out: Path, name: str) -> bool:
    """Whether a cell's posterior is there; folders appear whole."""
    return (out / "cells" / name / "posterior" / "posterior.json").exists()


def is_done(out: Path, cell: Cell, key: str) -> bool:
    """Whether a cell's result is there, whole, and of this evaluation."""
    try:
        return bool(read_json(out / "cells" / cell.name / "result.json")["evaluation"] == key)
    except (FileNotFoundError, CorruptFile):
        return False


def _model_identity(model: str) -> str:
    """A model of one's own is known by the file's content, not by where it lies."""
    path, _, function = model.rpartition(":")
    return f"{_content(Path(path))}:{function}" if path.endswith(".py") else model


def _content(path: Path) -> str:
    """A digest of a file; of a folder its files' names and sizes."""
    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    return _digest([[str(p.relative_to(path)), p.stat().st_size] for p in sorted(path.rglob("*")) if p.is_file()])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:10]
