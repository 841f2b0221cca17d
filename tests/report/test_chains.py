"""The page about chains: every section, nothing from outside, plots that a browser draws."""

import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import caveat
from caveat.engine.method import Method
from caveat.evaluate.chains import Evidence, Quantities, gather
from caveat.evaluate.diagnose import judge
from caveat.evaluate.surface import Surface
from caveat.network import Network, Params
from caveat.report.chain_plots import energy_plot, rank_plot, rhat_plot, surface_plot, trace_plot
from caveat.report.chains import write_chains
from caveat.storage import State

pytest.importorskip("plotly")
HOSTILE = "</script><script>alert(1)</script><b>%{x}"


@dataclass(frozen=True)
class Sampler(Method):
    """Stored draws, every one once, chain by chain."""

    def draws(self, state: State, network: Network, n: int, rng: torch.Generator) -> Iterator[Params]:
        for s in range(n):
            yield {name: stack.flatten(0, 1)[s] for name, stack in state["params"].items()}


def made(chains: int = 3, draws: int = 60, stats: tuple[str, ...] = ()) -> tuple[Evidence, Surface]:
    """Independent draws of a small network's weights; of the statistics only those named, or all."""
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(12, 2, generator=rng), torch.arange(12) % 2
    network = Network(nn.Linear(2, 2), caveat.Categorical())
    recorded: Params = {
        "lp": torch.randn(chains, draws, generator=rng).double(),
        "energy": torch.randn(chains, draws, generator=rng).double(),
        "acceptance_rate": torch.full((chains, draws), 0.875).double(),
        "step_size": torch.full((chains, draws), 0.0125).double(),
        "diverging": torch.zeros(chains, draws, dtype=torch.bool),
        "n_steps": torch.full((chains, draws), 34),
    }
    params = {name: torch.randn(chains, draws, *w.shape, generator=rng) for name, w in network.params().items()}
    state: State = {
        "params": params,
        "hyper": {},
        "stats": {name: value for name, value in recorded.items() if not stats or name in stats},
    }
    task = caveat.Task(nn.Linear(2, 2), (x, y), caveat.Categorical())
    info = caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=1)), progress=False).info
    posterior = caveat.Posterior(Sampler(), state, network, info)
    return gather(posterior, (x, y)), caveat.posterior_surface(posterior, (x, y), points=5)


def sections(text: str) -> list[str]:
    return re.findall(r'<section id="(\w+)"', text)


def test_the_page_has_every_section(tmp_path: Path) -> None:
    evidence, surface = made()
    diagnosis = judge(evidence)
    path = write_chains(evidence, diagnosis, tmp_path / "new" / "diagnose.html", surface=surface, title="Mine & yours")
    text = path.read_text(encoding="utf-8")
    assert sections(text) == ["summary", "numbers", "predictions", "sampler", "weights", "surface"]
    assert "<title>Mine &amp; yours</title>" in text
    assert f'<p class="best">{diagnosis.verdict.capitalize()}</p>' in text
    assert all(reason.replace(">", "&gt;") in text for reason in diagnosis.reasons)
    assert text.count('class="canvas" role="img" aria-label="') == 9
    assert text.count("data-toggle=") == 3, "one button a chain"
    rows = dict(re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', text))
    assert f"<td>{diagnosis.predictions.rhat_max:.3f}</td>" in rows["Predictions"]
    assert rows["Chain 1"].startswith("<td>0.88</td><td>0</td>")
    assert rows["Chain 1"].endswith("<td>0.0125</td><td>34</td>")


def test_the_page_reaches_for_nothing_outside(tmp_path: Path) -> None:
    evidence, surface = made()
    text = write_chains(evidence, judge(evidence), tmp_path / "page.html", surface=surface).read_text(encoding="utf-8")
    assert "://" not in text
    assert "default-src 'none'" in text
    assert text == write_chains(evidence, judge(evidence), tmp_path / "again.html", surface=surface).read_text()


def test_names_stay_text(tmp_path: Path) -> None:
    evidence, _ = made()
    named = Quantities(
        [HOSTILE] * len(evidence.predictions.names), evidence.predictions.draws, evidence.predictions.found
    )
    hostile = Evidence(HOSTILE, 12, named, evidence.log_density, evidence.weights, evidence.stats)
    text = write_chains(hostile, judge(hostile), tmp_path / "page.html", title=HOSTILE).read_text(encoding="utf-8")
    assert "<script>alert" not in text
    assert "<b>" not in text


def test_one_chain_with_little_recorded(tmp_path: Path) -> None:
    evidence, _ = made(chains=1, stats=("lp", "step_size"))
    text = write_chains(evidence, judge(evidence), tmp_path / "page.html").read_text(encoding="utf-8")
    assert sections(text) == ["summary", "numbers", "predictions", "sampler"]
    assert '<p class="best">Caution</p>' in text
    assert "E-BFMI</th>" not in text


def test_missing_plotly_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evidence, _ = made()
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(ImportError, match=r'pip install "caveat\[report\]"'):
        write_chains(evidence, judge(evidence), tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


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


@pytest.mark.browser
def test_plots_are_drawn(tmp_path: Path, rendered: Callable[[Path], str]) -> None:
    evidence, surface = made()
    text = rendered(write_chains(evidence, judge(evidence), tmp_path / "page.html", surface=surface))
    assert text.count('<div class="canvas') == 9
