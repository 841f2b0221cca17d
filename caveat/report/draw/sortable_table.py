"""The results table as HTML: groups of columns, heads that sort the rows (in page.js), the best values in bold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

from caveat.evaluate.comparison import MeanAndError
from caveat.evaluate.metrics import METRICS
from caveat.report.draw.figures import Style
from caveat.report.draw.html_pieces import breakable, fit_anchor, scrolling, swatch
from caveat.report.numbers import Column

__all__ = ["TableLine", "results_table"]


@dataclass(frozen=True)
class TableLine:
    """One row of the table; `note` stands below the label, `best` are the columns to be marked."""

    label: str
    style: Style
    scores: Sequence[MeanAndError]
    best: set[int]
    note: str = ""
    set_index: int | None = None  # of the data set that page.js can hide


def results_table(columns: Sequence[Column], lines: Sequence[TableLine], first: str, caption: str) -> str:
    """The table of results; `first` is the head of the column of labels."""
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
        cells = "".join(_cell_html(column.metric, score, i in entry.best, start[i]) for i, (column, score) in shown)
        note = f'<span class="quiet note-line">{escape(entry.note)}</span>' if entry.note else ""
        link = f'<a href="#{fit_anchor(entry.style, entry.set_index)}">{breakable(entry.label)}</a>'
        name = f'<th scope="row" data-loss="{number}">{swatch(entry.style)}{link}{note}</th>'
        where = "" if entry.set_index is None else f' data-set="{entry.set_index}"'
        rows += f'<tr data-run="{entry.style.index}"{where}>{name}{cells}</tr>'
    corner = (
        f'<th scope="col" data-key="order" aria-sort="none"><button type="button" title="the first order">{first}'
        "</button></th>"
    )
    head = f"<thead><tr><td></td>{groups}</tr><tr>{corner}{heads}</tr></thead>"
    table = f'<table class="results" id="table"><caption><span>{escape(caption)}</span></caption>{head}'
    return scrolling("Results table, scrolls sideways", f"{table}<tbody>{rows}</tbody></table>")


def _cell_html(name: str, score: MeanAndError, best: bool, start: str) -> str:
    metric = METRICS[name]
    loss = "" if score.mean is None else metric.loss(score.mean)
    error = "" if score.stderr is None else f' <span class="stderr">±{metric.error_text(score.stderr)}</span>'
    mark = '<span class="hidden"> (best)</span>' if best else ""
    return f'<td class="{"best" if best else ""}{start}" data-loss="{loss}">{metric.text(score.mean)}{mark}{error}</td>'
