"""Plots of chains, each from draws made by hand."""

import json
import math

import numpy as np
import pytest
import torch

from caveat.evaluate.diagnosis import Quantities, Surface
from caveat.report.chains_page.chain_plots import energy_plot, rank_plot, rhat_plot, surface_plot, trace_plot

pytest.importorskip("plotly")


def test_a_trace_shows_every_chain_and_thins_long_ones() -> None:
    draws = np.random.default_rng(0).normal(size=(3, 2500))
    plot = trace_plot("it", draws)
    assert len(plot.figure.data) == 3
    np.testing.assert_allclose(plot.figure.data[1].y, draws[1, ::3], rtol=1e-6)
    assert [trace.meta for trace in plot.figure.data] == [0, 1, 2]
    assert plot.figure.layout.yaxis.type is None
    assert trace_plot("it", np.exp(10 * draws)).figure.layout.yaxis.type == "log"


def test_ranks_are_counted_over_all_chains() -> None:
    draws = np.stack([np.arange(100), 100 + np.arange(100)])  # the second chain is above the first
    plot = rank_plot("it", draws)
    first, second = (np.asarray(trace.y)[1:-1] for trace in plot.figure.data)
    assert first.sum() == second.sum() == 100
    np.testing.assert_array_equal(first, [40, 40, 20, 0, 0])
    np.testing.assert_array_equal(second, [0, 0, 20, 40, 40])
    assert "20 draws a bar were expected of each chain, the furthest is 20 off" in plot.description


def test_energies_and_their_changes_are_shares() -> None:
    energy = np.random.default_rng(0).normal(size=(2, 500)).cumsum(1)
    plot = energy_plot(energy)
    assert [float(np.sum(trace.y)) for trace in plot.figure.data] == pytest.approx([1, 1])
    spread, change = (float(np.sqrt(np.sum(trace.y * np.square(trace.x)))) for trace in plot.figure.data)
    assert change < spread / 3


def test_r_hats_are_drawn_beside_those_of_independent_draws() -> None:
    rng = torch.Generator().manual_seed(0)
    draws = torch.randn(4, 100, 2000, generator=rng)
    plot = rhat_plot("them", Quantities.of(["it"] * 2000, draws))
    found, null = plot.figure.data
    assert float(np.sum(found.y)) == pytest.approx(1)
    assert float(np.sum(null.y)) == pytest.approx(1, abs=1e-3)
    assert float(np.abs(found.y - null.y).sum()) < 0.2, "independent draws lie on the line"
    draws[0] += 3
    plot = rhat_plot("them", Quantities.of(["it"] * 2000, draws))
    assert float(plot.figure.data[0].y[-1]) == pytest.approx(1)
    assert "the last bar holds 2,000 beyond" in plot.figure.layout.xaxis.title.text


def test_the_surface_is_drawn_below_its_top() -> None:
    grid = torch.linspace(-1, 1, 5, dtype=torch.float64)
    height = -100 * (grid[:, None].square() + grid.square())
    height[0, 0] = math.nan
    places = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    plot = surface_plot(Surface(grid, grid, height, places, ((0, 1), (1, 2), (2, 3))))
    ground, points = plot.figure.data
    np.testing.assert_allclose(ground.z[2, :], np.log10(1 + 100 * grid.numpy() ** 2))
    assert list(points.text) == ["chain 0, draw 1", "chain 1, draw 2", "chain 2, draw 3"]
    assert "falls by up to 200 nats" in plot.description
    json.loads(plot.figure.to_json())
