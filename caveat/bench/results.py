"""Results as tidy tables: one row a number, and one row a condition with means over seeds.

    results.csv   data, model, method, seed, shift, severity, metric, value, stderr, role
    summary.csv   data, model, method, shift, severity, role, seeds, then <metric> and <metric>_stderr

`role` is clean, shift, ood or cost. The `stderr` of results.csv is over test rows; that of summary.csv is over seeds,
s / sqrt(n), and empty for one seed. What was not measured is empty.
"""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from caveat.bench.cell_files import SavedCell, read_cell
from caveat.bench.plan import Cell, Experiment, cells_of, evaluation_key, is_done
from caveat.evaluate.comparison import over_seeds
from caveat.files import whole_file

__all__ = ["Result", "Row", "long_table", "mean_over_seeds", "read_results", "role_of", "summary_table", "write_table"]

Row = dict[str, Any]


@dataclass(frozen=True)
class Result:
    """A finished cell: what it is, and what it has on disk."""

    cell: Cell
    saved: SavedCell


def read_results(experiment: Experiment, out: Path) -> list[Result]:
    """Every cell of the experiment that is done."""
    return [
        Result(cell, read_cell(out / "cells" / cell.name))
        for cell in cells_of(experiment)
        if is_done(out, cell, evaluation_key(experiment, cell))
    ]


def role_of(part: Row) -> str:
    """What a part is: clean test rows, shifted ones, or out-of-distribution inputs."""
    if part["role"] == "ood":
        return "ood"
    return "clean" if part["family"] == "clean" else "shift"


def long_table(results: Iterable[Result]) -> list[Row]:
    """One row for each number."""
    table = []
    for result in results:
        cell = result.cell
        who = {"data": cell.data.label, "model": cell.model, "method": cell.label, "seed": cell.seed}
        for part in result.saved.parts:
            where = {"shift": part["family"], "severity": part["severity"]}
            for metric, score in part["metrics"].items():
                measured = {"metric": metric, "value": score["mean"], "stderr": score["stderr"], "role": role_of(part)}
                table.append(who | where | measured)
        for metric, value in result.saved.cost.items():
            measured = {"metric": metric, "value": value, "stderr": None, "role": "cost"}
            table.append(who | {"shift": None, "severity": None} | measured)
    return table


def summary_table(table: Sequence[Row]) -> list[Row]:
    """One row for each method and condition: mean and standard error over seeds of every metric, costs included."""
    groups: dict[tuple[Any, ...], dict[str, list[float | None]]] = {}
    costs: dict[tuple[Any, ...], dict[str, list[float | None]]] = {}
    for row in table:
        who = (row["data"], row["model"], row["method"])
        if row["role"] == "cost":
            costs.setdefault(who, {}).setdefault(row["metric"], []).append(row["value"])
        else:
            key = (*who, row["shift"], row["severity"], row["role"])
            groups.setdefault(key, {}).setdefault(row["metric"], []).append(row["value"])
    metrics = list(dict.fromkeys(row["metric"] for row in table))
    summary = []
    for key, values in groups.items():
        line: Row = dict(zip(("data", "model", "method", "shift", "severity", "role"), key, strict=True))
        line["seeds"] = max(map(len, values.values()))
        for metric in metrics:
            measured = (values | costs.get(key[:3], {})).get(metric, [])
            line[metric], line[f"{metric}_stderr"] = mean_over_seeds(measured)
        summary.append(line)
    return summary


def mean_over_seeds(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Mean and its standard error; nothing where a seed has no value."""
    score = over_seeds(values)
    return score.mean, score.stderr


def write_table(path: Path, table: Sequence[Mapping[str, Any]], *, parquet: bool = False) -> None:
    """Write rows of the same keys as csv, and as parquet beside it where asked."""
    columns = list(table[0]) if table else []
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    with whole_file(path) as temporary:
        temporary.write_text(text.getvalue(), encoding="utf-8", newline="")
    if parquet and table:
        arrow, writer_of = import_pyarrow()
        with whole_file(path.with_suffix(".parquet")) as temporary:
            writer_of.write_table(arrow.Table.from_pylist([dict(row) for row in table]), temporary)


def import_pyarrow() -> tuple[Any, Any]:
    """Pyarrow and its parquet module, or what to install."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError("--parquet needs pyarrow: pip install pyarrow; results.csv has the same numbers") from error
    return pyarrow, pyarrow.parquet
