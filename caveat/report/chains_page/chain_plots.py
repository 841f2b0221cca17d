"""Plots of chains: traces, ranks, energies, R-hats against those of independent draws, the posterior between draws."""

from __future__ import annotations

import math

import numpy as np
import torch

from caveat.engine.chains import RHAT_THRESHOLD, rhat_null_cdf
from caveat.evaluate.diagnosis import Quantities, Surface
from caveat.report.draw import COLOURS, LEGEND_ABOVE, Plot, Style, figure, graph_objects, line, palette_style

__all__ = ["chain_style", "energy_plot", "rank_plot", "rhat_plot", "surface_plot", "trace_plot"]

MOST_POINTS = 1000  # that a trace shows
WIDE = 1000  # a largest value of so many times the smallest needs a logarithmic axis
RANK_BINS = 20  # at most, and such that a chain has 20 draws in each
RHAT_SHOWN = 1.1  # larger R-hats are counted in the last bar


def chain_style(chain: int) -> Style:
    """Return how one chain looks in every plot."""
    return palette_style(chain, chain)


def trace_plot(title: str, draws: np.ndarray) -> Plot:
    """Draw a quantity [chains, draws] against the number of the draw; chains that have mixed look like one."""
    step = math.ceil(draws.shape[1] / MOST_POINTS)
    number = np.arange(draws.shape[1])[::step]
    traces = []
    for chain, values in enumerate(draws[:, ::step]):
        curve = line(chain_style(chain), f"chain {chain}", number, values, "draw %{x}<br>%{y:.5~g}", markers=False)
        traces.append(curve.update(line={"width": 1}, opacity=0.8))
    means = ", ".join(f"{value:.4g}" for value in draws.mean(1))
    words = f"Trace of {title} over {draws.shape[1]} draws; the means of the chains are {means}."
    small = np.nanmin(draws)
    wide = small > 0 and np.nanmax(draws) > WIDE * small  # as small probabilities are
    y = {"type": "log", "exponentformat": "power", "dtick": 1} if wide else {}
    return Plot(f"{title} · trace", words, figure(traces, {"title": {"text": "Draw"}}, y))


