"""Tables of a bench: the results of all data sets, and how near methods come to HMC and to each other."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from caveat.evaluate.comparison import UNKNOWN, MeanAndError, mean_distance, mean_total_variation, over_seeds
from caveat.evaluate.metrics import METRICS, format_error, format_number
from caveat.report.draw import TableLine, names_fold, results_table, scrolling, styles, swatch
from caveat.report.numbers import CLEAN, CURVES, FIDELITY, OOD, Column, MetricTable
from caveat.report.saved import (
    COSTS,
    BenchGroup,
    SavedBench,
    SavedRun,
    data_by_title,
    matched,
    ood_sets,
    reference_notes,
    shift_families,
)

__all__ = ["bench_table", "between_table", "fidelity_tables"]

MOST_FAMILIES = 4  # with columns of their own; more are shown as one mean
ALL_SHIFTS = "all shifts"


def bench_table(bench: SavedBench) -> str:
    """Tabulate every data set, model and method; the best of each data set and model are marked."""
    columns = _columns(bench)
    scores = {
        group.index: [[_column_score(group, run, column) for column in columns] for run in group.done]
        for group in bench.groups
    }
    all_rows = [row for rows in scores.values() for row in rows]
    measured = [i for i in range(len(columns)) if any(row[i].mean is not None for row in all_rows)]
    columns = [columns[i] for i in measured]
    lines = []
    for group in bench.groups:
        cells = tuple(tuple(row[i] for i in measured) for row in scores[group.index])
        table = MetricTable(tuple(run.label for run in group.done), tuple(columns), cells)
        best = [table.best(i) for i in range(len(columns))]
        for row, run in enumerate(group.done):
            marked = {i for i, rows in enumerate(best) if row in rows}
            note = group.title if len(bench.groups) > 1 else ""
            lines.append(TableLine(run.label, styles(group.runs)[run.label], cells[row], marked, note, group.index))
    caption = (
        "Mean ± standard error over seeds, best of each data set in bold. Columns of a shift are means over its "
        "severities. Fits include the MAP that they start from."
    )
    runs = [run for group in bench.groups for run in group.done]
    return results_table(columns, lines, "Method", caption) + names_fold(runs, columns)


def _columns(bench: SavedBench) -> list[Column]:
    all_runs = [run for group in bench.groups for run in group.done]
    kinds = list(dict.fromkeys(group.kind for group in bench.groups))
    shifts = shift_families(all_runs)
    columns = [Column("clean", metric) for kind in kinds for metric in CLEAN[kind] + FIDELITY[kind]]
    for family in shifts if len(shifts) <= MOST_FAMILIES else [ALL_SHIFTS]:
        columns += [Column(family, metric) for kind in kinds for metric in CURVES[kind]]
    if len(shifts) > 1:
        columns.append(Column("over shifts", "rank"))
    columns += [Column(name, OOD[kind]) for name in ood_sets(all_runs) for kind in kinds]
    columns += [Column("cost", metric) for metric in COSTS]
    return list(dict.fromkeys(columns))


def _column_score(group: BenchGroup, run: SavedRun, column: Column) -> MeanAndError:
    if column.metric == "rank":
        return MeanAndError(group.ranks.get(run.label), None)
    if column.group == "cost":
        return over_seeds([cell.run.info.get(column.metric) for cell in group.seeds(run.label)])
    if column.group == "clean":
        return run.clean.metrics.get(column.metric, UNKNOWN) if run.clean else UNKNOWN
    if column.metric in OOD.values():
        return run.by_name[column.group].metrics.get(column.metric, UNKNOWN) if column.group in run.by_name else UNKNOWN
    shown = run.shifts if column.group == ALL_SHIFTS else {column.group: run.shifts.get(column.group, ())}
    return group.score(run.label, [data.name for family in shown.values() for data in family], column.metric)


def fidelity_tables(group: BenchGroup) -> str:
    """Tabulate closeness to the reference, methods by conditions; nothing where no reference was given."""
    tables = ""
    for metric in FIDELITY[group.kind]:
        names = [
            (title, parts)
            for title, parts in data_by_title(group.done)
            if any(group.score(run.label, parts, metric).mean is not None for run in group.done)
        ]
        if names:
            scores = [[group.score(run.label, parts, metric) for _, parts in names] for run in group.done]
            heads = [escape(title) for title, _ in names]
            title, is_high = f"{METRICS[metric].title}: {METRICS[metric].meaning}", METRICS[metric].sign > 0
            tables += _matrix(group, title, heads, scores, [None] * len(names), near_is_high=is_high)
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in reference_notes(group.done))
    return notes + tables


def between_table(group: BenchGroup) -> str:
    """Tabulate how far the methods' predictions on clean rows lie from each other, averaged over seeds."""
    style = styles(group.runs)
    scores = [[_between(group, one.label, other.label) for other in group.done] for one in group.done]
    heads = [f"{swatch(style[run.label])}{escape(run.label)}" for run in group.done]
    title = {
        "classification": "Between methods: total variation distance of their probabilities on clean rows, 0 to 1",
        "regression": "Between methods: mean distance of their predictions on clean rows, in the target's units",
    }[group.kind]
    return _matrix(group, title, heads, scores, [style[run.label].index for run in group.done], near_is_high=False)


