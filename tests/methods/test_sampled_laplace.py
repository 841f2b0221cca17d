"""Samples, the linear model's mean and the prior precision against dense float64 references of tiny networks."""

import copy
import dataclasses
import math
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import caveat
from caveat import SampledLaplace, Training
from caveat.engine import conjugate_gradients
from caveat.engine.conjugate_gradients import ConjugateGradients
from caveat.engine.likelihood_noise import LikelihoodNoise
from caveat.engine.linear_model import Draws
from caveat.engine.mackay import Tuning
from caveat.engine.network_features import NetworkBlock
from caveat.engine.network_model import NetworkModel, mode
from caveat.engine.run import Run
from caveat.engine.sampled import best_temperature, linearise, normalisations
from caveat.engine.stochastic import StochasticDescent
from caveat.rows import Rows

LIKELIHOODS = {
    "Categorical": caveat.Categorical(),
    "Bernoulli": caveat.Bernoulli(),
    "Gaussian": caveat.Gaussian(noise=0.3),
    "HeteroscedasticGaussian": caveat.HeteroscedasticGaussian(),
    "Poisson": caveat.Poisson(),
}
WIDTH = {"Categorical": 3, "Bernoulli": 2, "Gaussian": 2, "HeteroscedasticGaussian": 2, "Poisson": 1}
EXACT = ConjugateGradients(tolerance=1e-9)  # with a sketch of the whole curvature: the networks are small


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rows(kind: str, n: int = 60, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs [n, 3] and targets; multi-label for Bernoulli, two outputs for Gaussian."""
    x = normal(n, 3, seed=seed)
    signal = torch.stack([x[:, 0] + x[:, 1] ** 2 - 1, x[:, 2] - x[:, 0]], 1)
    noisy = signal + 0.3 * normal(n, 2, seed=seed + 1)
    targets = {
        "Categorical": torch.stack([noisy[:, 0], noisy[:, 1], torch.zeros(n).double()], 1).argmax(1),
        "Bernoulli": (noisy > 0).double(),
        "Gaussian": noisy,
        "HeteroscedasticGaussian": noisy[:, :1],
        "Poisson": torch.poisson((signal[:, :1] / 2).exp(), generator=torch.Generator().manual_seed(seed)),
    }
    return x, targets[kind]


@cache
def trained(kind: str) -> tuple[caveat.Task, caveat.Posterior]:
    """A task and its MAP, stopped before it has converged."""
    task = untrained(kind)
    training = Training(epochs=150, learning_rate=0.02, batch_size=60)
    return task, caveat.fit(task, caveat.MAP(training=training), progress=False)


def untrained(kind: str, validation: tuple[Tensor, Tensor] | None = None) -> caveat.Task:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, WIDTH[kind])).double()
    return caveat.Task(module, rows(kind), LIKELIHOODS[kind], caveat.GaussianPrior(1.0), validation=validation)


def fitted(kind: str, method: SampledLaplace, seed: int = 0, **options: Any) -> caveat.Posterior:
    task, start = trained(kind)
    return caveat.fit(task, method, start=start, seed=seed, progress=False, **options)


def jacobian(posterior: caveat.Posterior, x: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [n, m] and the Jacobian [n, m, d] by torch's own functions."""
    network, params = posterior.network, posterior.state["params"]
    own = {name: params[name] for name in network.names}

    def outputs(own: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(network.module, params | own, (x,)).flatten(1)

    J = jacrev(outputs)(own, x)
    return outputs(own, x), torch.cat([J[name].flatten(2) for name in own], 2)


def information(kind: str, f: Tensor) -> Tensor:
    """The Fisher information of each row's outputs, [n, m, m], from its formula."""
    if kind == "Categorical":
        p = f.softmax(1)
        return p.diag_embed() - p.unsqueeze(2) * p.unsqueeze(1)
    if kind == "Bernoulli":
        return (f.sigmoid() * (1 - f.sigmoid())).diag_embed()
    if kind == "Gaussian":
        return torch.full_like(f, 0.3**-2).diag_embed()
    if kind == "Poisson":
        return f.exp().diag_embed()
    return torch.cat([(-f[:, 1:]).exp(), torch.full_like(f[:, 1:], 0.5)], 1).diag_embed()


class Dense:
    """A network's linear model as matrices."""

    def __init__(self, kind: str, posterior: caveat.Posterior) -> None:
        self.kind = kind
        self.x, self.y = rows(kind)
        self.f, self.J = jacobian(posterior, self.x)
        self.M = torch.einsum("nmd,nmk,nke->de", self.J, information(kind, self.f), self.J)
        self.w = torch.cat([posterior.state["params"][name].flatten() for name in posterior.network.names])
        self.hyper, self.size = posterior.state["hyper"], len(self.w)

    def log_likelihood(self, theta: Tensor) -> Tensor:
        shift, likelihood = self.J @ (theta - self.w), LIKELIHOODS[self.kind]
        if self.kind != "HeteroscedasticGaussian":
            return likelihood.log_prob(self.f + shift, self.y, self.hyper).sum()
        f = self.f.detach().requires_grad_()  # to second order about f(w, x)
        slope = torch.autograd.grad(likelihood.log_prob(f, self.y, self.hyper).sum(), f)[0]
        B = information(self.kind, self.f)
        return (slope * shift).sum() - 0.5 * torch.einsum("nm,nmk,nk->", shift, B, shift)

    def mean(self, alpha: float, theta: Tensor) -> Tensor:
        """The minimum of the objective, by a quasi-Newton method of torch's."""
        theta = theta.detach().clone().requires_grad_()
        optimizer = torch.optim.LBFGS([theta], max_iter=2000, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = 0.5 * alpha * theta @ theta - self.log_likelihood(theta)
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)  # type: ignore[no-untyped-call]
        return theta.detach()

    def evidence(self, alpha: float, theta: Tensor) -> float:
        """The Laplace approximation of the log evidence at the mean."""
        H = self.M + alpha * torch.eye(self.size, dtype=torch.float64)
        prior = 0.5 * self.size * math.log(alpha) - 0.5 * alpha * theta @ theta
        return float(self.log_likelihood(theta) + prior - 0.5 * torch.linalg.slogdet(H)[1])

    def shares(self, alpha: float) -> Tensor:
        mu = torch.linalg.eigvalsh(self.M).clamp_min(0)
        return mu / (mu + alpha)


def deviations(posterior: caveat.Posterior) -> Tensor:
    return torch.cat(list(posterior.state["samples"].values()))


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
    outputs, _ = posterior.method.outputs(posterior.state, posterior.network, x, 40, torch.Generator())
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


@pytest.mark.parametrize("kind", ["Gaussian", "HeteroscedasticGaussian"])
def test_the_mean_of_least_squares(kind: str) -> None:
    own = network_model(kind)
    solve, error = own.solving(1e-2)
    assert error is None  # the noise is given, or an output
    model = own.model.with_precision(torch.tensor([0.5], dtype=torch.float64))
    _, mean = solve(model, EXACT.prepare(model), Draws(model, 1).system(model), None)
    dense = Dense(kind, trained(kind)[1])
    torch.testing.assert_close(mean, dense.mean(0.5, own.weights), rtol=1e-3, atol=1e-3)
    if kind == "Gaussian":
        targets = dense.y - dense.f + dense.J @ dense.w
        H = dense.M + 0.5 * torch.eye(dense.size, dtype=torch.float64)
        wanted = torch.linalg.solve(H, torch.einsum("nmd,nm->d", dense.J, targets) * 0.3**-2)
        torch.testing.assert_close(mean, wanted)


@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_the_precision_is_where_the_exact_evidence_is_stationary(kind: str) -> None:
    K = 64
    method = SampledLaplace(samples=4, tuning=Tuning(samples=K, tolerance=1e-3), solver=EXACT)
    posterior = fitted(kind, method)
    alpha, dense = posterior.info.diagnostics["prior_precision"], Dense(kind, posterior)
    values, step, theta = [], 0.02, dense.w
    for sign in (-1, 1):
        moved = alpha * math.exp(sign * step)
        theta = dense.mean(moved, theta)
        values.append(dense.evidence(moved, theta))
    slope = (values[1] - values[0]) / (2 * step)
    # d evidence / d log alpha = (gamma - alpha |theta|^2) / 2: the error of gamma is what is left.
    allowed = 3 * float((2 * dense.shares(alpha).square().sum() / K).sqrt()) / 2
    assert abs(slope) < allowed + 2e-3 * dense.size
    further = 3 * alpha
    gamma, mean = float(dense.shares(further).sum()), dense.mean(further, theta)
    assert abs(gamma - further * float(mean @ mean)) / 2 > allowed  # so that elsewhere the test would fail


@pytest.mark.parametrize("g_prior", [False, True])
@pytest.mark.parametrize("precision", ["evidence", "layers"])
def test_two_starts_end_alike(precision: str, g_prior: bool) -> None:
    knobs: dict[str, Any] = {"samples": 4, "precision": precision, "g_prior": g_prior}
    samples = 64 if precision == "layers" else 8  # a layer has less than one effective dimension
    method = SampledLaplace(**knobs, tuning=Tuning(samples=samples, tolerance=2e-3))
    ends = [
        fitted("Categorical", dataclasses.replace(method, first_precision=first)).info.diagnostics["prior_precision"]
        for first in (1.0, 1000.0)
    ]
    values = [torch.tensor(list(end.values()) if isinstance(end, dict) else [end]) for end in ends]
    assert len(values[0]) == (2 if precision == "layers" else 1)
    away = torch.stack(values).min(0).values > 5000  # a layer without use, to a bound or until its samples cannot tell
    assert bool(away.any()) == (precision == "layers")
    torch.testing.assert_close(values[0][~away], values[1][~away], rtol=0.05, atol=0)


def test_learned_noise_is_that_of_the_predictions_residuals() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = rows("Gaussian")
    task = caveat.Task(module, (x, 5 + 3 * y), caveat.Gaussian(standardise=True))
    training = Training(epochs=200, learning_rate=0.02, batch_size=60)
    start = caveat.fit(task, caveat.MAP(training=training), progress=False)
    method = SampledLaplace(samples=4, tuning=Tuning(samples=64, tolerance=1e-3), solver=EXACT)
    posterior = caveat.fit(task, method, start=start, progress=False)
    f, J = jacobian(posterior, x)
    before, after = start.state["hyper"]["log_noise"], posterior.state["hyper"]["log_noise"]
    beta = (2 * (before - after)).exp()
    torch.testing.assert_close(beta, beta[:1].expand(2))  # one factor for both outputs
    M = torch.einsum("nmd,m,nme->de", J, (-2 * after).exp(), J)
    mu = torch.linalg.eigvalsh(M).clamp_min(0)
    gamma = float((mu / (mu + posterior.info.diagnostics["prior_precision"])).sum())
    units = start.state["hyper"]
    residual = (5 + 3 * y - units["target_mean"]) / units["target_scale"] - f
    wanted = (y.numel() - gamma) / float((residual / before.exp()).square().sum())
    assert float(beta[0]) == pytest.approx(wanted, rel=0.03)


@cache
def normalised(factor: float) -> tuple[caveat.Task, Tensor]:
    """A network whose first layer is normalised, its weights times a factor: the same function."""
    torch.manual_seed(1)
    first, norm = nn.Linear(3, 6), nn.BatchNorm1d(6)
    module = nn.Sequential(first, norm, nn.Tanh(), nn.Linear(6, 3)).double()
    x, y = rows("Categorical")
    with torch.no_grad():
        for _ in range(60):
            module.train()(x)
    norm.eps = 1e-30  # or it would be another function at another scale
    optimizer = torch.optim.Adam(module.parameters(), 0.02)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module.eval()(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        first.weight *= factor
        first.bias *= factor
        norm.running_mean *= factor  # type: ignore[operator]
        norm.running_var *= factor**2  # type: ignore[operator]
    return caveat.Task(module, (x, y), caveat.Categorical()), x


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


def test_groups_of_any_size_give_the_same_samples() -> None:
    one = fitted("Categorical", SampledLaplace(samples=7, at_once=7, precision=1.0, solver=EXACT))
    several = fitted("Categorical", SampledLaplace(samples=7, at_once=3, precision=1.0, solver=EXACT))
    assert list(several.state["samples"]) == ["0", "3", "6"]
    torch.testing.assert_close(deviations(one), deviations(several), rtol=1e-6, atol=1e-9)


class Held(TorchDispatchMode):
    """The most bytes that tensors made meanwhile hold together."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._held = {place: held for place, held in self._held.items() if not held[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._held.values()))
        return out


def test_memory_does_not_grow_with_rows_by_their_jacobians_or_noise() -> None:
    K, few, many = 32, 40, 120
    method = SampledLaplace(
        samples=K,
        at_once=K,
        block_rows=20,
        tuning=Tuning(steps=1),
        solver=ConjugateGradients(rank=8, iterations=2),
    )
    found = []
    for n in (few, many):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        task = caveat.Task(module, rows("Categorical", n), LIKELIHOODS["Categorical"])
        start = caveat.fit(task, caveat.MAP(training=Training(epochs=10, batch_size=20)), progress=False)
        with Held() as held:
            caveat.fit(task, method, start=start, progress=False)
        found.append(held.most)
    a_row = (found[1] - found[0]) / (many - few)
    outputs_and_target = 8 * 3 + 8
    assert a_row < 2 * outputs_and_target < 8 * min(task.network.n_parameters, 3 * K) / 4


def test_samples_stay_on_disk_and_are_read_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caveat.storage._MAPPED_ABOVE", 0)
    method = SampledLaplace(samples=10, at_once=4, precision=1.0)
    posterior = fitted("Categorical", method, folder=tmp_path / "posterior")
    loaded = caveat.load(tmp_path / "posterior", nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double())
    x, _ = rows("Categorical", 5, seed=3)
    seen: list[int] = []
    forward = NetworkBlock.forward
    monkeypatch.setattr(NetworkBlock, "forward", lambda self, z: (seen.append(len(z)), forward(self, z))[1])
    assert torch.equal(loaded.predict(x).samples, posterior.predict(x).samples)
    assert max(seen) <= 4
    elsewhere = loaded.to("meta")
    assert elsewhere.state["params"]["0.weight"].is_meta
    assert not elsewhere.state["samples"]["0"].is_meta


def test_a_killed_fit_goes_on_from_its_last_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    method = SampledLaplace(samples=9, at_once=3, tuning=Tuning(samples=2))
    whole = fitted("Categorical", method)
    solve, solved = conjugate_gradients.PreparedGradients.solve, []
    sketches: list[int] = []
    sketch = conjugate_gradients.sketch
    monkeypatch.setattr(conjugate_gradients, "sketch", lambda *a: (sketches.append(1), sketch(*a))[1])

    def killed(self: Any, model: Any, system: Any, start: Any = None) -> Any:
        solved.append(len(system.right))
        if solved.count(3) == 3 and len(solved) < 1000:
            solved.extend([0] * 1000)  # once only
            raise KeyboardInterrupt
        return solve(self, model, system, start)

    monkeypatch.setattr(conjugate_gradients.PreparedGradients, "solve", killed)
    with pytest.raises(KeyboardInterrupt):
        fitted("Categorical", method, folder=tmp_path / "posterior")
    solved_before = len(solved)
    resumed = fitted("Categorical", method, folder=tmp_path / "posterior")
    assert solved[solved_before:] == [3]  # neither the precision nor the first two groups again
    assert len(sketches) == 1
    assert torch.equal(deviations(resumed), deviations(whole))
    assert resumed.info.diagnostics == whole.info.diagnostics
    assert resumed.info.gradient_evaluations == whole.info.gradient_evaluations


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


def test_a_prior_of_each_weights_own() -> None:
    task, start = trained("Categorical")
    module = copy.deepcopy(task.network.module).requires_grad_()
    precisions = {name: normal(*p.shape, seed=5).exp() for name, p in task.network.params().items()}
    own = caveat.Task(module, rows("Categorical"), caveat.Categorical(), caveat.GaussianPrior(precisions))
    K = 1500
    method = SampledLaplace(samples=K, at_once=K, precision="given", solver=EXACT)
    posterior = caveat.fit(own, method, start=start, progress=False)
    dense = Dense("Categorical", posterior)
    A = torch.cat([precisions[name].flatten() for name in own.network.names])
    white = deviations(posterior) @ torch.linalg.cholesky(dense.M + A.diag())
    assert (white.T @ white / K - torch.eye(dense.size)).abs().max() < 5.5 * (2 / K) ** 0.5


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


@pytest.mark.parametrize("precision", ["evidence", "layers"])
def test_a_precision_that_runs_away_is_bounded_and_said(precision: Any) -> None:
    task, start = trained("Gaussian")
    module = copy.deepcopy(task.network.module).requires_grad_()
    vague = caveat.Task(module, rows("Gaussian"), caveat.Gaussian(noise=100.0))
    point = dataclasses.replace(start, state=start.state | {"hyper": vague.hyper})
    method = SampledLaplace(samples=2, precision=precision, tuning=Tuning(samples=64))
    posterior = caveat.fit(vague, method, start=point, progress=False)
    found = posterior.info.diagnostics["prior_precision"]
    assert all(math.isfinite(value) for value in (found.values() if isinstance(found, dict) else [found]))
    layers = " of 0, 2" if precision == "layers" else ""
    assert any(f"precision{layers} runs to infinity and was bounded" in said for said in posterior.info.warnings)


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).abs().sqrt()  # of zero: finite, but its slope is not


@cache
def rooted() -> nn.Module:
    torch.manual_seed(0)
    module, (x, y) = Root().double(), rows("Categorical")
    optimizer = torch.optim.Adam(module.parameters(), 0.05)
    for _ in range(200):
        optimizer.zero_grad()
        nn.functional.cross_entropy((module.linear(x).abs() + 1e-3).sqrt(), y).backward()  # type: ignore[operator]
        optimizer.step()
    return module


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


def test_a_fit_killed_while_it_looks_for_the_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With learned noise, whose mean and samples are parts of one tensor."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    task = caveat.Task(module, rows("Gaussian"), caveat.Gaussian())
    start = caveat.fit(task, caveat.MAP(training=Training(epochs=100, learning_rate=0.02)), progress=False)
    method = SampledLaplace(samples=3, precision="layers", tuning=Tuning(samples=8, tolerance=1e-3))
    whole = caveat.fit(task, method, start=start, progress=False)
    monkeypatch.setattr("caveat.engine.run.Run.checkpoint_due", lambda run: run.folder is not None)
    solve, solved = conjugate_gradients.PreparedGradients.solve, []

    def killed(*args: Any) -> Any:
        solved.append(1)
        if len(solved) == 4:
            raise KeyboardInterrupt
        return solve(*args)

    monkeypatch.setattr(conjugate_gradients.PreparedGradients, "solve", killed)
    with pytest.raises(KeyboardInterrupt):
        caveat.fit(task, method, start=start, folder=tmp_path / "posterior", progress=False)
    resumed = caveat.fit(task, method, start=start, folder=tmp_path / "posterior", progress=False)
    assert len(solved) == 4 + len(whole.info.diagnostics["history"]) - 3 + 1  # the rest of the updates, the samples
    assert torch.equal(deviations(resumed), deviations(whole))
    assert torch.equal(resumed.state["hyper"]["log_noise"], whole.state["hyper"]["log_noise"])
    assert resumed.info.diagnostics == whole.info.diagnostics


def test_a_temperature_multiplies_the_covariance(tmp_path: Path) -> None:
    x, _ = rows("Categorical", 7, seed=4)
    method = SampledLaplace(samples=6, precision=0.5)
    plain = fitted("Categorical", method)
    cold = fitted("Categorical", dataclasses.replace(method, temperature=0.04))
    torch.testing.assert_close(cold.moments(x)[1], 0.04 * plain.moments(x)[1])
    f, ours = plain.moments(x)[0], cold.method.outputs(cold.state, cold.network, x, 6, torch.Generator())[0]
    theirs = plain.method.outputs(plain.state, plain.network, x, 6, torch.Generator())[0]
    torch.testing.assert_close(ours - f, 0.2 * (theirs - f))
    point = plain.state["params"]
    for one, other in zip(plain.sample(3), cold.sample(3), strict=True):
        for name in plain.network.names:
            torch.testing.assert_close(other[name] - point[name], 0.2 * (one[name] - point[name]))
    cold.save(tmp_path / "cold")
    loaded = caveat.load(tmp_path / "cold", trained("Categorical")[0].network.module)
    assert torch.equal(loaded.moments(x)[1], cold.moments(x)[1])
    assert (cold.info.diagnostics["temperature"], plain.info.diagnostics["temperature"]) == (0.04, 1.0)
    del plain.state["posterior"]  # as files were before there were temperatures
    torch.testing.assert_close(cold.moments(x)[1], 0.04 * plain.moments(x)[1])


@pytest.mark.parametrize(
    ("kind", "prediction"), [("Categorical", "auto"), ("Categorical", "closed"), ("Gaussian", "auto")]
)
def test_validation_rows_choose_the_temperature(kind: str, prediction: Any) -> None:
    task, start = trained(kind)
    x, y = rows(kind, 900, seed=8)
    method = SampledLaplace(samples=8, precision=0.02, prediction=prediction, temperature="validation")
    held_out = untrained(kind, (x, y))
    found = caveat.fit(held_out, method, start=start, progress=False).info.diagnostics
    by_hand = {
        temperature: -float(
            caveat.fit(task, dataclasses.replace(method, temperature=temperature), start=start, progress=False)
            .predict(x)
            .log_prob(y)
            .mean()
        )
        for temperature in (
            found["temperature"] * factor for factor in (1, 10**-0.25, 10**0.25, 1 / found["temperature"])
        )
    }
    assert found["validation_nll"] == pytest.approx(by_hand[found["temperature"]], rel=1e-6)
    assert min(by_hand, key=by_hand.__getitem__) == found["temperature"]
    # So weak a prior is too wide for classes; regression has a misfit that its noise is too small for.
    assert found["temperature"] > 10 if kind == "Gaussian" else found["temperature"] < 0.2


def test_a_temperature_that_cannot_be_found_is_refused_before_training() -> None:
    with pytest.raises(ValueError, match="prediction='weights' makes others"):
        SampledLaplace(temperature="validation", prediction="weights")
    task, start = untrained("Categorical"), caveat.MAP(training=Training(epochs=10**6))
    with pytest.raises(ValueError, match="temperature='validation' needs validation rows"):
        caveat.fit(task, SampledLaplace(temperature="validation"), start=start, progress=False)
    x, y = rows("Categorical")
    half = caveat.Task(nn.Linear(3, 3).bfloat16(), (x.bfloat16(), y), caveat.Categorical())
    with pytest.raises(ValueError, match="needs weights in float32 or float64"):
        caveat.fit(half, SampledLaplace(), start=start, progress=False)


@pytest.mark.parametrize(
    ("right", "size", "end", "words"),
    [(True, 1e5, 1e-5, "a stronger prior"), (False, 1.0, 1e3, "far too sure of them")],
)
def test_a_temperature_at_the_end_of_its_range_is_said(right: bool, size: float, end: float, words: str) -> None:
    mean, run = 8 * torch.eye(3).repeat(20, 1), Run(0, progress=False)
    shifts = size * torch.randn(16, 60, 3, generator=torch.Generator().manual_seed(0))
    targets = mean.argmax(1) if right else (mean.argmax(1) + 1) % 3
    found, _ = best_temperature(
        Rows((mean, targets)),
        caveat.Categorical(),
        {},
        lambda x: (mean[: len(x)], shifts[:, : len(x)]),
        run,
        closed=False,
        numbers=48,
    )
    assert found == pytest.approx(end)
    assert words in run.warnings[0]


def test_the_time_of_a_kept_fit_is_the_clocks(tmp_path: Path) -> None:
    task, start = trained("Categorical")
    clock = time.monotonic()
    method = SampledLaplace(samples=16, at_once=2)
    posterior = caveat.fit(task, method, start=start, folder=tmp_path / "kept", progress=False)
    assert 0 < posterior.info.seconds <= time.monotonic() - clock


def test_a_fault_of_validation_rows_is_said_and_no_sample_is_lost(tmp_path: Path) -> None:
    (x, y), (validation, labels) = rows("Categorical"), rows("Categorical", 20, seed=8)
    validation[7] = 0
    task = caveat.Task(rooted(), (x, y), caveat.Categorical(), validation=(validation, labels))
    method = SampledLaplace(samples=4, precision=1.0, temperature="validation")
    with pytest.raises(ValueError, match=r"validation rows 0 and on of 20 .*: .*row 7 hold NaN or infinity"):
        caveat.fit(task, method, folder=tmp_path / "kept", progress=False)
    assert list((tmp_path / "kept.partial").rglob("samples/*.safetensors"))