def rank_plot(title: str, draws: np.ndarray) -> Plot:
    """Draw where each chain's draws [chains, draws] rank among all; chains that have mixed fill every bar alike."""
    chains, length = draws.shape
    ranks = draws.ravel().argsort(kind="stable").argsort(kind="stable").reshape(chains, length)
    bins = min(max(length // 20, 2), RANK_BINS)
    edges = np.linspace(0, chains * length, bins + 1)
    middles, expected = (edges[1:] + edges[:-1]) / 2, length / bins
    traces, furthest = [], 0.0
    for chain, ranks_of_chain in enumerate(ranks):
        count = np.histogram(ranks_of_chain, edges)[0]
        furthest = max(furthest, float(np.abs(count - expected).max()))
        hover = "rank about %{x:,.0f}<br>%{y} draws"
        at, counts = np.r_[0, middles, edges[-1]], np.r_[count[0], count, count[-1]]
        curve = line(chain_style(chain), f"chain {chain}", at, counts, hover, markers=False)
        traces.append(curve.update(line={"shape": "hvh", "width": 1.75}))
    level = {"type": "line", "x0": 0, "x1": chains * length, "y0": expected, "y1": expected}
    shapes = [{**level, "line": {"width": 1.25, "dash": "dot"}, "layer": "below"}]
    x, y = {"title": {"text": "Rank among all draws"}}, {"title": {"text": "Draws"}, "rangemode": "tozero"}
    words = f"Ranks of {title}: {expected:g} draws a bar were expected of each chain, the furthest is {furthest:g} off."
    return Plot(f"{title} · ranks", words, figure(traces, x, y, layout={"shapes": shapes}))


def energy_plot(energy: np.ndarray) -> Plot:
    """Draw how energies [chains, draws] are spread, and how far one draw moves them: both should be about as wide."""
    marginal = (energy - energy.mean(1, keepdims=True)).ravel()
    change = np.diff(energy, axis=1).ravel()
    low, high = np.quantile(np.concatenate([marginal, change]), [0.001, 0.999])
    edges = np.linspace(low, high, 41)
    go, middles = graph_objects(), (edges[1:] + edges[:-1]) / 2
    inside = [np.histogram(values.clip(edges[0], edges[-1]), edges)[0] / len(values) for values in (marginal, change)]
    hover = "%{x:.3~g} nats<br>%{y:.1%} of draws<extra></extra>"
    spread = go.Bar(
        x=middles,
        y=inside[0],
        marker={"color": chain_style(0).faint(0.45), "line": {"width": 0}},
        name="energy, from the chain's mean",
        hovertemplate=hover,
    )
    moved = go.Scatter(
        x=middles,
        y=inside[1],
        line={"shape": "hvh", "color": COLOURS[5], "width": 2.25},
        mode="lines",
        name="change from draw to draw",
        hovertemplate=hover,
    )
    x = {"title": {"text": "Energy, nats"}}
    y = {"title": {"text": "Share of draws"}, "tickformat": ".0~%", "rangemode": "tozero"}
    words = f"Energies have a standard deviation of {marginal.std():.3g}, changes between draws {change.std():.3g}."
    return Plot("Energy", words, figure([spread, moved], x, y, layout={"bargap": 0, **LEGEND_ABOVE}))


def rhat_plot(title: str, quantities: Quantities) -> Plot:
    """Draw all R-hats, and as a line what independent draws would give."""
    chains, draws, _ = quantities.draws.shape
    mixing = quantities.mixing()
    rhat = quantities.convergence.rhat.numpy()
    rhat = rhat[~np.isnan(rhat)]
    limit = mixing.null.limit if mixing.null else RHAT_THRESHOLD
    low = math.sqrt((draws // 2 - 1) / (draws // 2))  # the smallest that there can be
    edges = np.linspace(low, max(limit * 1.002, min(float(rhat.max()), RHAT_SHOWN), RHAT_THRESHOLD + 0.002), 46)
    middles = (edges[1:] + edges[:-1]) / 2
    share = np.histogram(rhat.clip(edges[0], edges[-1]), edges)[0] / len(rhat)
    null = np.diff(rhat_null_cdf(chains, draws, torch.from_numpy(edges)).numpy())
    hover = "R-hat %{x:.4f}<br>%{y:.1%}<extra></extra>"
    go = graph_objects()
    colour = chain_style(0).faint(0.45)
    bars = go.Bar(
        x=middles, y=share, marker={"color": colour, "line": {"width": 0}}, name="these chains", hovertemplate=hover
    )
    expected = go.Scatter(
        x=middles,
        y=null,
        line={"color": COLOURS[5], "width": 2.25},
        mode="lines",
        name="independent draws",
        hovertemplate="independent draws<br>" + hover,
    )
    upright = {"type": "line", "y0": 0, "y1": 1, "yref": "paper", "layer": "below"}
    shapes = [
        {**upright, "x0": RHAT_THRESHOLD, "x1": RHAT_THRESHOLD, "line": {"width": 1.25, "dash": "dot"}},
        {**upright, "x0": limit, "x1": limit, "line": {"width": 1.25, "dash": "dash"}},
    ]
    beyond = int((rhat > edges[-1]).sum())
    end = f" (the last bar holds {beyond:,} beyond)" if beyond else ""
    x = {"title": {"text": f"R-hat{end}"}, "tickformat": ".3~f"}
    y = {"title": {"text": "Share"}, "tickformat": ".0~%", "rangemode": "tozero"}
    above = float((rhat > RHAT_THRESHOLD).mean())
    words = (
        f"R-hat of {len(rhat):,} {title}: the largest is {rhat.max():.3f}, {above:.1%} are above {RHAT_THRESHOLD}; "
        f"99 of 100 maxima of as many independent quantities lie below {limit:.3f}."
    )
    drawn = figure([bars, expected], x, y, layout={"bargap": 0, "shapes": shapes, **LEGEND_ABOVE})
    return Plot(f"R-hat of {title}", words, drawn)


def surface_plot(surface: Surface) -> Plot:
    """Draw how far the log posterior density lies below its highest point, on the plane through three draws."""
    go = graph_objects()
    height = surface.log_density.numpy()
    drop = np.nanmax(height) - height
    depth = math.ceil(np.log10(1 + np.nanmax(drop)))
    ticks = np.array([0, *10.0 ** np.arange(depth + 1)])
    ground = go.Contour(
        x=surface.along.numpy(),
        y=surface.across.numpy(),
        z=np.log10(1 + drop),
        customdata=drop,
        colorscale="Viridis",
        reversescale=True,
        contours={"start": 0, "end": depth, "size": 0.25},
        line={"width": 0.4},
        colorbar={
            "title": {"text": "nats below the highest point", "side": "top"},
            "tickvals": np.log10(1 + ticks),
            "ticktext": [f"{tick:,.0f}" for tick in ticks],
            "orientation": "h",
            "x": 0.5,
            "y": 1.02,
            "yanchor": "bottom",
            "len": 0.6,
            "thickness": 12,
            "outlinewidth": 0,
        },
        hovertemplate="%{customdata:,.1f} nats below the top<extra></extra>",
    )
    positions = surface.positions.numpy()
    labels = [f"chain {chain}, draw {number}" for chain, number in surface.draws]
    points = go.Scatter(
        x=positions[:, 0],
        y=positions[:, 1],
        mode="markers",
        text=labels,
        marker={"size": 11, "color": "#ffffff", "line": {"width": 2, "color": "#000000"}},
        hovertemplate="%{text}<extra></extra>",
    )
    paper = {"showarrow": False, "bgcolor": "rgba(255,255,255,0.75)", "font": {"color": "#000000"}}
    away = np.where(positions[:, 1] > positions[:, 1].mean(), 18, -18)  # from the middle, where the basins are
    marks = zip(positions, away, labels, strict=True)
    notes = [{"x": a, "y": b, "yshift": shift, "text": text, **paper} for (a, b), shift, text in marks]
    x = {"title": {"text": "Distance from the first draw to the second"}, "constrain": "domain"}
    y = {"title": {"text": "At a right angle"}, "scaleanchor": "x", "constrain": "domain"}
    fall = f"it falls by up to {np.nanmax(drop):,.0f} nats"
    words = f"Log posterior density on the plane through {'; '.join(labels)}: {fall}."
    layout = {"annotations": notes, "margin": {"l": 64, "r": 20, "t": 80, "b": 52}}
    drawn = figure([ground, points], x, y, height=600, layout=layout)
    return Plot("Log posterior density on the plane through three draws", words, drawn)
