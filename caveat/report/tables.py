"""Tables of the metrics: one row a run for people, one row a number for machines.

The value for a shift family is the mean over its severities, of those that all runs with it have. Its standard error is
the mean of theirs: an upper bound, reached when the same rows fail at every severity (they are the same images, so
their errors are far from independent).
"""

from __future__ import annotations

import csv
import io
import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from caveat.files import whole_file
from caveat.report.runs import Run, Score, Scored
from caveat.report.shared import clean_of, left_out, reference_notes, shared_names

NOTHING = Score(None, None)


@dataclass(frozen=True)
class Metric:
    """How to name a metric, what it says, and `loss`: the smaller, the better."""

    title: str
    meaning: str
    loss: Callable[[float], float]


def _low(value: float) -> float:
    return value


def _high(value: float) -> float:
    return -value


METRICS = {
    "accuracy": Metric("Accuracy", "share of rows named rightly; higher is better", _high),
    "nll": Metric("NLL", "negative log-likelihood in nats a row; lower is better", _low),
    "brier": Metric("Brier", "squared error of the probabilities; lower is better", _low),
    "ece": Metric("ECE", "expected calibration error; lower is better", _low),
    "rmse": Metric("RMSE", "root mean squared error in the target's units; lower is better", _low),
    "crps": Metric("CRPS", "continuous ranked probability score; lower is better", _low),
    "coverage_90": Metric(
        "90% coverage", "share of targets in the 90% interval; nearest to 0.9 is best", lambda value: abs(value - 0.9)
    ),
    "agreement": Metric("Agreement", "share of rows named as by the reference; higher is better", _high),
    "total_variation": Metric(
        "TV", "total variation distance from the reference's probabilities, 0 to 1; lower is better", _low
    ),
    "w1": Metric("W1", "Wasserstein-1 distance from the reference in the target's units; lower is better", _low),
    "w2": Metric("W2", "Wasserstein-2 distance from the reference in the target's units; lower is better", _low),
    "auroc_entropy": Metric("AUROC", "clean against this set by entropy; higher is better", _high),
    "auroc_variance": Metric("AUROC", "clean against this set by variance; higher is better", _high),
    "seconds": Metric("Fit time", "seconds; lower is better", _low),
    "predict_seconds_per_row": Metric("Prediction", "seconds a row; lower is better", _low),
    "peak_bytes": Metric("Peak memory", "bytes, of the whole process on a CPU; lower is better", _low),
    "stored_bytes": Metric("Stored", "bytes on disk; lower is better", _low),
    "flops": Metric("FLOPs", "floating-point operations of the fit; lower is better", _low),
    "gradient_evaluations": Metric("Gradients", "gradient evaluations of the fit; lower is better", _low),
    "rank": Metric("Mean rank", "mean place among the methods over shifts, by NLL; 1 is best", _low),
}
CLEAN = {
    "classification": ("accuracy", "nll", "brier", "ece"),
    "regression": ("rmse", "nll", "crps", "coverage_90"),
}
CURVES = {"classification": ("accuracy", "nll", "ece"), "regression": ("rmse", "nll", "crps")}
FIDELITY = {"classification": ("agreement", "total_variation"), "regression": ("w1", "w2")}  # where scored
OUTSIDE = {"classification": "auroc_entropy", "regression": "auroc_variance"}


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
class Table:
    """One row a run; `cells[row][column]`."""

    labels: tuple[str, ...]
    columns: tuple[Column, ...]
    cells: tuple[tuple[Score, ...], ...]
    notes: tuple[str, ...] = ()  # what is left out, and what beside methods differs from the reference

    def best(self, column: int) -> set[int]:
        """The rows with the best value of a column, to the digits shown; none where all are alike."""
        metric = self.columns[column].metric
        means = [cells[column].mean for cells in self.cells]
        losses = {row: METRICS[metric].loss(mean) for row, mean in enumerate(means) if mean is not None}
        lowest = [row for row in losses if math.isclose(losses[row], min(losses.values()), rel_tol=1e-6)]
        shown = {format_mean(metric, means[row]) for row in lowest}
        best = {row for row in losses if format_mean(metric, means[row]) in shown}
        return best if len(best) < len(losses) else set()


def table(runs: Sequence[Run]) -> Table:
    """Metrics on clean data, their mean over each shift family, OOD AUROC, and the cost of each run."""
    kind = runs[0].kind
    columns = [Column("clean", metric) for metric in CLEAN[kind] + FIDELITY[kind]]
    columns += [Column(family, metric) for family in families(runs) for metric in CURVES[kind] + FIDELITY[kind]]
    columns += [Column(name, OUTSIDE[kind]) for name in outside_names(runs)]
    columns += [Column("cost", "seconds"), Column("cost", "stored_bytes")]
    rows = [[_cell(runs, run, column) for column in columns] for run in runs]
    kept = [index for index in range(len(columns)) if any(row[index].mean is not None for row in rows)]
    return Table(
        labels=tuple(run.label for run in runs),
        columns=tuple(columns[index] for index in kept),
        cells=tuple(tuple(row[index] for index in kept) for row in rows),
        notes=(*left_out(runs), *reference_notes(runs)),
    )


