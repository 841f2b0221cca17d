"""Pieces of HTML that all sections share. Whatever comes from a file passes through `escape`."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from caveat.report.drawing import Plot, Style, styles
from caveat.report.runs import Run

# The symbols of drawing.SYMBOLS as characters, in the same order.
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


def fold(title: str, note: str, body: str, is_open: bool) -> str:
    """A part that opens and closes."""
    quiet = f' <span class="quiet">{escape(note)}</span>' if note else ""
    return f"<details{' open' if is_open else ''}><summary>{escape(title)}{quiet}</summary>{body}</details>"


def draw(plots: Sequence[Plot], size: str = "") -> str:
    """Plots side by side, as many in a row as the page is wide."""
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
    """The mark of a run: its symbol in its colour."""
    return f'<i class="swatch" aria-hidden="true" style="color:{style.colour}">{CHARACTERS[style.symbol]}</i>'


def legend(runs: Sequence[Run], sets: Sequence[str] = ()) -> str:
    """One button a run that hides and shows it everywhere, and one a data set where there are several."""
    buttons = "".join(
        f'<button type="button" data-toggle="{style.index}" aria-pressed="true" title="Hide or show this run">'
        f"{swatch(style)}{escape(label)}</button>"
        for label, style in styles(runs).items()
    )
    every = '<button type="button" data-toggle-all title="Hide or show all runs">all</button>'
    bar = f'<div class="legend" role="group" aria-label="Runs: press to hide or show">{every}{buttons}'
    if len(sets) > 1:
        bar += '<span class="between" aria-hidden="true"></span>'
        bar += "".join(
            f'<button type="button" data-toggle-set="{index}" aria-pressed="true" title="Hide or show this data set">'
            f"{escape(name)}</button>"
            for index, name in enumerate(sets)
        )
    return f"{bar}</div>"


def breakable(name: str) -> str:
    """A name as HTML that may be broken at its underscores, and nowhere inside a word."""
    return escape(name).replace("_", "_<wbr>")


def plural(count: int, word: str) -> str:
    """`1 run`, `3 runs`."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"
