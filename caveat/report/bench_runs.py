"""Reads a folder that `caveat bench` wrote: for each data set and model the methods, and for each method its seeds.

A cell of the bench is a `Run`, as `caveat evaluate` writes one. A method is shown as one run too: every metric is the
mean over its seeds with the standard error over them, s / sqrt(n). Its predictions are those of the first seed; what is
drawn from all rows and seeds comes from the small files in `scores/`.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from caveat.evaluate.evaluation import slug
from caveat.report.runs import Arrays, Run, Score, Scored, read_run
from caveat.report.tables import NOTHING, mean_score
from caveat.storage import read_json

__all__ = ["Bench", "Group", "is_bench", "over_seeds", "read_bench", "row_scores"]


@dataclass(frozen=True)
class Group:
    """One data set and model. `runs` has one run a method, in the same order for all groups; empty if none is done."""

    index: int
    data: str
    model: str
    runs: tuple[Run, ...]
    cells: dict[str, dict[int, Run]]  # method -> seed -> the finished cell
    ranks: dict[str, float]  # method -> its mean place over shifts, by NLL
    inputs: Path  # some inputs of every condition

    @property
    def title(self) -> str:
        """What the group is called."""
        return f"{self.data} · {self.model}"

    @property
    def kind(self) -> str:
        """`classification` or `regression`."""
        return self.runs[0].kind

    @cached_property
    def done(self) -> list[Run]:
        """The methods with at least one finished seed."""
        return [run for run in self.runs if run.data]

    def seeds(self, method: str) -> list[Run]:
        """The finished cells of a method."""
        return [self.cells[method][seed] for seed in sorted(self.cells[method])]

    def score(self, method: str, names: Sequence[str], metric: str) -> Score:
        """A metric averaged over conditions, seed by seed, then over seeds."""
        found = []
        for run in self.seeds(method):
            known = all(name in run.by_name for name in names)
            found.append(mean_score([run.by_name[name] for name in names], metric).mean if known else None)
        return over_seeds(found)

    def shown_inputs(self, scored: Scored) -> Arrays:
        """`rows` with `images` or `x`: inputs of one condition that were kept to be looked at, where there are any."""
        path = self.inputs / scored.path.name
        return _arrays(path) if path.exists() else {}


@dataclass(frozen=True)
class Bench:
    """All of a folder: what was asked (`index` is bench.json, `experiment` the file's text), and what came out."""

    folder: Path
    index: dict[str, Any]
    experiment: str
    methods: tuple[str, ...]
    groups: tuple[Group, ...]

    @property
    def title(self) -> str:
        """What the experiment is called."""
        return str(self.index["title"] or self.index["name"])


def is_bench(folder: str | Path) -> bool:
    """Whether a folder is one that `caveat bench` wrote."""
    return (Path(folder) / "bench.json").is_file()


def read_bench(folder: str | Path) -> Bench:
    """A folder of `caveat bench`, with the cells that are done."""
    folder = Path(folder)
    index = read_json(folder / "bench.json")
    done = [cell for cell in index["cells"] if cell["status"] == "done"]
    if not done:
        raise ValueError(f"{folder} has no finished cell yet: run `caveat bench` again")
    methods = tuple(dict.fromkeys(cell["method"] for cell in index["cells"]))
    places = dict.fromkeys((cell["data"], cell["model"]) for cell in done)
    groups = tuple(_group(folder, number, place, methods, index) for number, place in enumerate(places))
    experiment = (folder / "experiment.toml").read_text(encoding="utf-8")
    return Bench(folder, index, experiment, methods, groups)


def _group(folder: Path, number: int, place: tuple[str, str], methods: Sequence[str], index: dict[str, Any]) -> Group:
    data, model = place
    here = [cell for cell in index["cells"] if (cell["data"], cell["model"]) == place]
    kinds = {cell["method"]: cell["kind"] for cell in here}
    cells: dict[str, dict[int, Run]] = {method: {} for method in methods}
    for cell in here:
        if cell["status"] == "done":
            cells[cell["method"]][cell["seed"]] = _cell(folder / cell["folder"], index["kept_rows"])
    any_run = next(run for seeds in cells.values() for run in seeds.values())
    runs = tuple(_averaged(any_run, method, kinds.get(method, ""), list(cells[method].values())) for method in methods)
    return Group(number, data, model, runs, cells, _ranks(folder, place), folder / "inputs" / slug(data))


def _cell(folder: Path, kept_rows: int) -> Run:
    run = read_run(folder / "metrics.json")
    cost = read_json(folder / "result.json")["cost"]
    info = run.info | cost | {"seconds": cost["fit_seconds"]}
    return replace(run, info=info, data=tuple(replace(part, rows=min(part.rows, kept_rows)) for part in run.data))


def _averaged(any_run: Run, method: str, kind: str, runs: Sequence[Run]) -> Run:
    """One run that stands for all seeds of a method."""
    if not runs:
        return replace(any_run, label=method, method=kind, fields={}, info={}, data=())
    first = runs[0]
    data = tuple(
        replace(
            part,
            metrics={
                metric: over_seeds([run.by_name[part.name].metrics.get(metric, NOTHING).mean for run in runs])
                for metric in part.metrics
            },
        )
        for part in first.data
    )
    costs = ("seconds", "predict_seconds_per_row", "peak_bytes", "flops", "gradient_evaluations", "stored_bytes")
    info = first.info | {key: over_seeds([run.info.get(key) for run in runs]).mean for key in costs}
    info["warnings"] = list(dict.fromkeys(text for run in runs for text in run.info.get("warnings", [])))
    info["seed"] = ", ".join(str(run.info.get("seed")) for run in runs)
    notes = tuple(dict.fromkeys(note for run in runs for note in run.notes))
    return replace(first, label=method, method=kind, info=info, data=data, notes=notes)


def over_seeds(values: Iterable[float | None]) -> Score:
    """Mean and its standard error; nothing where a seed has no value, no error for one seed."""
    known = list(values)
    if not known or any(value is None for value in known):
        return NOTHING
    array = np.array(known, dtype=np.float64)
    around = array - array[0]  # equal values have no spread at all, not one of rounding
    error = float(around.std(ddof=1) / math.sqrt(len(array))) if len(array) > 1 else None
    return Score(float(array.mean()), error)


def row_scores(run: Run, scored: Scored) -> Arrays:
    """A few numbers for every row that a cell was scored on, see `caveat.bench.rows`."""
    return _arrays(run.folder / "scores" / scored.path.name)


def _arrays(path: Path) -> Arrays:
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def _ranks(folder: Path, place: tuple[str, str]) -> dict[str, float]:
    with (folder / "ranks.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if (row["data"], row["model"]) == place]
    return {
        row["method"]: float(row["rank"]) for row in rows if row["shift"] == "all shifts" and row["metric"] == "nll"
    }
