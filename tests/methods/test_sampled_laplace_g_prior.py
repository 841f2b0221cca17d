"""Weights in units of their curvature, and networks with normalisation layers, where it is the default."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import caveat
from caveat import SampledLaplace
from caveat.engine.linearised import normalisations
from tests.methods.sampled_reference import EXACT, deviations, fitted, normalised, rows


@pytest.mark.parametrize("precision", ["evidence", 0.05])
def test_the_scale_of_normalised_weights_does_not_matter_to_a_g_prior(precision: Any) -> None:
    spreads: dict[bool, list[Tensor]] = {True: [], False: []}
    for g_prior, found in spreads.items():
        for factor in (1.0, 10.0):
            task, x = normalised(factor)
            method = SampledLaplace(samples=16, precision=precision, g_prior=g_prior, solver=EXACT)
            posterior = caveat.fit(task, method, progress=False)
            found.append(posterior.moments(x)[1].diagonal(dim1=1, dim2=2))
    torch.testing.assert_close(spreads[True][0], spreads[True][1], rtol=1e-4, atol=1e-9)
    change = (spreads[False][1] / spreads[False][0]).log().abs().mean()
    assert change > 0.05


def test_a_g_prior_is_the_default_where_there_is_a_normalisation() -> None:
    task, _ = normalised(1.0)
    assert caveat.fit(task, SampledLaplace(samples=4), progress=False).info.diagnostics["g_prior"]
    assert not fitted("Categorical", SampledLaplace(samples=4, precision=1.0)).info.diagnostics["g_prior"]
    given = caveat.fit(task, SampledLaplace(samples=4, precision="given"), progress=False)
    assert not given.info.diagnostics["g_prior"]


def test_weights_without_curvature_are_left_out_by_a_g_prior() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    x, y = rows("Categorical")
    optimizer = torch.optim.Adam(module.parameters(), 0.02)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        module[0].bias[2] = -100.0  # a dead unit: 3 weights, a bias, and what reads it
    task = caveat.Task(module, (x, y), caveat.Categorical())
    posterior = caveat.fit(task, SampledLaplace(samples=8, g_prior=True), progress=False)
    assert posterior.info.diagnostics["without_curvature"] == 3 + 1 + 3
    z = deviations(posterior)
    assert (z[:, 6:9] == 0).all()
    assert (z[:, 0] != 0).all()


def test_scales_and_shifts_of_normalisation_layers_can_stay_fixed() -> None:
    task, x = normalised(1.0)
    posterior = caveat.fit(task, SampledLaplace(samples=4, normalisation_weights=False), progress=False)
    assert deviations(posterior).shape == (4, 3 * 6 + 6 + 6 * 3 + 3)
    treated = {entry["layer"]: entry["treatment"] for entry in posterior.info.coverage}
    assert treated["1"] == "fixed at the MAP"
    draw = next(posterior.sample(1))
    assert torch.equal(draw["1.weight"], posterior.state["params"]["1.weight"])
    assert not torch.equal(draw["0.weight"], posterior.state["params"]["0.weight"])
    assert posterior.predict(x).samples.shape == (4, 60, 3)


def test_a_network_named_after_its_normalisation_is_none() -> None:
    class WithoutNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.layer = nn.Parameter(torch.ones(2)), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.scale

    network = caveat.Task(WithoutNorm().double(), rows("Gaussian"), caveat.Gaussian()).network
    assert normalisations(network) == set()
    assert normalisations(normalised(1.0)[0].network) == {"1"}
