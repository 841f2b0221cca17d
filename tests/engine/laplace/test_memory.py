"""What a Laplace approximation takes in memory: what is counted, what a decomposition really takes, and the advice."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import caveat
from caveat.engine.cost import peak_bytes, reset_peak
from caveat.engine.laplace.gaussians import FullCurvature, StackedCurvature
from caveat.engine.laplace.memory import full_bytes, structure_bytes, what_fits
from caveat.network import Network

CPU = torch.device("cpu")


class Positions(nn.Module):
    """A parameter of its own that is added, not multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(1, 50_000, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[:, : x.shape[1]]


def network(module: nn.Module) -> Network:
    return Network(module, caveat.Categorical(), caveat.GaussianPrior())


def test_only_products_have_kronecker_factors() -> None:
    """One for each row of an embedding would be 480 GB."""
    embedded = nn.Sequential(nn.Embedding(200_000, 8), Positions(), nn.Flatten(), nn.Linear(40, 2))
    grouped = nn.Conv1d(400, 400, 1, groups=400)
    for module, factors in ((embedded, 2 * (41**2 + 2**2) * 4 + 6 * 8 * 41**2), (grouped, 6 * 0)):
        own = network(module)
        assert structure_bytes(own, "kronecker") - structure_bytes(own, "diagonal") == factors
    x, y = torch.randint(200_000, (20, 5), generator=torch.Generator().manual_seed(0)), torch.arange(20) % 2
    task = caveat.Task(embedded, (x, y), caveat.Categorical())
    start = caveat.MAP(training=caveat.Training(epochs=5, learning_rate=0.1))
    posterior = caveat.fit(task, caveat.Laplace(precision="given"), start=start, progress=False)
    treatments = {entry["layer"]: entry["treatment"] for entry in posterior.info.coverage}
    assert "diagonal" in treatments["0"]
    assert "Kronecker" in treatments["3"]


def matrices(work: Callable[[], object], side: int) -> float:
    """How many float64 matrices the work takes beside those it is given."""
    reset_peak(CPU)
    before = int(re.findall(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[0]) * 1024
    work()
    return (peak_bytes(CPU) - before) / (8 * side**2)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system does not say")
def test_decompositions_take_what_is_counted() -> None:
    side = 1500
    rows = torch.randn(side, side, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ggn, prior = rows.T @ rows / side, torch.ones(side, dtype=torch.float64)
    FullCurvature(ggn[:9, :9].clone()).path(prior[:9])  # loads the library
    counted = {tuned: full_bytes(side, 10 * side, 8, tuned) / (8 * side**2) for tuned in (False, True)}
    assert matrices(lambda: FullCurvature(ggn).gaussian(prior), side) < 1.3 <= counted[False] - 1  # beside the GGN
    dual = full_bytes(side, side - 1, 8, False) / (8 * side**2)
    assert matrices(lambda: StackedCurvature(rows).gaussian(prior), side) < 2.5 < dual
    assert matrices(lambda: FullCurvature(ggn).path(prior), side) < 3.3 <= counted[True] - 1


@pytest.mark.parametrize("m", [50, 10_000])
@pytest.mark.parametrize("free", [300_000, 3_000_000, 10**9])
def test_the_advice_holds_by_the_same_estimates(free: int, m: int) -> None:
    own = network(nn.Sequential(nn.Linear(60, 60), nn.Tanh(), nn.Linear(60, 3)))
    advice = what_fits(own, own, "Laplace", m, True, free)
    for structure in ("kronecker", "diagonal"):
        assert (f"Laplace(structure='{structure}')" in advice) == (structure_bytes(own, structure) <= free)
    weights = int(re.findall(r"weights=([\d_]+)", advice)[0])
    assert full_bytes(weights, m, 4, True) <= free
    assert weights > 0.97 * own.n_parameters or full_bytes(weights + 100, m, 4, True) > free
    assert what_fits(own, own, "Laplace", m, True, 1000).startswith("try LastLayerLaplace(), or select fewer weights")
