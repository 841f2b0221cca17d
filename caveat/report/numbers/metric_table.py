"""The table of results: one row a run, one column a metric on clean data, shifted, out of distribution, or a cost.

The value for a shift family is the mean over its severities, of those that all runs with it have. Its standard error is
an upper bound, see `caveat.evaluate.comparison`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from caveat.evaluate.comparison import UNKNOWN, MeanAndError
from caveat.evaluate.metrics import METRICS
from caveat.report.saved import (
    SavedRun,
    clean_of,
    left_out_notes,
    marginal_notes,
    mean_over_data,
    ood_sets,
    reference_notes,
    shared_names,
    shift_families,
)

__all__ = ["CLEAN", "CURVES", "FIDELITY", "OOD", "Column", "MetricTable", "table"]

CLEAN = {
    "classification": ("accuracy", "nll", "joint_nll", "brier", "ece", "set_coverage_90", "set_size_90"),  # if known
    "regression": ("rmse", "nll", "crps", "coverage_90"),
}
CURVES = {"classification": ("accuracy", "nll", "ece"), "regression": ("rmse", "nll", "crps")}
FIDELITY = {"classification": ("agreement", "total_variation"), "regression": ("w1", "w2")}  # where scored
OOD = {"classification": "auroc_entropy", "regression": "auroc_variance"}
FEATURE_OOD = ("auroc_mahalanobis", "auroc_knn")  # where the training rows were given


@dataclass(frozen=True)
class Column:
    """One column: `group` is the data it speaks of ("clean", a shift family, an OOD set, "cost")."""

    group: str
    metric: str

    @property
    def key(self) -> str:
        """A name to sort by: the bare metric on clean data, else with its group ("rotated.nll")."""
        return self.metric if self.group in ("clean", "cost") else f"{self.group}.{self.metric}"


@dataclass(frozen=True)
class MetricTable:
    """The table of results with one row a run; a value is at `cells[row][column]`."""

    labels: tuple[str, ...]
    columns: tuple[Column, ...]
    cells: tuple[tuple[MeanAndError, ...], ...]
    notes: tuple[str, ...] = ()  # what is left out, what is no better than marginals, what differs from the reference

    def best(self, column: int) -> set[int]:
        """The rows with the best value of a column, to the digits shown; none where all are alike."""
        metric = METRICS[self.columns[column].metric]
        means = [cells[column].mean for cells in self.cells]
        losses = {row: metric.loss(mean) for row, mean in enumerate(means) if mean is not None}
        lowest = [row for row in losses if math.isclose(losses[row], min(losses.values()), rel_tol=1e-6)]
        shown = {metric.text(means[row]) for row in lowest}
        best = {row for row in losses if metric.text(means[row]) in shown}
        return best if len(best) < len(losses) else set()


def table(runs: Sequence[SavedRun]) -> MetricTable:
    """Tabulate metrics on clean data, their mean over each shift family, OOD AUROC, and the cost of each run."""
    kind = runs[0].kind
    columns = [Column("clean", metric) for metric in CLEAN[kind] + FIDELITY[kind]]
    columns += [Column(family, metric) for family in shift_families(runs) for metric in CURVES[kind] + FIDELITY[kind]]
    columns += [Column(name, metric) for name in ood_sets(runs) for metric in (OOD[kind], *FEATURE_OOD)]
    columns += [Column("cost", metric) for metric in ("seconds", "predict_seconds_per_row", "stored_bytes")]
    rows = [[_cell(runs, run, column) for column in columns] for run in runs]
    measured = [index for index in range(len(columns)) if any(row[index].mean is not None for row in rows)]
    return MetricTable(
        labels=tuple(run.label for run in runs),
        columns=tuple(columns[index] for index in measured),
        cells=tuple(tuple(row[index] for index in measured) for row in rows),
        notes=(*left_out_notes(runs), *marginal_notes(runs), *reference_notes(runs)),
    )


def _cell(runs: Sequence[SavedRun], run: SavedRun, column: Column) -> MeanAndError:
    if column.group == "cost":
        value = run.info.get(column.metric)
        return MeanAndError(None if value is None else float(value), None)
    clean = clean_of(runs, run)
    if column.group == "clean":
        return clean.metrics.get(column.metric, UNKNOWN) if clean else UNKNOWN
    if column.metric in (*OOD.values(), *FEATURE_OOD):
        known = clean is not None and column.group in run.by_name
        return run.by_name[column.group].metrics.get(column.metric, UNKNOWN) if known else UNKNOWN
    if column.group not in run.shifts:
        return UNKNOWN
    return mean_over_data([run.by_name[name] for name in shared_names(runs, column.group)], column.metric)
