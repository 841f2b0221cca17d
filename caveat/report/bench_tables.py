"""Tables of a bench: the results of all data sets, and how near methods come to HMC and to each other."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from caveat.report.bench_runs import Bench, Group, over_seeds
from caveat.report.compare import matched
from caveat.report.drawing import styles
from caveat.report.markup import swatch
from caveat.report.results_table import Line, results_table
from caveat.report.runs import Run, Score
from caveat.report.sections import test_groups
from caveat.report.shared import reference_notes
from caveat.report.tables import (
    CLEAN,
    CURVES,
    FIDELITY,
    METRICS,
    NOTHING,
    OUTSIDE,
    Column,
    Table,
    families,
    format_error,
    format_number,
    outside_names,
)

__all__ = ["bench_table", "between_table", "fidelity_tables"]

MOST_FAMILIES = 4  # with columns of their own; more are shown as one mean
ALL_SHIFTS = "all shifts"
COSTS = ("seconds", "predict_seconds_per_row", "peak_bytes", "stored_bytes", "flops", "gradient_evaluations")


def bench_table(bench: Bench) -> str:
    """One row for each data set, model and method; the best of each data set and model are marked."""
    columns = _columns(bench)
    scores = {
        group.index: [[_score(group, run, column) for column in columns] for run in group.done]
        for group in bench.groups
    }
    every = [row for rows in scores.values() for row in rows]
    kept = [i for i in range(len(columns)) if any(row[i].mean is not None for row in every)]
    columns = [columns[i] for i in kept]
    lines = []
    for group in bench.groups:
        cells = tuple(tuple(row[i] for i in kept) for row in scores[group.index])
        table = Table(tuple(run.label for run in group.done), tuple(columns), cells)
        best = [table.best(i) for i in range(len(columns))]
        for row, run in enumerate(group.done):
            marked = {i for i, rows in enumerate(best) if row in rows}
            note = group.title if len(bench.groups) > 1 else ""
            lines.append(Line(run.label, styles(group.runs)[run.label], cells[row], marked, note, group.index))
    caption = (
        "Mean ± standard error over seeds, best of each data set in bold. Columns of a shift are means over its "
        "severities. Fits include the MAP that they start from."
    )
    return results_table(columns, lines, "Method", caption)


def _columns(bench: Bench) -> list[Column]:
    every = [run for group in bench.groups for run in group.done]
    kinds = list(dict.fromkeys(group.kind for group in bench.groups))
    shifts = families(every)
    columns = [Column("clean", metric) for kind in kinds for metric in CLEAN[kind] + FIDELITY[kind]]
    for family in shifts if len(shifts) <= MOST_FAMILIES else [ALL_SHIFTS]:
        columns += [Column(family, metric) for kind in kinds for metric in CURVES[kind]]
    if len(shifts) > 1:
        columns.append(Column("over shifts", "rank"))
    columns += [Column(name, OUTSIDE[kind]) for name in outside_names(every) for kind in kinds]
    columns += [Column("cost", metric) for metric in COSTS]
    return list(dict.fromkeys(columns))


def _score(group: Group, run: Run, column: Column) -> Score:
    if column.metric == "rank":
        return Score(group.ranks.get(run.label), None)
    if column.group == "cost":
        return over_seeds([seed.info.get(column.metric) for seed in group.seeds(run.label)])
    if column.group == "clean":
        return run.clean.metrics.get(column.metric, NOTHING) if run.clean else NOTHING
    if column.metric in OUTSIDE.values():
        return run.by_name[column.group].metrics.get(column.metric, NOTHING) if column.group in run.by_name else NOTHING
    shown = run.shifts if column.group == ALL_SHIFTS else {column.group: run.shifts.get(column.group, ())}
    return group.score(run.label, [scored.name for family in shown.values() for scored in family], column.metric)


def fidelity_tables(group: Group) -> str:
    """Closeness to the reference, methods by conditions; nothing where no reference was given."""
    tables = ""
    for metric in FIDELITY[group.kind]:
        names = [
            (title, parts)
            for title, parts in test_groups(group.done)
            if any(group.score(run.label, parts, metric).mean is not None for run in group.done)
        ]
        if names:
            scores = [[group.score(run.label, parts, metric) for _, parts in names] for run in group.done]
            heads = [escape(title) for title, _ in names]
            title = f"{METRICS[metric].title}: {METRICS[metric].meaning}"
            tables += _matrix(group, title, heads, scores, [None] * len(names), better_high=metric == "agreement")
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in reference_notes(group.done))
    return notes + tables


def between_table(group: Group) -> str:
    """How far the methods' predictions on clean rows lie from each other, seed by seed, then averaged."""
    style = styles(group.runs)
    scores = [[_between(group, one.label, other.label) for other in group.done] for one in group.done]
    heads = [f"{swatch(style[run.label])}{escape(run.label)}" for run in group.done]
    title = {
        "classification": "Between methods: total variation distance of their probabilities on clean rows, 0 to 1",
        "regression": "Between methods: mean distance of their predictions on clean rows, in the target's units",
    }[group.kind]
    return _matrix(group, title, heads, scores, [style[run.label].index for run in group.done], better_high=False)


def _between(group: Group, one: str, other: str) -> Score:
    if one == other:
        return NOTHING
    found: list[float | None] = []
    for seed, run in group.cells[one].items():
        theirs = group.cells[other].get(seed)
        if theirs is None or run.clean is None or theirs.clean is None:
            continue
        ours, others = matched(run.clean, theirs.clean)
        key, half = ("probs", 0.5) if group.kind == "classification" else ("mean", 1.0)
        apart = np.abs(ours[key].astype(np.float64) - others[key].astype(np.float64)).reshape(len(ours[key]), -1)
        found.append(float(half * apart.sum(1).mean()))
    return over_seeds(found)


def _matrix(
    group: Group,
    title: str,
    heads: Sequence[str],
    scores: Sequence[Sequence[Score]],
    columns: Sequence[int | None],
    *,
    better_high: bool,
) -> str:
    """Methods down, `heads` across; the stronger the colour, the nearer. A column that is a method hides with it."""
    style = styles(group.runs)
    every = [score for row in scores for score in row]
    # distances between methods can be compared across columns, data sets cannot
    shaded = [[row[i] for row in scores] if owner is None else every for i, owner in enumerate(columns)]
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
            near = 0.0 if score.mean is None else share if better_high else 1 - share
            error = "" if score.stderr is None else f' <span class="stderr">±{format_error(score.stderr)}</span>'
            cells += f'<td style="--near:{near:.3f}"{owner[i]}>{format_number(score.mean)}{error}</td>'
        name = f'<th scope="row">{swatch(style[run.label])}{escape(run.label)}</th>'
        rows += f'<tr data-run="{style[run.label].index}">{name}{cells}</tr>'
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(title)}"><table class="matrix">'
        f"<caption><span>{escape(title)}. The stronger the colour, the nearer.</span></caption>"
        f'<thead><tr><th scope="col">Method</th>{top}</tr></thead><tbody>{rows}</tbody></table></div>'
    )
