"""Samples and predictions against dense float64 references of tiny networks, by any solver; what is refused."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import caveat
from caveat import SampledLaplace
from caveat.engine.linear_model import ConjugateGradients, StochasticDescent, Tuning
from tests.methods.sampled_reference import (
    EXACT,
    LIKELIHOODS,
    Dense,
    deviations,
    fitted,
    jacobian,
    normal,
    rooted,
    rows,
    trained,
)


@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_samples_have_the_exact_posterior_covariance(kind: str) -> None:
    K, alpha = 1500, 2.0
    posterior = fitted(kind, SampledLaplace(samples=K, at_once=500, precision=alpha, solver=EXACT))
    dense, z = Dense(kind, posterior), deviations(posterior)
    H = dense.M + alpha * torch.eye(dense.size, dtype=torch.float64)
    # White samples: entries of their covariance have a standard deviation of 1 / sqrt(K), the diagonal's sqrt(2 / K).
    white = z @ torch.linalg.cholesky(H)
    covariance = white.T @ white / K
    assert (covariance - torch.eye(dense.size)).abs().max() < 5.5 * (2 / K) ** 0.5
    energy = float((white**2).sum()) / K
    assert abs(energy - dense.size) < 4 * (2 * dense.size / K) ** 0.5
    mu = dense.shares(alpha)
    allowed = 3 * float((2 * mu.square().sum() / K).sqrt())
    assert abs(posterior.info.diagnostics["effective_dimension"] - float(mu.sum())) < allowed


@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_predictions_are_the_linearised_draws(kind: str) -> None:
    posterior = fitted(kind, SampledLaplace(samples=40, at_once=16, precision=2.0, prediction="samples"))
    x, _ = rows(kind, 7, seed=9)
    f, J = jacobian(posterior, x)
    wanted = f + torch.einsum("nmd,kd->knm", J, deviations(posterior))
    outputs, _ = posterior.predictor.outputs(x, 40, torch.Generator())
    torch.testing.assert_close(outputs, wanted)
    mean, covariance = posterior.moments(x)
    u = wanted - f
    torch.testing.assert_close(mean, f)
    torch.testing.assert_close(covariance, torch.einsum("knm,knl->nml", u, u) / 40)
    _, joint = posterior.moments(x, joint=True)
    torch.testing.assert_close(joint, u.flatten(1).T @ u.flatten(1) / 40)


def test_a_joint_prediction_is_the_mean_of_products() -> None:
    posterior = fitted("Categorical", SampledLaplace(samples=40, precision=1.0))
    x, y = rows("Categorical", 6, seed=3)
    together, apart = posterior.predict(x), [posterior.predict(row.unsqueeze(0)) for row in x]
    torch.testing.assert_close(together.samples, torch.cat([p.samples for p in apart], 1))  # the same functions
    f, J = jacobian(posterior, x)
    log_p = (f + torch.einsum("nmd,kd->knm", J, deviations(posterior))).log_softmax(-1)
    chosen = log_p[:, torch.arange(6), y]
    wanted = chosen.sum(1).logsumexp(0) - math.log(40)
    found = together.samples.log()[:, torch.arange(6), y].sum(1).logsumexp(0) - math.log(40)
    torch.testing.assert_close(found, wanted)


def test_probit_uses_the_samples_variance() -> None:
    posterior = fitted("Bernoulli", SampledLaplace(samples=32, precision=1.0, prediction="closed"))
    x, _ = rows("Bernoulli", 5, seed=3)
    f, J = jacobian(posterior, x)
    variance = torch.einsum("nmd,kd->knm", J, deviations(posterior)).square().mean(0)
    wanted = (f / (1 + math.pi / 8 * variance).sqrt()).sigmoid()
    torch.testing.assert_close(posterior.predict(x).probs, wanted)


def test_draws_are_the_point_and_a_sample() -> None:
    posterior = fitted("Categorical", SampledLaplace(samples=8, precision=1.0, prediction="weights"))
    x, _ = rows("Categorical", 5, seed=3)
    draws = list(posterior.sample(8))
    z, point = deviations(posterior), posterior.state["params"]
    for draw, delta in zip(draws, z, strict=True):
        moved = torch.cat([(draw[name] - point[name]).flatten() for name in posterior.network.names])
        torch.testing.assert_close(moved, delta)
    module = posterior.network.module
    pushed = torch.stack([functional_call(module, draw, (x,)).softmax(-1) for draw in draws])
    torch.testing.assert_close(posterior.predict(x, draws=8).samples, pushed)


def test_layers_of_the_same_shape_do_not_share_their_noise() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh())
    module.append(nn.Linear(20, 3)).double()
    x, y = rows("Categorical")
    optimizer = torch.optim.Adam(module.parameters(), 0.02)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
    task = caveat.Task(module, (x, y), caveat.Categorical())
    posterior = caveat.fit(task, SampledLaplace(samples=8, precision=1e6), progress=False)  # the prior, all but
    draws = list(posterior.sample(8))
    one, other = (
        torch.stack([(draw[name] - posterior.state["params"][name]).flatten() for draw in draws])
        for name in ("2.weight", "4.weight")
    )
    correlation = float(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1])
    assert abs(correlation) < 4 / one.numel() ** 0.5
    assert float(one.std()) == pytest.approx(1e-3, rel=0.05)
    between = torch.corrcoef(one)  # and samples are independent of each other
    assert (between - torch.eye(8)).abs().max() < 4.5 / one.shape[1] ** 0.5


@pytest.mark.parametrize("kind", ["Categorical", "Gaussian"])
def test_predictive_variances_are_settled_when_the_solver_stops(kind: str) -> None:
    x, _ = rows(kind, 30, seed=4)
    method = SampledLaplace(samples=32, at_once=32, precision=0.01)
    stopped = fitted(kind, method)
    twice = 2 * math.ceil(stopped.info.diagnostics["passes"])
    further = fitted(
        kind, dataclasses.replace(method, solver=ConjugateGradients(tolerance=1e-14, rest=1e-14, iterations=twice))
    )
    before, after = (p.moments(x)[1].diagonal(dim1=1, dim2=2) for p in (stopped, further))
    assert (before / after - 1).abs().max() < 0.02


@pytest.mark.parametrize(
    "solver",
    [
        StochasticDescent("reduced", batch_rows=30, tolerance=2e-2, passes=3000),
        StochasticDescent("dual", batch_rows=20, tolerance=1e-2, passes=3000),
        ConjugateGradients(rank=0),
    ],
)
def test_other_solvers_find_the_same(solver: Any) -> None:
    x, _ = rows("Categorical", 30, seed=4)
    method = SampledLaplace(samples=8, tuning=Tuning(samples=2))
    usual, other = (fitted("Categorical", dataclasses.replace(method, solver=s)) for s in (method.solver, solver))
    precisions = [p.info.diagnostics["prior_precision"] for p in (usual, other)]
    assert precisions[0] == pytest.approx(precisions[1], rel=0.05)
    before, after = (p.moments(x)[1].diagonal(dim1=1, dim2=2) for p in (usual, other))
    assert (before / after - 1).abs().mean() < 0.05


@pytest.mark.parametrize("class_axis", [1, -1])
def test_positions_of_an_output_count_as_rows(class_axis: int) -> None:
    torch.manual_seed(0)

    class Pixels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(1, 3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.convolution(x).movedim(1, class_axis)

    module = Pixels().double()
    x = normal(12, 1, 4, 3)
    y = (x[:, 0, :3, :2] > 0).long() + (x[:, 0, 1:, 1:] > 0.5).long()
    y[0, 0, 0] = -100  # left out
    likelihood = caveat.Categorical(class_axis=class_axis)
    optimizer = torch.optim.Adam(module.parameters(), 0.05)
    for _ in range(100):
        optimizer.zero_grad()
        (-likelihood.log_prob(module(x), y, {}).mean()).backward()
        optimizer.step()
    K = 1500
    for g_prior in (False, True):
        task = caveat.Task(module, (x, y), likelihood)
        method = SampledLaplace(samples=K, at_once=K, precision=1.0, solver=EXACT, g_prior=g_prior)
        posterior = caveat.fit(task, method, progress=False)
        J = jacrev(lambda own: functional_call(module, own, (x,)).movedim(class_axis, -1))(posterior.state["params"])
        J = torch.cat([J[name].flatten(4) for name in posterior.network.names], 4).flatten(0, 2)  # [n P, c, d]
        p = module(x).movedim(class_axis, -1).detach().softmax(-1).flatten(0, 2)
        B = (p.diag_embed() - p.unsqueeze(2) * p.unsqueeze(1)) * (y.flatten() != -100).double()[:, None, None]
        M = torch.einsum("nmd,nmk,nke->de", J, B, J)
        A = M.diagonal() if g_prior else torch.ones(len(M), dtype=torch.float64)
        white = deviations(posterior) @ torch.linalg.cholesky(M + A.diag())
        assert (white.T @ white / K - torch.eye(len(M))).abs().max() < 5.5 * (2 / K) ** 0.5
        assert posterior.predict(x[:2]).probs.shape == (2, 3, 2, 3)


def test_what_is_refused_and_said() -> None:
    with pytest.raises(ValueError, match="searches for nothing"):
        SampledLaplace(precision=1.0, first_precision=2.0)
    with pytest.raises(ValueError, match="measures them in other units"):
        SampledLaplace(precision="given", g_prior=True)
    with pytest.raises(ValueError, match="no closed form"):
        fitted("Poisson", SampledLaplace(samples=2, prediction="closed"))
    short = fitted(
        "Categorical", SampledLaplace(samples=2, precision=1e-4, solver=ConjugateGradients(rank=0, iterations=2))
    )
    assert any("too wide" in said for said in short.info.warnings)
    network = trained("Categorical")[0].network
    least = 64 * network.n_parameters * 8
    assert SampledLaplace().memory(network) > 3 * least
    assert SampledLaplace(at_once=64).memory(network) > SampledLaplace().memory(network)


@pytest.mark.parametrize("g_prior", [False, True])
@pytest.mark.parametrize(("row", "said"), [(50, "features of row 50 give products"), (0, "derivatives of row 0 by")])
def test_a_jacobian_that_is_not_finite_is_said(row: int, said: str, g_prior: bool) -> None:
    x, y = rows("Categorical")
    x[row] = 0
    task = caveat.Task(rooted(), (x, y), caveat.Categorical())
    with pytest.raises(ValueError, match=f"{said}.*hold NaN or infinity"):
        caveat.fit(task, SampledLaplace(samples=2, g_prior=g_prior), progress=False)


def test_a_prediction_that_is_not_finite_is_said() -> None:
    x, y = rows("Categorical")
    posterior = caveat.fit(
        caveat.Task(rooted(), (x, y), caveat.Categorical()), SampledLaplace(samples=2, precision=1.0), progress=False
    )
    x[4] = 0
    with pytest.raises(ValueError, match="derivatives at row 4 hold NaN or infinity"):
        posterior.predict(x[:6])


def test_no_rows_and_inputs_with_gradients() -> None:
    posterior = fitted("Gaussian", SampledLaplace(samples=4, precision=1.0))
    x, _ = rows("Gaussian", 5)
    assert posterior.predict(x[:0]).mean.shape == (0, 2)
    assert posterior.moments(x[:0], joint=True)[1].shape == (0, 0)
    expected = posterior.predict(x).mean
    found = posterior.predict(x.requires_grad_()).mean
    assert not found.requires_grad
    torch.testing.assert_close(found, expected)


class Scaled(nn.Linear):
    """Takes a number beside the rows."""

    def forward(self, x: Tensor, scale: Tensor | float = 1.0) -> Tensor:
        return super().forward(scale * x) * scale


def test_inputs_without_rows_may_be_made_in_inference_mode() -> None:
    x, y = rows("Gaussian", 5)
    torch.manual_seed(0)
    task = caveat.Task(Scaled(x.shape[1], y.shape[1]).double(), (x, y), caveat.Gaussian())
    start = caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=2)), progress=False)
    posterior = caveat.fit(task, SampledLaplace(samples=4, precision=1.0), start=start, progress=False)
    with torch.inference_mode():
        two = torch.tensor(2.0, dtype=torch.float64)
        found = posterior.predict((x, two), draws=4).mean
        moments = posterior.moments((x[:1], two))  # of a shape that was not seen before
    two = torch.tensor(2.0, dtype=torch.float64)
    assert torch.equal(found, posterior.predict((x, two), draws=4).mean)
    assert all(torch.equal(*both) for both in zip(moments, posterior.moments((x[:1], two)), strict=True))
