"""The temperature that validation rows choose, against all samples at once; how often samples are read."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import caveat
from caveat import Network
from caveat.engine.linearised import covariance_temperature
from caveat.engine.linearised.covariance_temperature import TEMPERATURES, best_temperature
from caveat.engine.linearised.sample_posterior import SampleState
from caveat.engine.run import Run
from caveat.likelihoods import Likelihood
from caveat.rows import Rows
from tests.methods.sampled_reference import Held


@pytest.mark.parametrize(
    ("right", "size", "end", "words"),
    [(True, 1e5, 1e-5, "a stronger prior"), (False, 1.0, 1e3, "far too sure of them")],
)
def test_a_temperature_at_the_end_of_its_range_is_said(right: bool, size: float, end: float, words: str) -> None:
    module, run = nn.Linear(3, 3, bias=False), Run(0, progress=False)
    x, z = torch.eye(3).repeat(20, 1), size * torch.randn(16, 9, generator=torch.Generator().manual_seed(0))
    targets = x.argmax(1) if right else (x.argmax(1) + 1) % 3
    state = SampleState({"weight": 8 * torch.eye(3)}, {}, (z,))
    network = Network(module, caveat.Categorical())
    found, _ = best_temperature(network, state, Rows((x, targets)), run, closed=False, at_once=16)
    assert found == pytest.approx(end)
    assert words in run.warnings[0]


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def problem(likelihood: Likelihood, positions: int = 1) -> tuple[Network, SampleState, Rows]:
    """A linear network, 11 samples in groups of four, and 30 rows, one target of them left out where that can be."""
    module = nn.Sequential(
        nn.Linear(4, 3 * positions), nn.Unflatten(1, (3, positions)) if positions > 1 else nn.Identity()
    )
    network, x = Network(module.double(), likelihood), normal(30, 4, seed=0)
    z = 2 * normal(11, 15 * positions, seed=1)
    outputs = network(network.params(), x)
    noisy = outputs + normal(*outputs.shape, seed=2)
    if isinstance(likelihood, caveat.Categorical):
        y = noisy.argmax(1)
        y[3] = -100
    else:
        y = (noisy > 0).double() if isinstance(likelihood, caveat.Bernoulli) else noisy.clamp_min(0).round()
    hyper = likelihood.initial_hyper(y) if isinstance(likelihood, caveat.Gaussian) else {}
    return network, SampleState(network.params(), hyper, tuple(z[i : i + 4] for i in (0, 4, 8))), Rows((x, y))


def by_hand(network: Network, state: SampleState, rows: Rows, closed: bool) -> list[float]:
    """The NLL at each temperature, with the outputs of all samples for all rows."""
    (x, y), point, hyper = rows.everything(), state.params, state.hyper
    z = torch.cat(state.groups)
    sizes = [point[name].numel() for name in network.names]
    f, found = network(point, x), []
    moved = [
        {
            name: point[name] + part.view_as(point[name])
            for name, part in zip(network.names, row.split(sizes), strict=True)
        }
        for row in z
    ]
    shifts = torch.stack([network(params, x) - f for params in moved])  # the network is linear
    for t in TEMPERATURES:
        if closed:
            predictive = network.likelihood.closed_predictive(f, t * shifts.square().mean(0), hyper)
        else:
            predictive = network.likelihood.predictive(f + math.sqrt(t) * shifts, hyper)
        found.append(-float(predictive.log_prob(y).sum()) / len(x))
    return found


CASES = [  # and how many numbers are kept of a row
    (caveat.Categorical(), 1, False, len(TEMPERATURES)),
    (caveat.Categorical(), 1, True, 2 * 3),
    (caveat.Categorical(), 5, False, 5 * len(TEMPERATURES)),
    (caveat.Categorical(), 5, True, 2 * 3 * 5),
    (caveat.Bernoulli(), 1, False, 3 * len(TEMPERATURES)),
    (caveat.Gaussian(), 1, False, len(TEMPERATURES)),
    (caveat.Gaussian(), 1, True, 2 * 3),
    (caveat.Poisson(), 1, False, len(TEMPERATURES)),
]


class Read(TorchDispatchMode):
    """How many numbers of some tensors are read: views of them read none."""

    def __init__(self, of: list[Tensor]) -> None:
        super().__init__()
        self.places, self.numbers = {t.untyped_storage()._cdata for t in of}, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        if not any(t.untyped_storage()._cdata in self.places for t in made):
            given = (t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor))
            self.numbers += sum(t.numel() for t in given if t.untyped_storage()._cdata in self.places)
        return out


@pytest.mark.parametrize(("likelihood", "positions", "closed", "kept"), CASES)
@pytest.mark.parametrize("groups", [1, 3])
def test_samples_are_read_once_for_all_rows_that_memory_allows(
    likelihood: Likelihood, positions: int, closed: bool, kept: int, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, state, rows = problem(likelihood, positions)
    monkeypatch.setattr(
        "caveat.engine.linearised.jacobian_features._CPU_NUMBERS", 8 * 3 * positions * 7
    )  # blocks of a few rows
    if groups > 1:
        monkeypatch.setattr(covariance_temperature, "NUMBERS", 10 * kept)
    samples = list(state.groups)
    with Read(samples) as read:
        found, nll = best_temperature(network, state, rows, Run(0, progress=False), closed=closed, at_once=3)
    wanted = by_hand(network, state, rows, closed)
    assert found == TEMPERATURES[wanted.index(min(wanted))]
    assert nll == pytest.approx(min(wanted), rel=1e-9)
    assert read.numbers == groups * sum(z.numel() for z in samples)


@pytest.mark.parametrize(("closed", "kept"), [(False, 5 * len(TEMPERATURES)), (True, 2 * 3 * 5)])
def test_memory_does_not_grow_with_rows(closed: bool, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    network, state, rows = problem(caveat.Categorical(), 5)
    monkeypatch.setattr(covariance_temperature, "NUMBERS", 15 * kept)
    found = []
    for times in (1, 1, 3):  # the first traces the network
        several = Rows(tuple(t.repeat(times, *[1] * (t.ndim - 1)) for t in rows.everything()))  # type: ignore[arg-type]
        with Held() as held:
            best_temperature(network, state, several, Run(0, progress=False), closed=closed, at_once=3)
        found.append(held.most)
    assert (found[2] - found[1]) / 60 < 8 * 8  # bytes a row, of 15 outputs and five densities at 33 temperatures
