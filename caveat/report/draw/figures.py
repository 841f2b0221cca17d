"""What all plots share: one style a run, the frame of a figure, a line.

A `Plot` is a plotly figure with a title and a description in words (its alt text). Colours of text, grid and
background are left out: page.js sets them, for light and for dark. A trace's `meta` is the index of its run, by which
page.js hides and shows runs.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from caveat.report.saved import SavedRun

__all__ = [
    "BASELINE_COLOUR",
    "COLOURS",
    "LEGEND_ABOVE",
    "LINE_HEIGHT",
    "SYMBOLS",
    "Plot",
    "Style",
    "band",
    "diagonal",
    "figure",
    "graph_objects",
    "line",
    "palette_style",
    "safe",
    "styles",
]

# Eight colours at least 22 apart (CIELAB) for normal and for colour-blind eyes, that hold on white and on near-black.
BASELINE_COLOUR = "#7F6B79"
COLOURS = ("#0058D1", "#D59A00", "#068E52", "#9949A0", "#4EADFE", "#CC2700", "#C897C3")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star", "hexagon", "pentagon", "x")
DASHES = ("solid", "dash", "dot", "dashdot")
LINE_HEIGHT = 30  # pixels of one run, where each has a line; page.js takes it from the layout's `meta`
PLAIN: Mapping[str, Any] = {}
_LEGEND = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "itemclick": False, "itemdoubleclick": False}
LEGEND_ABOVE: Mapping[str, Any] = {  # the layout of a figure with a legend above it
    "showlegend": True,
    "legend": _LEGEND,
    "margin": {"l": 56, "r": 14, "t": 34, "b": 48},
}


@dataclass(frozen=True)
class Style:
    """How one run looks in every plot; runs beyond the palette differ by dash and symbol."""

    index: int
    colour: str
    dash: str
    symbol: str

    def faint(self, alpha: float) -> str:
        """The run's colour with some of the background showing through."""
        red, green, blue = (int(self.colour[start : start + 2], 16) for start in (1, 3, 5))
        return f"rgba({red},{green},{blue},{alpha})"


@dataclass(frozen=True)
class Plot:
    """A figure, its title and its description in words; `run` where it speaks of one run only."""

    title: str
    description: str
    figure: Any
    run: int | None = None


def styles(runs: Sequence[SavedRun]) -> dict[str, Style]:
    """Give each run a style that is the same everywhere; the first MAP is grey, the others share the palette."""
    by_label: dict[str, Style] = {}
    turn = 0
    for index, run in enumerate(runs):
        if run.method == "map" and all(style.colour != BASELINE_COLOUR for style in by_label.values()):
            by_label[run.label] = Style(index, BASELINE_COLOUR, DASHES[0], SYMBOLS[index % len(SYMBOLS)])
        else:
            by_label[run.label] = palette_style(index, turn)
            turn += 1
    return by_label


def palette_style(index: int, turn: int) -> Style:
    """Return the style of the run or chain at `index`, with the colour and dash whose turn it is."""
    dash = DASHES[turn // len(COLOURS) % len(DASHES)]
    return Style(index, COLOURS[turn % len(COLOURS)], dash, SYMBOLS[index % len(SYMBOLS)])


def graph_objects() -> Any:
    """Return plotly's graph objects, which are imported on first use."""
    try:
        import plotly.graph_objects
    except ImportError as error:
        raise ImportError('the HTML report draws with plotly: pip install "caveat[report]"') from error
    return plotly.graph_objects


def figure(
    traces: list[Any], x: dict[str, Any], y: dict[str, Any], height: int = 300, layout: Mapping[str, Any] = PLAIN
) -> Any:
    """Make a figure with the margins of the report; `x`, `y` and `layout` are plotly settings."""
    go = graph_objects()
    return go.Figure(
        traces,
        {
            "template": go.layout.Template(),
            "height": height,
            "margin": {"l": 56, "r": 14, "t": 10, "b": 48},
            "xaxis": x,
            "yaxis": y,
            "showlegend": False,
            **layout,
        },
    )


def safe(text: str) -> str:
    """Make text from a file harmless inside plotly's markup and hover templates."""
    return html.escape(text, quote=False).replace("%{", "%&#123;")


def line(style: Style, label: str, x: np.ndarray, y: np.ndarray, hover: str, markers: bool) -> Any:
    """Draw one run's curve through points x, y [N], where NaN leaves a gap; `hover` is a plotly template."""
    return graph_objects().Scatter(
        x=x.astype(np.float32),
        y=y.astype(np.float32),
        mode="lines+markers" if markers else "lines",
        line={"color": style.colour, "width": 2.25, "dash": style.dash},
        marker={"symbol": style.symbol, "size": 7, "color": style.colour},
        name=safe(label),
        hovertemplate=f"<b>{safe(label)}</b><br>{hover}<extra></extra>",
        meta=style.index,
    )


def band(style: Style, x: np.ndarray, means: np.ndarray, errors: np.ndarray) -> Any:
    """Shade one standard error above and below a curve; all arrays are [N]."""
    return graph_objects().Scatter(
        x=np.concatenate([x, x[::-1]]).astype(np.float32),
        y=np.concatenate([means + errors, (means - errors)[::-1]]).astype(np.float32),
        fill="toself",
        fillcolor=style.faint(0.18),
        line={"width": 0},
        hoverinfo="skip",
        mode="lines",
        meta=style.index,
        showlegend=False,
    )


def diagonal() -> Any:
    """Draw the line of perfect calibration, from (0, 0) to (1, 1)."""
    return {
        "type": "line",
        "x0": 0,
        "y0": 0,
        "x1": 1,
        "y1": 1,
        "line": {"width": 1.25, "dash": "dot"},
        "layer": "below",
    }
