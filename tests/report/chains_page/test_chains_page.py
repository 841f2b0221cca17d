"""The page about chains: every section, nothing from outside, plots that a browser draws."""

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

import caveat
from caveat.engine.method import Method
from caveat.evaluate.diagnosis import Evidence, Quantities, Surface, gather_evidence, judge
from caveat.network import Network, Params
from caveat.report.chains_page import write_chains
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
    return gather_evidence(posterior, (x, y)), caveat.posterior_surface(posterior, (x, y), points=5)


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
        [HOSTILE] * len(evidence.predictions.names), evidence.predictions.draws, evidence.predictions.convergence
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


@pytest.mark.browser
def test_plots_are_drawn(tmp_path: Path, rendered: Callable[[Path], str]) -> None:
    evidence, surface = made()
    text = rendered(write_chains(evidence, judge(evidence), tmp_path / "page.html", surface=surface))
    assert text.count('<div class="canvas') == 9
