"""A network's linear model: the rows that count, and its mean against dense float64 references."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from caveat import SampledLaplace
from caveat.engine.linear_model import ConjugateGradients, SampleRandomness
from caveat.engine.linearised.fisher_noise import LikelihoodNoise
from caveat.engine.linearised.linearised_network import NetworkModel, mode
from caveat.engine.linearised.sampler import linearise
from caveat.engine.run import Run
from tests.methods.sampled_reference import EXACT, LIKELIHOODS, Dense, fitted, information, trained


def network_model(kind: str, g_prior: bool = False, negligible: float = 0.0) -> NetworkModel:
    task, start = trained(kind)
    point, hyper = start.state["params"], start.state["hyper"]
    return linearise(task, task.network, point, hyper, Run(), g_prior=g_prior, negligible=negligible)[0]


@pytest.mark.parametrize("kind", ["Categorical", "Bernoulli", "Poisson"])
def test_rows_that_hold_little_information_are_left_out_of_the_curvature(kind: str) -> None:
    dense = Dense(kind, trained(kind)[1])
    traces = information(kind, dense.f).diagonal(dim1=1, dim2=2).sum(1)
    own, largest = network_model(kind, negligible=0.1), traces.sort(descending=True).values
    kept = own.noise.informative(0.1)
    assert kept is not None
    assert len(kept) < 0.95 * len(traces)
    assert traces[kept].sum() >= 0.9 * traces.sum() > largest[: len(kept) - 1].sum()
    assert kept.equal(kept.unique())  # in order
    M = torch.einsum("nmd,nmk,nke->de", dense.J[kept], information(kind, dense.f[kept]), dense.J[kept])
    torch.testing.assert_close(own.model.curvature(torch.eye(dense.size).double()), M)
    scaled = network_model(kind, g_prior=True, negligible=0.1)
    torch.testing.assert_close(scaled.scale, M.diagonal().rsqrt())
    posterior = fitted(kind, SampledLaplace(samples=2, precision=2.0, negligible=0.1))
    assert posterior.info.diagnostics["rows"] == len(kept)
    assert own.noise.informative(1e-6) is None, "nothing is gained by so few"


def test_all_rows_of_least_squares_count_and_those_of_a_network_that_is_sure_of_everything() -> None:
    assert network_model("HeteroscedasticGaussian", negligible=0.3).model.features.rows == 60
    outputs, targets = torch.zeros(20, 3), torch.zeros(20, dtype=torch.long)
    outputs[:, 0] = 1e4
    assert LikelihoodNoise(LIKELIHOODS["Categorical"], {}, outputs, targets).informative(0.1) is None
    with pytest.raises(ValueError, match=r"negligible=1\): must be in \[0, 1\)"):
        SampledLaplace(negligible=1)


@pytest.mark.parametrize(("g_prior", "negligible"), [(False, 0.0), (True, 0.0), (False, 0.1)])
@pytest.mark.parametrize("kind", ["Categorical", "Bernoulli", "Poisson"])
def test_the_mean_of_the_linear_model(kind: str, g_prior: bool, negligible: float) -> None:
    own = network_model(kind, g_prior, negligible)
    model = own.model.with_precision(torch.tensor([0.5], dtype=torch.float64))
    first = own.inside(own.weights)
    mean, products, found = mode(own, model, ConjugateGradients().prepare(own.model), first, resting=1e-8)
    assert found
    dense = Dense(kind, trained(kind)[1])
    theta = own.outside(mean).clone().requires_grad_()
    scale = torch.ones_like(mean) if own.scale is None else own.scale
    value = 0.25 * (theta / scale).square().sum() - dense.log_likelihood(theta)
    slope = torch.autograd.grad(value, theta)[0] * scale
    assert slope.norm() < 1e-3 * (0.5 * mean).norm()
    assert products < 100
    assert (mean - first).norm() > 0.1 * mean.norm()  # w is not it
    if not g_prior:  # rows left out of the curvature count here
        torch.testing.assert_close(mean, dense.mean(0.5, own.weights), rtol=1e-3, atol=1e-4)


def test_where_the_data_say_nothing_the_mean_is_zero() -> None:
    class Dead:
        """Features whose Jacobian is zero."""

        def blocks(self) -> Iterator[SimpleNamespace]:
            for block in own.features.blocks():
                yield SimpleNamespace(
                    index=block.index,
                    forward=lambda vectors, block=block: torch.zeros_like(block.forward(vectors)),
                    backward=lambda values, block=block: torch.zeros_like(block.backward(values)),
                )

    own = network_model("Categorical")
    prepared = ConjugateGradients().prepare(own.model)
    prepared.progress = lambda *told: None
    model = own.model.with_precision(torch.tensor([0.5], dtype=torch.float64))
    first = own.weights * 1e-150  # a step on, its square is zero in double precision
    mean, _, found = mode(replace(own, features=Dead()), model, prepared, first, resting=1e-8)
    assert found
    assert mean.norm() <= 1e-8 * first.norm()


@pytest.mark.parametrize("kind", ["Gaussian", "HeteroscedasticGaussian"])
def test_the_mean_of_least_squares(kind: str) -> None:
    own = network_model(kind)
    solve, error = own.solving(1e-2)
    assert error is None  # the noise is given, or an output
    model = own.model.with_precision(torch.tensor([0.5], dtype=torch.float64))
    _, mean = solve(model, EXACT.prepare(model), SampleRandomness(model, 1).system(model), None)
    dense = Dense(kind, trained(kind)[1])
    torch.testing.assert_close(mean, dense.mean(0.5, own.weights), rtol=1e-3, atol=1e-3)
    if kind == "Gaussian":
        targets = dense.y - dense.f + dense.J @ dense.w
        H = dense.M + 0.5 * torch.eye(dense.size, dtype=torch.float64)
        wanted = torch.linalg.solve(H, torch.einsum("nmd,nm->d", dense.J, targets) * 0.3**-2)
        torch.testing.assert_close(mean, wanted)