def families(runs: Iterable[Run]) -> list[str]:
    """The shift families of all runs, in the order they come."""
    return list(dict.fromkeys(family for run in runs for family in run.shifts))


def outside_names(runs: Iterable[Run]) -> list[str]:
    """The out-of-distribution sets of all runs, in the order they come."""
    return list(dict.fromkeys(scored.name for run in runs for scored in run.outside))


def mean_score(scored: Sequence[Scored], metric: str) -> Score:
    """Mean of a metric over data sets, with the mean of their standard errors as an upper bound of its own."""
    scores = [data.metrics.get(metric, NOTHING) for data in scored]
    means = [score.mean for score in scores if score.mean is not None]
    errors = [score.stderr for score in scores if score.stderr is not None]
    if not scores or len(means) < len(scores):
        return NOTHING
    return Score(sum(means) / len(means), sum(errors) / len(errors) if len(errors) == len(scores) else None)


def _cell(runs: Sequence[Run], run: Run, column: Column) -> Score:
    if column.group == "cost":
        value = run.info.get(column.metric)
        return Score(None if value is None else float(value), None)
    clean = clean_of(runs, run)
    if column.group == "clean":
        return clean.metrics.get(column.metric, NOTHING) if clean else NOTHING
    if column.metric in OUTSIDE.values():
        known = clean is not None and column.group in run.by_name
        return run.by_name[column.group].metrics.get(column.metric, NOTHING) if known else NOTHING
    if column.group not in run.shifts:
        return NOTHING
    return mean_score([run.by_name[name] for name in shared_names(runs, column.group)], column.metric)


def format_number(value: float | None) -> str:
    """Three decimals, or two significant digits where those would be lost: 0.972, 0.0041, 3.2e−06, 1,204."""
    if value is None:
        return "–"
    size = abs(value)
    if size >= 100:
        text = f"{value:,.0f}" if size >= 1000 else f"{value:.1f}"
    else:
        text = f"{value:.3f}" if size >= 0.01 or size == 0 else f"{value:.2g}"
    return text.replace("-", "−")


def format_error(value: float) -> str:
    """A standard error to two significant digits: 0.0073, 0.15, 12."""
    if value == 0:
        return "0"
    return f"{value:#.2g}" if value < 9.5 else f"{value:,.0f}"


def format_seconds(value: float | None) -> str:
    """A time a person reads at once: 12 µs, 31 ms, 12.4 s, 3 min 20 s, 2.5 h."""
    if value is None:
        return "–"
    if value < 100:
        unit, factor = ("s", 1) if value >= 1 or value == 0 else ("ms", 1e3) if value >= 0.001 else ("µs", 1e6)
        return f"{factor * value:.3g} {unit}"
    return f"{int(value) // 60} min {int(value) % 60:02d} s" if value < 7200 else f"{value / 3600:,.1f} h"


def format_bytes(value: float | None) -> str:
    """A size in decimal units: 812 B, 40.2 kB, 1.3 GB."""
    if value is None:
        return "–"
    units = ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.3g} {units[0]}"


def format_mean(metric: str, value: float | None) -> str:
    """A metric's value in its own unit."""
    special = {
        "seconds": format_seconds,
        "predict_seconds_per_row": format_seconds,
        "peak_bytes": format_bytes,
        "stored_bytes": format_bytes,
        "flops": lambda n: "–" if n is None else f"{n:.2g}",
        "gradient_evaluations": lambda n: "–" if n is None else f"{n:,.0f}",
        "rank": lambda n: "–" if n is None else f"{n:.1f}",
    }
    return special.get(metric, format_number)(value)


def format_text(table: Table, width: int = 100) -> str:
    """The table as aligned plain text, in blocks no wider than `width`; * marks the best of a column."""
    names = ["", "", *table.labels]
    label_width = max(map(len, names))
    blocks: list[list[str]] = []
    for index, column in enumerate(table.columns):
        best = table.best(index)
        lines = [column.group, METRICS[column.metric].title]
        for row, cells in enumerate(table.cells):
            score = cells[index]
            error = "" if score.stderr is None else f" ±{format_error(score.stderr)}"
            lines.append(f"{format_mean(column.metric, score.mean)}{error}{'*' if row in best else ' '}")
        cell_width = max(map(len, lines))
        lines = [line.rjust(cell_width) for line in lines]
        if not blocks or len(blocks[-1][0]) + 2 + cell_width > width:
            blocks.append([name.ljust(label_width) for name in names])
        blocks[-1] = [f"{start}  {line}" for start, line in zip(blocks[-1], lines, strict=True)]
    shown = ["\n".join(line.rstrip() for line in block) for block in blocks]
    return "\n\n".join([*shown, *("\n".join(textwrap.wrap(note, width)) for note in table.notes)])


def write_csv(runs: Sequence[Run], path: str | Path) -> Path:
    """One row for each number measured: label, method, data, family, severity, metric, mean, stderr."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["label", "method", "data", "family", "severity", "metric", "mean", "stderr"])
    for run in runs:
        for data in run.data:
            for metric, score in data.metrics.items():
                start = [run.label, run.method, data.name, data.family, data.severity]
                writer.writerow([*start, metric, score.mean, score.stderr])
    with whole_file(Path(path)) as temporary:
        temporary.write_text(text.getvalue(), encoding="utf-8", newline="")
    return Path(path)
