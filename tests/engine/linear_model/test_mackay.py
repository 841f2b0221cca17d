"""MacKay's updates end where the exact evidence is stationary, from any start; what runs away is bounded and said."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from caveat.engine.linear_model import mackay
from caveat.engine.linear_model.conjugate_gradients import ConjugateGradients
from caveat.engine.linear_model.features import DenseFeatures, RowNoise
from caveat.engine.linear_model.mackay import (
    Hyperparameters,
    PosteriorSolution,
    Tuning,
    mean_beside_samples,
    spread,
    tune,
)
from caveat.engine.linear_model.model import LinearModel, SampleRandomness, misfit, regression_system
from caveat.engine.linear_model.solvers import Solver
from caveat.engine.linear_model.stochastic_descent import StochasticDescent

ROWS, SIZE, GROUPS = 200, 120, (40, 80)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


PHI = normal(ROWS, SIZE) / torch.arange(1, SIZE + 1).sqrt()
PARAMETERS = normal(SIZE, seed=1) * torch.cat([torch.full((40,), 0.5), torch.full((80,), 1.5)])
TARGETS = PHI @ PARAMETERS + 0.4 * normal(ROWS, seed=2)


def model(std: float = 0.4) -> LinearModel:
    noise = torch.full((1, 1), 1 / std, dtype=torch.float64).expand(ROWS, 1)
    return LinearModel(DenseFeatures(PHI, 64), RowNoise(noise), torch.ones(1, dtype=torch.float64))


def tuned(
    prior: float,
    samples: int = 8,
    groups: tuple[int, ...] | None = None,
    std: float | None = 0.4,
    solver: Solver | None = None,
    targets: Tensor = TARGETS,
    tolerance: float = 1e-3,
) -> PosteriorSolution:
    """With a known noise, or from a unit noise that is learned too."""
    own = model(std or 1.0)
    y = targets.unsqueeze(1)
    right = regression_system(own, y)
    start = Hyperparameters(torch.full((len(groups or (1,)),), prior, dtype=torch.float64), 1.0, groups)
    return tune(
        own,
        start,
        (solver or ConjugateGradients(rank=30, tolerance=1e-5)).prepare(own),
        SampleRandomness(own, samples),
        mean_beside_samples(right),
        Tuning(tolerance=tolerance),
        None if std else lambda mean: misfit(own, y, mean),
    )


def evidence(log_prior: Tensor, log_noise: Tensor, groups: tuple[int, ...] | None = None) -> Tensor:
    """The exact log evidence, from the covariance of the targets."""
    variances = spread((-log_prior).exp(), groups).expand(SIZE)
    covariance = PHI * variances @ PHI.T + (-log_noise).exp() * torch.eye(ROWS)
    return torch.distributions.MultivariateNormal(torch.zeros(ROWS).double(), covariance).log_prob(TARGETS)


def slopes(found: PosteriorSolution, noise: float, groups: tuple[int, ...] | None = None) -> tuple[Tensor, Tensor]:
    """Derivatives of the evidence by the logarithms of the prior's precisions and of the noise's."""
    point = found.hyper.prior.log().requires_grad_(), torch.tensor(math.log(noise)).double().requires_grad_()
    by_prior, by_noise = torch.autograd.grad(evidence(*point, groups), point)
    return by_prior, by_noise


def shares(found: PosteriorSolution, noise: float) -> Tensor:
    """mu / (mu + alpha) of each direction, for one prior precision."""
    mu = torch.linalg.eigvalsh(noise * PHI.T @ PHI).clamp_min(0)
    return mu / (mu + found.hyper.prior)


@pytest.mark.parametrize("samples", [1, 8, 256])
def test_the_fixed_point_is_where_the_evidence_is_stationary(samples: int) -> None:
    found = tuned(1.0, samples)
    noise = 0.4**-2
    # The derivative by log alpha is (gamma - alpha |mean|^2) / 2, and the error of gamma is all that is left of it.
    allowed = 3 * (2 * shares(found, noise).square().sum() / samples).sqrt() / 2
    assert slopes(found, noise)[0].abs() < allowed
    assert not found.warnings


def test_one_precision_a_group() -> None:
    found = tuned(1.0, 512, GROUPS)
    by_prior, _ = slopes(found, 0.4**-2, GROUPS)
    assert (by_prior.abs() < 3 * (2 * found.effective_dimension / 512).sqrt()).all()
    assert found.hyper.prior[0] > 2 * found.hyper.prior[1]  # the first group's parameters were drawn smaller
    assert (spread(found.hyper.prior, GROUPS)[[0, 39, 40]] == found.hyper.prior[[0, 0, 1]]).all()


def test_noise_is_learned_too() -> None:
    found = tuned(1.0, 256, std=None)
    by_prior, by_noise = slopes(found, found.hyper.noise)
    allowed = 3 * (2 * shares(found, found.hyper.noise).square().sum() / 256).sqrt() / 2
    assert by_prior.abs() < allowed
    assert by_noise.abs() < allowed
    assert found.hyper.noise**-0.5 == pytest.approx(0.4, rel=0.2)


@pytest.mark.parametrize("groups", [None, GROUPS])
@pytest.mark.parametrize("std", [0.4, None])
def test_all_starts_end_alike(groups: tuple[int, ...] | None, std: float | None) -> None:
    ends = [tuned(prior, groups=groups, std=std) for prior in (1.0, 1000.0)]
    for end in ends:
        assert not end.warnings
    torch.testing.assert_close(ends[0].hyper.prior, ends[1].hyper.prior, rtol=0.02, atol=0)
    assert ends[0].hyper.noise == pytest.approx(ends[1].hyper.noise, rel=0.02)
    assert len(ends[1].history) < 15


def test_other_solvers_lead_to_the_same_precision() -> None:
    wanted = float(tuned(1.0).hyper.prior)
    dual = StochasticDescent("dual", 20, tolerance=1e-3, passes=2000)
    assert float(tuned(1.0, solver=dual, tolerance=1e-2).hyper.prior) == pytest.approx(wanted, rel=0.02)


def test_mean_and_samples_are_those_of_the_precision_found() -> None:
    found = tuned(1000.0)
    own = found.hyper.model(model())
    H = own.product(torch.eye(SIZE, dtype=torch.float64))
    mean = torch.linalg.solve(H, PHI.T @ TARGETS * 0.4**-2)
    torch.testing.assert_close(found.mean, mean, rtol=1e-3, atol=1e-4)
    right = SampleRandomness(own, 8).system(own).right
    torch.testing.assert_close(found.samples, torch.linalg.solve(H, right.T).T, rtol=1e-3, atol=1e-4)


def test_warm_starts_save_products(monkeypatch: pytest.MonkeyPatch) -> None:
    warm = tuned(1000.0, tolerance=1e-2)
    solved = mackay.solve_posterior
    monkeypatch.setattr(mackay, "solve_posterior", lambda *arguments: solved(*arguments[:5]))
    cold = tuned(1000.0, tolerance=1e-2)
    assert float(warm.hyper.prior) == pytest.approx(float(cold.hyper.prior), rel=0.01)
    assert warm.vectors < 0.9 * cold.vectors


def test_a_precision_that_runs_away_is_bounded_and_said() -> None:
    unrelated = 0.1 * normal(ROWS, seed=5)  # less than the noise alone would give
    found = tuned(1.0, targets=unrelated)
    assert math.isfinite(float(found.hyper.prior))
    assert any("runs to infinity and was bounded" in said for said in found.warnings)
    exactly = tuned(1.0, targets=1e9 * TARGETS)
    assert float(exactly.hyper.prior) > 0
    assert any("runs to zero and was bounded" in said for said in exactly.warnings)


def test_unfinished_work_is_said() -> None:
    unfinished = tuned(1.0, solver=ConjugateGradients(rank=0, iterations=2))
    assert any("too wide" in said for said in unfinished.warnings)
    own = model()
    right = regression_system(own, TARGETS.unsqueeze(1))
    hyper = Hyperparameters(torch.tensor([1000.0]).double())
    prepared = ConjugateGradients().prepare(own)
    short = tune(own, hyper, prepared, SampleRandomness(own, 1), mean_beside_samples(right), Tuning(steps=2))
    assert any("had not come to rest after 2 steps" in said for said in short.warnings)


def test_too_few_samples_for_a_group_are_said() -> None:
    groups = (SIZE - 1, 1)
    phi = PHI.clone()
    phi[:, -1] *= 1e-3  # the data say nothing of the last parameter
    faint = replace(model(), features=DenseFeatures(phi))
    right = regression_system(faint, TARGETS.unsqueeze(1))
    hyper = Hyperparameters(torch.ones(2, dtype=torch.float64), 1.0, groups)
    said = []
    for seed in range(4):
        prepared = ConjugateGradients().prepare(faint)
        said += tune(faint, hyper, prepared, SampleRandomness(faint, 1, seed), mean_beside_samples(right)).warnings
    assert any("too few samples to tell the effective dimension of groups [1]" in text for text in said)
