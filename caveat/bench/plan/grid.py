"""The grid: one cell for each data set, model, method and seed, its folder named by a digest of all that makes its fit.

A cell is fitted once and scored once. What is scored (shifts, out-of-distribution data, reference) is not part of the
fit, so that another shift in the experiment file costs predictions, not training. A changed knob is another cell; the
old one stays.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from caveat.bench.plan.choices import MAP, TEMPERED, Choice
from caveat.bench.plan.experiment import Experiment
from caveat.bench.plan.problem import Problem, Source
from caveat.data import names as data_names
from caveat.files import names_function
from caveat.methods import Method, method_name
from caveat.storage import CorruptFile, read_json, settings_digest

__all__ = ["Cell", "cells_of", "evaluation_key", "is_done", "is_fitted", "select"]


@dataclass(frozen=True)
class Cell:
    """One fit and its scores; where there are several candidates, the best of several fits."""

    problem: Problem
    data: Source  # as its seed sees it
    model: str  # its label
    label: str  # of the method in the tables
    candidates: tuple[Choice, ...]
    seed: int
    name: str  # of its folder
    start: str | None  # the folder of the MAP that it starts from
    reference: str | None = None  # the folder of the cell that it is compared with

    @property
    def method(self) -> Method:
        """The method, with the knobs of its first candidate."""
        return self.candidates[0].method

    @property
    def path(self) -> str:
        """What patterns of `--cells` are about: data/model/label/seed."""
        return f"{self.data.label}/{self.model}/{self.label}/{self.seed}"

    def __str__(self) -> str:
        return f"{self.data.label} {self.model} {self.label} seed {self.seed}"


def cells_of(experiment: Experiment) -> list[Cell]:
    """Every cell: first the references, then the MAPs, since others need them."""
    cells = []
    for problem in experiment.problems:
        for model in problem.models:
            for seed in experiment.seeds:
                cells += _of_seed(problem, model, seed, experiment.reference_method)
    first = {experiment.reference_method: 0, MAP: 1}
    return sorted(cells, key=lambda cell: first.get(cell.label, 2))


def _of_seed(problem: Problem, model: str, seed: int, reference: str | None) -> list[Cell]:
    point = _name(problem, model, MAP, seed, None)

    def start_of(label: str) -> str | None:
        choice = problem.methods[label][0]
        starts = label == TEMPERED or choice.from_map or choice.method.starts_from == "trained"
        return point if starts and label != MAP else None

    names = {label: _name(problem, model, label, seed, start_of(label)) for label in problem.methods}
    return [
        Cell(
            problem,
            problem.source.at(seed),
            model,
            label,
            candidates,
            seed,
            names[label],
            start_of(label),
            None if reference is None or label == reference else names[reference],
        )
        for label, candidates in problem.methods.items()
    ]


def _name(problem: Problem, model: str, label: str, seed: int, start: str | None) -> str:
    """The name of a cell's folder: readable words, then a digest."""
    source, candidates = problem.source.at(seed), problem.methods[label]
    first = candidates[0]
    described = [_described(choice) for choice in candidates]
    made_by: dict[str, Any] = {
        "data": _data_identity(source.name),
        "choices": [source.split, source.gap, source.seed],
        "model": _identity(problem.models[model]),
        "likelihood": problem.likelihood,
        "prior_precision": first.prior_precision,
        "parameters": problem.parameters,
        "validation": problem.validation,
        "method": described[0][:2],
        "seed": seed,
        "start": start and start.rpartition("-")[2],
    }
    # Keys that came later are left out where they are not used: the digest is as it was without them.
    later: dict[str, Any] = {"train_rows": problem.train_rows, "augment": problem.augment}
    later |= {"prior": None if first.prior == "gaussian" else _identity(first.prior)}
    later |= {"candidates": described if len(described) > 1 else None}
    made_by |= {key: value for key, value in later.items() if value is not None}
    kind = TEMPERED if label == TEMPERED else method_name(first.method)  # a label may change without a new fit
    name = f"{source.label}-{model}-{kind}-seed{seed}-{_digest(made_by)}"
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name)


def _described(choice: Choice) -> list[Any]:
    return [method_name(choice.method), settings_digest(choice.method), _identity(choice.prior), choice.prior_precision]


def select(cells: Sequence[Cell], patterns: Sequence[str]) -> list[Cell]:
    """The cells whose `path` matches one of some patterns, and those that they start from or are compared with."""
    wanted = [cell for cell in cells if any(fnmatchcase(cell.path, pattern) for pattern in patterns)]
    if not wanted:
        raise ValueError(f"--cells {' '.join(patterns)}: no cell is named so; they are named as {cells[0].path!r} is")
    by_name = {cell.name: cell for cell in cells}
    needed = {cell.name for cell in wanted}
    needed |= {name for cell in wanted for name in (cell.start, cell.reference) if name is not None}
    needed |= {start for name in needed if (start := by_name[name].start) is not None}
    return [cell for cell in cells if cell.name in needed]


def evaluation_key(experiment: Experiment, cell: Cell) -> str:
    """A digest of all that a cell is scored on."""
    problem, stored = cell.problem, experiment.reference.get(cell.data.label)
    shifts = [(_identity(name), severities) for name, severities in problem.shifts]
    asked = [shifts, problem.ood, stored or cell.reference, problem.test_rows, experiment.kept_rows]
    return _digest(asked)


def is_fitted(out: Path, name: str) -> bool:
    """Whether a cell's posterior is there; folders appear whole."""
    return (out / "cells" / name / "posterior" / "posterior.json").exists()


def is_done(out: Path, cell: Cell, key: str) -> bool:
    """Whether a cell's result is there, whole, and of this evaluation."""
    try:
        return bool(read_json(out / "cells" / cell.name / "result.json").get("evaluation") == key)
    except (FileNotFoundError, CorruptFile):
        return False


def _identity(name: str) -> str:
    """A name as it is; a function in a file is known by the file's content, not by where it lies."""
    if not names_function(name):
        return name
    path, _, function = name.rpartition(":")
    return f"{_content(Path(path))}:{function}"


def _data_identity(name: str) -> str:
    return _identity(name) if name in data_names() or names_function(name) else _content(Path(name))


def _content(path: Path) -> str:
    """A digest of a file; of a folder its files' names and sizes."""
    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    return _digest([[str(p.relative_to(path)), p.stat().st_size] for p in sorted(path.rglob("*")) if p.is_file()])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:10]
