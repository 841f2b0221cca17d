"""Reads a folder that `caveat bench` wrote: for each data set and model the methods, and for each method its seeds.

A cell of the bench is a run, as `caveat evaluate` writes one. A method is shown as one run too: every metric is the
mean over its seeds with the standard error over them, s / sqrt(n). Its predictions are those of the first seed; what is
drawn from all rows and seeds comes from the small files in `scores/`.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from caveat.bench import SavedCell, read_cell
from caveat.evaluate.comparison import UNKNOWN, MeanAndError, over_seeds
from caveat.evaluate.predictions import file_stem
from caveat.report.saved.run_folder import Arrays, SavedData, SavedRun, mean_over_data, run_of
from caveat.storage import CorruptFile, read_arrays, read_json

__all__ = ["COSTS", "BenchCell", "BenchGroup", "SavedBench", "is_bench", "read_bench"]

COSTS = ("seconds", "predict_seconds_per_row", "peak_bytes", "stored_bytes", "flops", "gradient_evaluations")


@dataclass(frozen=True)
class BenchCell:
    """One method trained with one seed: the run, and the files with a few numbers for every row."""

    run: SavedRun
    files: SavedCell

    def row_scores(self, name: str) -> Arrays:
        """Read a few numbers for every row of a data set, [N] each; `caveat.bench.rows` says which."""
        return self.files.rows(name)

    def row_uncertainty(self, name: str) -> np.ndarray:
        """Read the entropy or the variance of every row of a data set, [N], float64."""
        column = "entropy" if self.run.kind == "classification" else "variance"
        return self.row_scores(name)[column].astype(np.float64)


@dataclass(frozen=True)
class BenchGroup:
    """One data set and model.

    `runs` has one run a method, in the same order for all groups; a method that is not done has one without data.
    """

    index: int
    data: str
    model: str
    runs: tuple[SavedRun, ...]
    cells: dict[str, dict[int, BenchCell]]  # method -> seed -> the finished cell
    ranks: dict[str, float]  # method -> its mean place over shifts, by NLL
    inputs: Path  # the folder with some inputs of every condition

    @property
    def title(self) -> str:
        """What the group is called."""
        return f"{self.data} · {self.model}"

    @property
    def kind(self) -> str:
        """`classification` or `regression`."""
        return self.runs[0].kind

    @cached_property
    def done(self) -> list[SavedRun]:
        """The methods with at least one finished seed."""
        return [run for run in self.runs if run.data]

    def seeds(self, method: str) -> list[BenchCell]:
        """The finished cells of a method, by seed."""
        return [self.cells[method][seed] for seed in sorted(self.cells[method])]

    def score(self, method: str, names: Sequence[str], metric: str) -> MeanAndError:
        """Average a metric over conditions, seed by seed, then over seeds."""
        means = []
        for cell in self.seeds(method):
            known = all(name in cell.run.by_name for name in names)
            means.append(mean_over_data([cell.run.by_name[name] for name in names], metric).mean if known else None)
        return over_seeds(means)

    def shown_inputs(self, data: SavedData) -> Arrays:
        """Read the inputs of one condition that were kept to be looked at: `rows` with `images` or `x`, [K, ...]."""
        path = self.inputs / data.path.name
        if not path.exists():
            return {}
        arrays = read_arrays(path, ("rows",))
        for name, array in arrays.items():
            if array.shape[:1] != arrays["rows"].shape:
                raise CorruptFile(
                    f"{path}: {name} has shape {array.shape}, rows {arrays['rows'].shape}: run bench again"
                )
        return arrays


@dataclass(frozen=True)
class SavedBench:
    """All of a folder: what was asked (`index` is bench.json, `experiment` the file's text), and what came out."""

    folder: Path
    index: dict[str, Any]
    experiment: str
    methods: tuple[str, ...]
    groups: tuple[BenchGroup, ...]

    @property
    def title(self) -> str:
        """What the experiment is called."""
        return str(self.index["title"] or self.index["name"])

    @property
    def unfinished_cells(self) -> list[dict[str, Any]]:
        """The entries of bench.json for cells that failed or were not run yet."""
        return [cell for cell in self.index["cells"] if cell["status"] != "done"]


def is_bench(folder: str | Path) -> bool:
    """Whether a folder is one that `caveat bench` wrote."""
    return (Path(folder) / "bench.json").is_file()


def read_bench(folder: str | Path) -> SavedBench:
    """Read a folder of `caveat bench`, with the cells that are done."""
    folder = Path(folder)
    index = read_json(folder / "bench.json")
    done = [cell for cell in index["cells"] if cell["status"] == "done"]
    if not done:
        raise ValueError(f"{folder} has no finished cell yet: run `caveat bench` again")
    methods = tuple(dict.fromkeys(cell["method"] for cell in index["cells"]))
    data_and_models = dict.fromkeys((cell["data"], cell["model"]) for cell in done)
    groups = tuple(_group(folder, number, which, methods, index) for number, which in enumerate(data_and_models))
    experiment = (folder / "experiment.toml").read_text(encoding="utf-8")
    return SavedBench(folder, index, experiment, methods, groups)


def _group(
    folder: Path, number: int, which: tuple[str, str], methods: Sequence[str], index: dict[str, Any]
) -> BenchGroup:
    data, model = which
    entries = [cell for cell in index["cells"] if (cell["data"], cell["model"]) == which]
    kinds = {cell["method"]: cell["kind"] for cell in entries}
    cells: dict[str, dict[int, BenchCell]] = {method: {} for method in methods}
    for cell in entries:
        if cell["status"] == "done":
            cells[cell["method"]][cell["seed"]] = _saved_cell(folder / cell["folder"], index["kept_rows"])
    any_run = next(cell.run for by_seed in cells.values() for cell in by_seed.values())
    runs = tuple(
        _mean_run(any_run, method, kinds.get(method, ""), [cell.run for cell in cells[method].values()])
        for method in methods
    )
    return BenchGroup(number, data, model, runs, cells, _ranks(folder, which), folder / "inputs" / file_stem(data))


def _saved_cell(folder: Path, rows_kept: int) -> BenchCell:
    files = read_cell(folder)
    run = run_of(files.metrics, folder / "metrics.json")
    info = run.info | files.cost | {"seconds": files.cost["fit_seconds"]}
    data = tuple(replace(part, rows=min(part.rows, rows_kept)) for part in run.data)
    return BenchCell(replace(run, info=info, data=data), files)


def _mean_run(any_run: SavedRun, method: str, kind: str, runs: Sequence[SavedRun]) -> SavedRun:
    """One run that stands for all seeds of a method."""
    if not runs:
        return replace(any_run, label=method, method=kind, fields={}, info={}, data=())
    first = runs[0]
    data = tuple(
        replace(
            part,
            metrics={
                metric: over_seeds([run.by_name[part.name].metrics.get(metric, UNKNOWN).mean for run in runs])
                for metric in part.metrics
            },
            warnings=tuple(dict.fromkeys(text for run in runs for text in run.by_name[part.name].warnings)),
        )
        for part in first.data
    )
    info = first.info | {key: over_seeds([run.info.get(key) for run in runs]).mean for key in COSTS}
    info["warnings"] = list(dict.fromkeys(text for run in runs for text in run.info.get("warnings", [])))
    info["seed"] = ", ".join(str(run.info.get("seed")) for run in runs)
    notes = tuple(dict.fromkeys(note for run in runs for note in run.notes))
    return replace(first, label=method, method=kind, info=info, data=data, notes=notes)


def _ranks(folder: Path, which: tuple[str, str]) -> dict[str, float]:
    """The mean place of each method over shifts, by NLL, on one data set and model."""
    with (folder / "ranks.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if (row["data"], row["model"]) == which]
    return {
        row["method"]: float(row["rank"]) for row in rows if row["shift"] == "all shifts" and row["metric"] == "nll"
    }
