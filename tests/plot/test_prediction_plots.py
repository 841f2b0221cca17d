"""Plots for notebooks show the numbers of the predictions that they are of."""

import numpy as np
import pytest
import torch
from torch import nn

import caveat
from caveat import plot
from caveat.predictive import CategoricalPredictive, GaussianPredictive

pytest.importorskip("plotly")


def classes(rows=200, seed=0, scale=3.0):
    rng = torch.Generator().manual_seed(seed)
    return CategoricalPredictive((scale * torch.randn(5, rows, 4, generator=rng)).log_softmax(-1))


def numbers(rows=60):
    x = torch.linspace(0, 1, rows)[:, None]
    means = torch.stack([x, 2 * x])
    return x, GaussianPredictive(means, torch.full_like(means, 0.01), torch.full_like(x, 0.01))


def test_reliability_and_risk_of_several_posteriors():
    y = torch.arange(200) % 4
    both = {"one": classes(), "<b>two</b>": classes(seed=1)}
    figure = plot.reliability(both, y)
    assert [trace.name for trace in figure.data] == ["one", "&lt;b&gt;two&lt;/b&gt;"]
    counted = sum(trace.customdata.sum() for trace in figure.data[:1])
    assert counted <= 200
    figure = plot.risk_coverage(both["one"], y)
    wrong = (both["one"].label != y).float().mean().item()
    assert figure.data[0].y[-1] == pytest.approx(wrong)
    with pytest.raises(TypeError, match="this plot is of a classification, and 'prediction' is a GaussianPredictive"):
        plot.reliability(numbers()[1], y)


def test_entropy_inside_and_out():
    inside, ood = classes(), classes(scale=0.1, seed=2)
    figure = plot.entropy(inside, ood)
    bars, outline = figure.data
    assert sum(bars.y) == pytest.approx(1, abs=1e-5)
    assert np.argmax(outline.y) > np.argmax(bars.y), "near uniform, which is less sure"
    with pytest.raises(ValueError, match="entropy shows one posterior at a time, got 2"):
        plot.entropy({"a": inside, "b": inside}, ood)


def test_bands_are_the_intervals():
    x, prediction = numbers()
    figure = plot.bands(x, prediction, x, levels=(0.5, 0.9))
    wide, narrow, mean, points = figure.data
    lower, upper = prediction.interval(0.9)
    np.testing.assert_allclose(wide.y[:60], upper.flatten(), atol=1e-5)
    np.testing.assert_allclose(wide.y[60:][::-1], lower.flatten(), atol=1e-5)
    np.testing.assert_allclose(narrow.y[:60], prediction.interval(0.5)[1].flatten(), atol=1e-5)
    np.testing.assert_allclose(mean.y, 1.5 * x.flatten(), atol=1e-5)
    assert len(points.x) == 60
    with pytest.raises(ValueError, match="x has 120 numbers, the mean 60"):
        plot.bands(torch.cat([x, x], 1), prediction)
    assert len(plot.intervals(prediction, x).data[0].x) == 60


def test_chosen_weights_add_up():
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, generator=rng)
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    task = caveat.Task(network, (x, (x[:, 0] > 0).long()), caveat.Categorical())
    start = caveat.MAP(training=caveat.Training(epochs=20, learning_rate=0.05))
    chosen = caveat.fit(task, caveat.SubnetworkLaplace(weights=6, precision="evidence"), start=start, progress=False)
    (bars,) = plot.chosen_weights(chosen).data
    assert [*bars.y] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    sizes = np.array([12, 4, 8, 2])
    assert (np.array(bars.x) * sizes).sum() == pytest.approx(6)
    with pytest.raises(ValueError, match="MAP chooses no weights: this plot is for SubnetworkLaplace"):
        plot.chosen_weights(caveat.fit(task, start, progress=False))


def test_figures_suit_light_and_dark_pages():
    figure = plot.reliability(classes(), torch.arange(200) % 4)
    assert figure.layout.paper_bgcolor == figure.layout.plot_bgcolor == "rgba(0,0,0,0)"
