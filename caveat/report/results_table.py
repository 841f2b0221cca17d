"""The results table as HTML: groups of columns, heads that sort (page.js does it), the best values in bold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

from caveat.report.drawing import Style
from caveat.report.markup import breakable, swatch
from caveat.report.runs import Score
from caveat.report.tables import METRICS, Column, format_error, format_mean

__all__ = ["Line", "results_table"]


@dataclass(frozen=True)
class Line:
    """One row of the table; `note` stands below the label, `best` are the columns to be marked."""

    label: str
    style: Style
    scores: Sequence[Score]
    best: set[int]
    note: str = ""
    set_index: int | None = None  # of the data set that page.js can hide


def results_table(columns: Sequence[Column], lines: Sequence[Line], first: str, caption: str) -> str:
    """The table; `first` heads the column of labels."""
    groups = "".join(
        f'<th scope="colgroup" class="start" colspan="{len(list(inside))}">{escape(group)}</th>'
        for group, inside in groupby(columns, key=lambda column: column.group)
    )
    before = [None, *(column.group for column in columns)]
    start = [" start" if column.group != before[i] else "" for i, column in enumerate(columns)]
    heads = "".join(
        f'<th scope="col" class="{start[i]}" data-key="{escape(column.key)}" aria-sort="none"><button type="button" '
        f'title="{escape(METRICS[column.metric].meaning)}">{escape(METRICS[column.metric].title)}</button></th>'
        for i, column in enumerate(columns)
    )
    rows = ""
    for number, entry in enumerate(lines):
        shown = enumerate(zip(columns, entry.scores, strict=True))
        cells = "".join(_cell(column.metric, score, i in entry.best, start[i]) for i, (column, score) in shown)
        note = f'<span class="quiet note-line">{escape(entry.note)}</span>' if entry.note else ""
        name = f'<th scope="row" data-loss="{number}">{swatch(entry.style)}{breakable(entry.label)}{note}</th>'
        where = "" if entry.set_index is None else f' data-set="{entry.set_index}"'
        rows += f'<tr data-run="{entry.style.index}"{where}>{name}{cells}</tr>'
    corner = (
        f'<th scope="col" data-key="order" aria-sort="none"><button type="button" title="the first order">{first}'
        "</button></th>"
    )
    head = f"<thead><tr><td></td>{groups}</tr><tr>{corner}{heads}</tr></thead>"
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Results table, scrolls sideways">'
        f'<table class="results" id="table"><caption><span>{escape(caption)}</span></caption>{head}'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _cell(metric: str, score: Score, best: bool, start: str) -> str:
    loss = "" if score.mean is None else METRICS[metric].loss(score.mean)
    error = "" if score.stderr is None else f' <span class="stderr">±{_error(metric, score.stderr)}</span>'
    mark = '<span class="hidden"> (best)</span>' if best else ""
    name = f"{'best' if best else ''}{start}"
    return f'<td class="{name}" data-loss="{loss}">{format_mean(metric, score.mean)}{mark}{error}</td>'


def _error(metric: str, error: float) -> str:
    """A standard error in the unit of its metric."""
    with_units = ("seconds", "predict_seconds_per_row", "peak_bytes", "stored_bytes", "flops", "gradient_evaluations")
    return format_mean(metric, error) if metric in with_units else format_error(error)
