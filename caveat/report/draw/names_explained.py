"""What the names of a page mean: its methods and the heads of its table, one line each, folded away."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from caveat.evaluate.metrics import METRICS
from caveat.methods import built_in
from caveat.report.draw.html_pieces import fold
from caveat.report.numbers import Column
from caveat.report.saved import SavedRun

__all__ = ["method_in_words", "names_fold"]


def names_fold(runs: Sequence[SavedRun], columns: Sequence[Column]) -> str:
    """The methods of the runs, and the metrics of the table's columns."""
    methods = {name: text for run in runs if (text := method_in_words(name := run.method))}
    metrics = {METRICS[column.metric].title: METRICS[column.metric].meaning for column in columns}
    lines = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in {**methods, **metrics}.items()
    )
    return fold("What the names mean", "", f'<dl class="names">{lines}</dl>', is_open=False)


def method_in_words(name: str) -> str:
    """What a method is, in a line; nothing of a method of another package."""
    method = built_in().get(name)
    return str(method.__doc__).splitlines()[0] if method else ""
