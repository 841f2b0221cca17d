"""Laplace end to end: moments, predictions and draws against dense references in float64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import caveat
from caveat.engine.laplace.laplace_posterior import bridge
from tests.methods.laplace_reference import (
    LIKELIHOODS,
    assert_close,
    assert_covariance,
    at,
    data,
    fit,
    normal,
    precision,
    trained,
)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize(("structure", "n"), [("full", 4), ("full", 40), ("diagonal", 40), ("low_rank", 40)])
def test_moments_are_those_of_the_dense_posterior(likelihood: str, structure: str, n: int, dense: Any) -> None:
    task, start = trained(likelihood, n)
    posterior = fit(task, start, structure=structure, rank=60)
    covariance = precision(dense, posterior, task, structure).inverse()
    x, _ = data(likelihood, 5, seed=7)
    j = at(dense, posterior).jacobian(x)
    mean, found = posterior.moments(x)
    assert_close(mean, start.network(start.state["params"], x))
    assert_close(found, j @ covariance @ j.mT)
    mean, found = posterior.moments(x, joint=True)
    assert_close(found, j.flatten(0, 1) @ covariance @ j.flatten(0, 1).T)
    expected = {"full": "rows" if n == 4 else "full", "diagonal": "layered", "low_rank": "rows"}
    assert posterior.info.diagnostics["form"] == expected[structure]
    assert posterior.moments(x[:0])[1].shape == (0, mean.shape[1], mean.shape[1])


def test_closed_predictions_are_their_formulas(dense: Any) -> None:
    x, _ = data("Categorical", 6, seed=7)

    def closed(likelihood: str) -> tuple[Any, Tensor, Tensor, caveat.Posterior]:
        task, start = trained(likelihood)
        posterior = fit(task, start, prediction="closed")
        j = at(dense, posterior).jacobian(x)
        covariance = j @ precision(dense, posterior, task).inverse() @ j.mT
        return posterior.predict(x), posterior.moments(x)[0], covariance.diagonal(dim1=1, dim2=2), posterior

    found, mean, variance, _ = closed("Categorical")
    assert len(found.samples) == 1
    assert_close(found.probs, (mean / (1 + math.pi / 8 * variance).sqrt()).softmax(-1))
    found, mean, variance, _ = closed("Bernoulli")
    assert_close(found.probs, (mean / (1 + math.pi / 8 * variance).sqrt()).sigmoid())
    found, mean, variance, posterior = closed("Gaussian")
    hyper = posterior.state["hyper"]
    assert_close(found.mean, mean * hyper["target_scale"] + hyper["target_mean"])
    noise = (2 * hyper["log_noise"]).exp()
    assert_close(found.variance, (variance + noise) * hyper["target_scale"] ** 2)
    assert_close(found.aleatoric, (noise * hyper["target_scale"] ** 2).expand_as(found.mean))
    found, mean, variance, _ = closed("HeteroscedasticGaussian")
    assert_close(found.mean, mean[:, :1])
    assert_close(found.variance, variance[:, :1] + (mean[:, 1:] + variance[:, 1:] / 2).exp())
    assert posterior.predict(x, draws=7).samples.shape[0] == 7


@pytest.mark.parametrize("structure", ["full", "diagonal"])
@pytest.mark.parametrize("n", [4, 30])
def test_linearised_samples_are_jointly_those_of_the_moments(structure: str, n: int, dense: Any) -> None:
    task, start = trained("Categorical", n)
    posterior = fit(task, start, structure=structure)
    x, _ = data("Categorical", 3, seed=7)
    rng = torch.Generator().manual_seed(0)
    outputs, _ = posterior.predictor.outputs(x, 20_000, rng)
    j = at(dense, posterior).jacobian(x).flatten(0, 1)
    deviations = (outputs - posterior.moments(x)[0]).flatten(1)
    assert_covariance(deviations, j @ precision(dense, posterior, task, structure).inverse() @ j.T)
    again, _ = posterior.predictor.outputs(x, 5, torch.Generator().manual_seed(1))
    torch.testing.assert_close(posterior.predict(x, draws=5, seed=1).samples, again.softmax(-1))


@pytest.mark.parametrize(("structure", "n"), [("full", 4), ("full", 30), ("diagonal", 30), ("low_rank", 30)])
def test_weight_draws_have_the_dense_covariance_and_predict_by_themselves(structure: str, n: int, dense: Any) -> None:
    task, start = trained("Categorical", n)
    posterior = fit(task, start, structure=structure, rank=60, prediction="weights")
    names = posterior.network.names
    flat = torch.stack([torch.cat([d[k].flatten() for k in names]) for d in posterior.sample(1500)])
    point = torch.cat([start.state["params"][k].flatten() for k in names])
    assert_covariance(flat - point, precision(dense, posterior, task, structure).inverse())
    x, _ = data("Categorical", 5, seed=7)
    by_hand = torch.stack([posterior.network(draw, x).softmax(-1) for draw in posterior.sample(6, seed=3)])
    assert_close(posterior.predict(x, draws=6, seed=3).samples, by_hand)


def test_bridge_takes_logits_whose_sum_is_always_zero() -> None:
    half = torch.randn(5, 3, 6, generator=torch.Generator().manual_seed(0))
    half, mean = half - half.mean(1, keepdim=True), torch.tensor([[4.0, -1.0, -2.999999]]).expand(5, 3)
    noise = 1e-9 * torch.eye(3)  # what rounding may leave of the sum's variance, of either sign
    for sign in (-1, 1):
        drawn = bridge(mean, half @ half.mT / 6 + sign * noise, 500, torch.Generator().manual_seed(0))
        assert bool((drawn.exp().mean(0).argmax(-1) == 0).all())
        assert bool(drawn.isfinite().all())


def test_bridge_is_the_dirichlet_of_the_dense_covariance(dense: Any) -> None:
    task, start = trained("Categorical")
    posterior = fit(task, start, prediction="bridge", default_draws=20_000)
    x, _ = data("Categorical", 4, seed=7)
    mean, j = posterior.moments(x)[0], at(dense, posterior).jacobian(x)
    covariance = j @ precision(dense, posterior, task).inverse() @ j.mT
    alphas = []
    for mu, sigma in zip(mean, covariance, strict=True):  # conditioned on logits that sum to zero, then matched
        ones = torch.ones(3, dtype=torch.float64)
        gain = sigma @ ones / (ones @ sigma @ ones)
        mu, sigma = mu - gain * mu.sum(), sigma - torch.outer(gain, sigma @ ones)
        alphas.append((1 - 2 / 3 + mu.exp() / 9 * (-mu).exp().sum()) / sigma.diagonal())
    alpha = torch.stack(alphas)
    dirichlet = torch.distributions.Dirichlet(alpha)
    samples = posterior.predict(x).samples
    error = (dirichlet.variance / 20_000).sqrt()
    assert float(((samples.mean(0) - dirichlet.mean) / error).abs().max()) < 5
    torch.testing.assert_close(samples.var(0), dirichlet.variance, rtol=0.1, atol=0)


@pytest.mark.parametrize("structure", ["full", "kronecker", "low_rank"])
def test_linear_regression_has_its_exact_posterior(structure: str) -> None:
    n = 25
    x = normal(n, 3)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]]).double() + 0.3 + 0.4 * normal(n, 1, seed=1)
    features = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    matrix = features.T @ features / 0.4**2 + 0.7 * torch.eye(4, dtype=torch.float64)
    weights = torch.linalg.solve(matrix, features.T @ y / 0.4**2)
    module = nn.Linear(3, 1).double()
    with torch.no_grad():
        module.weight.copy_(weights[:3].T)
        module.bias.copy_(weights[3])
    task = caveat.Task(module, (x, y), caveat.Gaussian(noise=0.4), caveat.GaussianPrior(0.7))
    posterior = fit(task, structure=structure, prediction="closed")
    new = normal(8, 3, seed=2)
    at_new = torch.cat([new, torch.ones_like(new[:, :1])], 1)
    found = posterior.predict(new)
    assert_close(found.mean, at_new @ weights)
    assert_close(found.variance, (at_new @ matrix.inverse() @ at_new.T).diagonal().unsqueeze(1) + 0.4**2)
    marginal = torch.distributions.MultivariateNormal(
        torch.zeros(n, dtype=torch.float64), features @ features.T / 0.7 + 0.4**2 * torch.eye(n, dtype=torch.float64)
    )
    exact = float(marginal.log_prob(y[:, 0]))
    assert posterior.info.diagnostics["log_marginal_likelihood"] == pytest.approx(exact, rel=1e-9)
