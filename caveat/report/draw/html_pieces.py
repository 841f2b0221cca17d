"""Pieces of HTML that all sections share. Whatever comes from a file passes through `escape`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from caveat.report.draw.figures import Plot, Style, styles
from caveat.report.saved import SavedRun

__all__ = [
    "breakable",
    "fit_anchor",
    "fold",
    "legend",
    "plot_figure",
    "plot_grid",
    "scrolling",
    "section",
    "swatch",
    "toggle_button",
]

MOST_SHOWN = 5  # runs that a page begins with; the others are one press away
# The symbols of figures.SYMBOLS as characters, in the same order.
CHARACTERS = {
    "circle": "●",
    "square": "■",
    "diamond": "◆",
    "triangle-up": "▲",
    "cross": "✚",
    "star": "★",
    "hexagon": "⬢",
    "pentagon": "⬟",
    "x": "✖",
}


def section(identity: str, title: str, lead: str, body: str) -> str:
    """A titled section; one without a body is left out."""
    if not body:
        return ""
    heading = f'<h2 id="{identity}-title">{escape(title)}</h2><p class="lead">{escape(lead)}</p>'
    return f'<section id="{identity}" aria-labelledby="{identity}-title">{heading}{body}</section>'


def fold(title: str, note: str, body: str, is_open: bool, identity: str = "") -> str:
    """A part that the reader opens and closes; `note` stands beside its title, `identity` is where links lead."""
    where = f' id="{identity}"' if identity else ""
    quiet = f' <span class="quiet">{escape(note)}</span>' if note else ""
    return f"<details{where}{' open' if is_open else ''}><summary>{escape(title)}{quiet}</summary>{body}</details>"


def plot_grid(plots: Sequence[Plot], size: str = "") -> str:
    """Plots side by side, as many in a row as the page is wide; `size` is "small" or empty."""
    return f'<div class="grid {size}">{"".join(plot_figure(plot) for plot in plots)}</div>' if plots else ""


def plot_figure(plot: Plot, below: str = "") -> str:
    """One plot with its title and its description as alt text; page.js draws it. `below` is HTML under it."""
    run = "" if plot.run is None else f' data-run="{plot.run}"'
    return (
        f'<figure class="plot"{run}><figcaption>{escape(plot.title)}</figcaption>'
        f'<div class="canvas" role="img" aria-label="{escape(plot.description)}" '
        f'style="height:{plot.figure.layout.height}px">'
        f'<script type="application/json">{_json(plot.figure)}</script></div>{below}</figure>'
    )


def _json(figure: Any) -> str:
    text: str = figure.to_json(validate=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e")  # no label can end the script element


def swatch(style: Style) -> str:
    """The mark of a run, its symbol in its colour."""
    return f'<i class="swatch" aria-hidden="true" style="color:{style.colour}">{CHARACTERS[style.symbol]}</i>'


def toggle_button(style: Style, label: str, noun: str, is_shown: bool = True) -> str:
    """A button that hides and shows a run or a chain, as `noun` says, in every table and plot."""
    pressed = "true" if is_shown else "false"
    return (
        f'<button type="button" data-toggle="{style.index}" aria-pressed="{pressed}" title="Hide or show this {noun}">'
        f"{swatch(style)}{escape(label)}</button>"
    )


def legend(runs: Sequence[SavedRun], sets: Sequence[str] = ()) -> str:
    """Make the bar of buttons that hide and show runs, and data sets where there are several, everywhere."""
    first = _shown_first(runs)
    buttons = "".join(toggle_button(style, label, "run", label in first) for label, style in styles(runs).items())
    word = "all" if len(first) == len(styles(runs)) else f"all {len(styles(runs))}"
    all_runs = f'<button type="button" data-toggle-all title="Hide or show all runs">{word}</button>'
    bar = f'<div class="legend" role="group" aria-label="Runs: press to hide or show">{all_runs}{buttons}'
    if len(sets) > 1:
        bar += '<span class="between" aria-hidden="true"></span>'
        bar += "".join(
            f'<button type="button" data-toggle-set="{index}" aria-pressed="true" title="Hide or show this data set">'
            f"{escape(name)}</button>"
            for index, name in enumerate(sets)
        )
    return f"{bar}</div>"


def _shown_first(runs: Sequence[SavedRun]) -> set[str]:
    """The runs that a page begins with: all of a few, else a MAP and those with the lowest NLL on clean rows."""
    if len(runs) <= MOST_SHOWN + 1:
        return {run.label for run in runs}
    nll = {run.label: run.clean.metrics["nll"].mean for run in runs if run.clean and "nll" in run.clean.metrics}
    points = [run.label for run in runs if run.method == "map"][:1]
    ranked = sorted(runs, key=lambda run: value if (value := nll.get(run.label)) is not None else math.inf)
    return set([*points, *(run.label for run in ranked if run.label not in points)][:MOST_SHOWN])


def fit_anchor(style: Style, set_index: int | None) -> str:
    """Where the page says how a run was fitted, of the data set with this index where there are several."""
    return f"fit-{set_index or 0}-{style.index}"


def scrolling(label: str, table: str) -> str:
    """A table that scrolls sideways where the page is too narrow; `label` is what a screen reader calls it."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">{table}</div>'


def breakable(name: str) -> str:
    """A name as HTML that may be broken at its underscores, and nowhere inside a word."""
    return escape(name).replace("_", "_<wbr>")