def _between(group: BenchGroup, one: str, other: str) -> MeanAndError:
    """The distance between two methods' predictions on clean rows, over the seeds that both have."""
    if one == other:
        return UNKNOWN
    distances: list[float | None] = []
    for seed, cell in group.cells[one].items():
        other_cell = group.cells[other].get(seed)
        if other_cell is None or cell.run.clean is None or other_cell.run.clean is None:
            continue
        ours, theirs = matched(cell.run.clean, other_cell.run.clean)
        if group.kind == "classification":
            distances.append(mean_total_variation(ours["probs"], theirs["probs"]))
        else:
            distances.append(mean_distance(ours["mean"], theirs["mean"]))
    return over_seeds(distances)


def _matrix(
    group: BenchGroup,
    title: str,
    heads: Sequence[str],
    scores: Sequence[Sequence[MeanAndError]],
    columns: Sequence[int | None],
    *,
    near_is_high: bool,
) -> str:
    """Methods down, `heads` across; the stronger the colour, the nearer. A column that is a method hides with it."""
    style = styles(group.runs)
    all_scores = [score for row in scores for score in row]
    # Distances between methods can be compared across columns, those of different data sets cannot.
    shaded = [[row[i] for row in scores] if owner is None else all_scores for i, owner in enumerate(columns)]
    known = [[score.mean for score in column if score.mean is not None] for column in shaded]
    ends = [(min(column), max(column)) if column else (0.0, 0.0) for column in known]
    owner = ["" if index is None else f' data-run="{index}"' for index in columns]
    top = "".join(f'<th scope="col"{owner[i]}>{head}</th>' for i, head in enumerate(heads))
    rows = ""
    for run, line in zip(group.done, scores, strict=True):
        cells = ""
        for i, score in enumerate(line):
            low, high = ends[i]
            share = 0.0 if score.mean is None or high == low else (score.mean - low) / (high - low)
            near = 0.0 if score.mean is None else share if near_is_high else 1 - share
            error = "" if score.stderr is None else f' <span class="stderr">±{format_error(score.stderr)}</span>'
            cells += f'<td style="--near:{near:.3f}"{owner[i]}>{format_number(score.mean)}{error}</td>'
        name = f'<th scope="row">{swatch(style[run.label])}{escape(run.label)}</th>'
        rows += f'<tr data-run="{style[run.label].index}">{name}{cells}</tr>'
    caption = f"<caption><span>{escape(title)}. The stronger the colour, the nearer.</span></caption>"
    head = f'<thead><tr><th scope="col">Method</th>{top}</tr></thead>'
    return scrolling(title, f'<table class="matrix">{caption}{head}<tbody>{rows}</tbody></table>')
