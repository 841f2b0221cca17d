"""What an experiment asks of its data: that each shift, each outside set and each model fits their shape.

This takes the data themselves, so it is looked at once they are known to be here, and before anything is fitted. Data
that are not here are left to their cells, which say where they were looked for.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from caveat import data as sets
from caveat.bench.cells import task_of
from caveat.bench.experiment import Experiment
from caveat.bench.grid import Cell
from caveat.data.shifts import shifted

__all__ = ["check_fits"]


def check_fits(experiment: Experiment, cells: Sequence[Cell], data_dir: Path | None) -> None:
    """Refuse what the cells could not do with their data; a ValueError names the key."""
    loaded: dict[str, sets.DataSet | None] = {}
    for cell in {(cell.data.label, cell.model): cell for cell in cells}.values():
        label = cell.data.label
        if label not in loaded:
            loaded[label] = _tried(experiment, f"data: {label!r}", lambda cell=cell: cell.data.load(data_dir))
            if loaded[label] is not None:
                _check_conditions(experiment, label, loaded[label], data_dir)
        data = loaded[label]
        if data is not None:
            where = f"models: {cell.model!r} on {label!r}"
            _tried(experiment, where, lambda cell=cell, data=data: task_of(experiment, cell, data))


def _check_conditions(experiment: Experiment, label: str, data: Any, data_dir: Path | None) -> None:
    """One row under each shift, one row of each outside set."""
    for name, severities in experiment.shifts:
        where = f"shifts.{name} on {label!r}"
        found = _tried(experiment, where, lambda name=name, severities=severities: shifted(data, name, severities, 0))
        for rows in found.values() if found else ():
            _tried(experiment, where, lambda rows=rows: rows.__getitems__([0]))
    for name in experiment.ood:
        _tried(
            experiment,
            f"ood: {name!r} for {label!r}",
            lambda name=name: sets.out_of_distribution(name, data, data_dir, n=1),
        )


def _tried(experiment: Experiment, where: str, make: Any) -> Any:
    """What `make()` gives, None where a file or a package is missing; a complaint begins with the file and the key."""
    try:
        return make()
    except (OSError, ImportError):
        return None
    except Exception as error:  # a model of one's own may do anything
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"{experiment.name}.toml: {where}: {kind}{error}") from error
