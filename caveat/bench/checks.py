"""What an experiment asks of its data: that each shift, each out-of-distribution set and each model fits their shape.

This takes the data themselves, so it is looked at once they are known to be here, and before anything is fitted. Data
that are not here are left to their cells, which say where they were looked for.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from caveat.bench.cells import task_of
from caveat.bench.plan import Cell, Experiment, Problem
from caveat.data import DataSet, conditions, out_of_distribution
from caveat.data.condition_sets import shift_label

__all__ = ["check_fits"]


def check_fits(experiment: Experiment, cells: Sequence[Cell], data_dir: Path | None) -> None:
    """Refuse what the cells could not do with their data; a ValueError names the key."""
    loaded: dict[str, DataSet | None] = {}
    choices = [(cell, choice) for cell in cells for choice in cell.candidates]
    kinds = {(cell.data.label, cell.model, choice.prior): (cell, choice) for cell, choice in choices}
    for cell, choice in kinds.values():
        label = cell.data.label
        if label not in loaded:
            loaded[label] = _tried(experiment, f"data: {label!r}", partial(cell.data.load, data_dir))
            if loaded[label] is not None:
                _check_conditions(experiment, cell.problem, loaded[label], data_dir)
        data = loaded[label]
        if data is not None:
            key = f"models: {cell.model!r} on {label!r}"
            _tried(experiment, key, partial(task_of, cell, data, choice))


def _check_conditions(experiment: Experiment, problem: Problem, data: Any, data_dir: Path | None) -> None:
    """One row under each shift, one row of each out-of-distribution set."""
    label = problem.source.label
    for name, severities in problem.shifts:
        key = f"shifts.{name} on {label!r}"
        shifts = {name: severities}
        tests = _tried(experiment, key, partial(conditions, data, shifts=shifts))
        for rows in tests.inside[shift_label(name)].values() if tests else ():
            _tried(experiment, key, partial(rows.__getitem__, 0))
    for name in problem.ood:
        key = f"ood: {name!r} for {label!r}"
        _tried(experiment, key, partial(out_of_distribution, name, data, data_dir, n=1))


def _tried(experiment: Experiment, key: str, make: Callable[[], Any]) -> Any:
    """What `make()` gives, None where a file or a package is missing; a complaint begins with the file and the key."""
    try:
        return make()
    except (OSError, ImportError):
        return None
    except Exception as error:  # a model of one's own may do anything
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"{experiment.name}.toml: {key}: {kind}{error}") from error
