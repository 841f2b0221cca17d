"""The prior precision and the noise that the evidence chooses, against the exact evidence; and one that is given."""

import copy
import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import nn

import caveat
from caveat import SampledLaplace, Training
from caveat.engine.linear_model import Tuning
from tests.methods.sampled_reference import (
    EXACT,
    LIKELIHOODS,
    Dense,
    deviations,
    fitted,
    jacobian,
    normal,
    rows,
    trained,
)


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
