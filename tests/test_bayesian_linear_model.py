"""The public linear model: against closed forms, on arrays and on products, and what it refuses."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from caveat import BayesianLinearModel
from caveat.bayesian_linear_model import LinearPosterior
from caveat.engine.linear_model import ConjugateGradients, DenseFeatures, RowBlock, Tuning

ROWS, SIZE, NOISE = 150, 80, 0.3


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


PHI = normal(ROWS, SIZE) / torch.arange(1, SIZE + 1).sqrt()
TARGETS = PHI @ normal(SIZE, seed=1) + NOISE * normal(ROWS, seed=2)
NEW = normal(20, SIZE, seed=3)


def exact(prior: float, noise: float, phi: Tensor = PHI) -> tuple[Tensor, Tensor, float]:
    """Mean, covariance and log evidence."""
    H = phi.T @ phi / noise**2 + prior * torch.eye(SIZE)
    mean = torch.linalg.solve(H, phi.T @ TARGETS / noise**2)
    covariance = phi @ phi.T / prior + noise**2 * torch.eye(ROWS)
    evidence = torch.distributions.MultivariateNormal(torch.zeros(ROWS).double(), covariance).log_prob(TARGETS)
    return mean, H.inverse(), float(evidence)


def test_given_precisions_give_the_closed_form() -> None:
    solver = ConjugateGradients(tolerance=1e-6)
    model = BayesianLinearModel(PHI, TARGETS, noise=NOISE, prior_precision=2.0, solver=solver)
    posterior = model.fit(samples=2000, tune=False)
    mean, covariance, evidence = exact(2.0, NOISE)
    torch.testing.assert_close(posterior.mean, mean, rtol=1e-4, atol=1e-4)
    prediction = posterior.predict(NEW)
    torch.testing.assert_close(prediction.mean[:, 0], NEW @ mean, rtol=1e-4, atol=1e-4)
    variances = (NEW @ covariance * NEW).sum(1)
    assert ((prediction.epistemic[:, 0] / variances) - 1).abs().max() < 4 * math.sqrt(2 / 2000)
    torch.testing.assert_close(prediction.aleatoric, torch.full((20, 1), NOISE**2, dtype=torch.float64))
    torch.testing.assert_close(prediction.variance, prediction.aleatoric + prediction.epistemic)
    assert posterior.log_evidence() == pytest.approx(evidence, abs=1e-5)
    assert posterior.noise == pytest.approx(NOISE)


def test_variances_from_64_samples_are_chi_squared_about_the_truth() -> None:
    posterior = BayesianLinearModel(PHI, TARGETS, noise=NOISE).fit(samples=64, tune=False)
    _, covariance, _ = exact(1.0, NOISE)
    basis = torch.linalg.eigh(covariance)[1].T  # independent directions
    found = (posterior.deviations @ basis.T).square().mean(0)
    ratios = found / (basis @ covariance * basis).sum(1)
    assert stats.kstest((64 * ratios).numpy(), stats.chi2(64).cdf).pvalue > 0.01


def test_tuning_finds_prior_and_noise_from_any_start() -> None:
    ends = [BayesianLinearModel(PHI, TARGETS, prior_precision=start).fit() for start in (1.0, 1000.0)]
    one, two = ends
    assert float(one.prior_precision) == pytest.approx(float(two.prior_precision), rel=0.05)
    assert one.noise == pytest.approx(NOISE, rel=0.2)
    assert one.noise == pytest.approx(two.noise, rel=0.02)
    assert one.log_evidence() == pytest.approx(two.log_evidence(), abs=0.1)
    assert one.log_evidence() > exact(1.0, 1.0)[2]
    assert 0 < one.effective_dimension < SIZE
    assert len(two.history) > 1
    assert not one.warnings


def test_the_same_seed_gives_the_same_samples() -> None:
    model = BayesianLinearModel(PHI, TARGETS, noise=NOISE)
    one, two, other = (model.fit(8, seed=seed, tune=False) for seed in (3, 3, 4))
    assert torch.equal(one.samples, two.samples)
    assert not torch.equal(one.samples, other.samples)
    more = model.fit(16, seed=3, tune=False)
    torch.testing.assert_close(more.deviations[:8], one.deviations, rtol=0.05, atol=0.01)


def test_functions_of_samples() -> None:
    posterior = BayesianLinearModel(PHI, TARGETS, noise=NOISE).fit(8, tune=False)
    functions = posterior.sample_functions(NEW)
    assert functions.shape == (8, 20, 1)
    torch.testing.assert_close(functions[:, :, 0], posterior.samples @ NEW.T)


def test_arrays_of_numpy_and_of_whole_numbers() -> None:
    posterior = BayesianLinearModel(PHI.numpy(), TARGETS.numpy(), noise=NOISE).fit(4, tune=False)
    assert posterior.predict(NEW.numpy()).mean.shape == (20, 1)
    counts = np.arange(40).reshape(20, 2)
    fitted = BayesianLinearModel(counts, counts.sum(1), noise=0.1, prior_precision=1e-6).fit(4, tune=False)
    torch.testing.assert_close(fitted.mean, torch.ones(2).double(), rtol=1e-2, atol=1e-2)
    single = BayesianLinearModel(PHI.float(), TARGETS.float()).fit(8)
    assert single.mean.dtype == torch.float32
    assert single.predict(NEW).mean.dtype == torch.float32


def test_several_outputs_a_row() -> None:
    phi, y = PHI.reshape(50, 3, SIZE), TARGETS.reshape(50, 3)
    together = BayesianLinearModel(phi, y, noise=NOISE).fit(4, tune=False)
    apart = BayesianLinearModel(PHI, TARGETS, noise=NOISE).fit(4, tune=False)
    torch.testing.assert_close(together.mean, apart.mean, rtol=1e-2, atol=1e-2)
    assert together.predict(phi).mean.shape == (50, 3)
    assert together.log_evidence() == pytest.approx(apart.log_evidence(), abs=1e-2)


@pytest.mark.parametrize("given", [torch.tensor(0.3), np.float32(0.3), np.array(0.3)])
def test_one_noise_of_any_kind(given: Any) -> None:
    posterior = BayesianLinearModel(PHI, TARGETS, noise=given).fit(4, tune=False)
    assert posterior.noise == pytest.approx(NOISE)
    assert posterior.predict(NEW).aleatoric[0, 0] == pytest.approx(NOISE**2)


def test_noise_of_each_row() -> None:
    std = normal(ROWS, seed=7).exp()
    posterior = BayesianLinearModel(PHI, TARGETS, noise=std).fit(4, tune=False)
    W = PHI / std.unsqueeze(1)
    expected = torch.linalg.solve(W.T @ W + torch.eye(SIZE), W.T @ (TARGETS / std))
    torch.testing.assert_close(posterior.mean, expected, rtol=1e-2, atol=1e-2)
    covariance = PHI @ PHI.T + torch.diag(std**2)
    exactly = torch.distributions.MultivariateNormal(torch.zeros(ROWS).double(), covariance).log_prob(TARGETS)
    assert posterior.log_evidence() == pytest.approx(float(exactly), abs=1e-2)
    with pytest.raises(ValueError, match=r"predict\(x, noise=...\)"):
        posterior.predict(NEW)
    assert posterior.predict(NEW, noise=std[:20]).aleatoric[3, 0] == pytest.approx(float(std[3] ** 2))


def test_groups_and_their_precisions() -> None:
    model = BayesianLinearModel(PHI, TARGETS, noise=NOISE, groups=(30, 50), prior_precision=(1.0, 5.0))
    H = PHI.T @ PHI / NOISE**2 + torch.diag(torch.cat([torch.ones(30), torch.full((50,), 5.0)]))
    posterior = model.fit(4, tune=False)
    torch.testing.assert_close(posterior.mean, torch.linalg.solve(H, PHI.T @ TARGETS / NOISE**2), rtol=1e-2, atol=1e-2)
    assert model.fit(4).prior_precision.shape == (2,)


def test_with_a_g_prior_units_do_not_matter() -> None:
    units = normal(SIZE, seed=3).exp()
    predictions = [
        BayesianLinearModel(PHI * scale, TARGETS, noise=NOISE, g_prior=g).fit(32, tune=False).predict(NEW * scale)
        for g in (True, False)
        for scale in (torch.ones(SIZE), units)
    ]
    variances = [prediction.epistemic for prediction in predictions]
    torch.testing.assert_close(variances[0], variances[1], rtol=1e-2, atol=0)
    assert ((variances[2] / variances[3]) - 1).abs().max() > 0.2


class Products:
    """Features of which only products are given."""

    size, rows, outputs, dtype, device = SIZE, ROWS, 1, torch.float64, torch.device("cpu")

    def blocks(self, order: Sequence[Tensor] | None = None) -> Iterator[RowBlock]:
        return DenseFeatures(PHI, 17).blocks(order)


def test_features_may_be_products() -> None:
    given = BayesianLinearModel(Products(), TARGETS, noise=NOISE).fit(4)
    arrays = BayesianLinearModel(PHI, TARGETS, noise=NOISE).fit(4)
    torch.testing.assert_close(given.mean, arrays.mean)
    torch.testing.assert_close(given.samples, arrays.samples)
    assert given.predict(Products()).mean.shape == (ROWS, 1)


def test_what_is_refused() -> None:
    bad = PHI.clone()
    bad[7, 2] = math.inf
    with pytest.raises(ValueError, match="features hold NaN or infinity, first in row 7"):
        BayesianLinearModel(bad, TARGETS)
    missing = TARGETS.clone()
    missing[9] = math.nan
    with pytest.raises(ValueError, match="targets hold NaN or infinity, first in row 9"):
        BayesianLinearModel(PHI, missing)
    with pytest.raises(ValueError, match=r"shape \(10,\) do not go with 150 rows"):
        BayesianLinearModel(PHI, TARGETS[:10])
    with pytest.raises(ValueError, match="one row only"):
        BayesianLinearModel(PHI[:1], TARGETS[:1])
    with pytest.raises(ValueError, match="noise=-1"):
        BayesianLinearModel(PHI, TARGETS, noise=-1.0)
    with pytest.raises(ValueError, match="prior_precision=0"):
        BayesianLinearModel(PHI, TARGETS, prior_precision=0.0)
    with pytest.raises(ValueError, match="3 parameters together, and the features 80"):
        BayesianLinearModel(PHI, TARGETS, groups=(1, 2))
    with pytest.raises(ValueError, match="give noise"):
        BayesianLinearModel(PHI, TARGETS).fit(tune=False)
    with pytest.raises(ValueError, match="samples=0"):
        BayesianLinearModel(PHI, TARGETS).fit(0)
    posterior = BayesianLinearModel(PHI, TARGETS, noise=NOISE).fit(4, tune=False)
    with pytest.raises(ValueError, match="rows of 3 features were given to a model of 80"):
        posterior.predict(PHI[:, :3])


def said(model: BayesianLinearModel, tune: bool = True) -> tuple[LinearPosterior, str]:
    """A fit that warns, and all that it says."""
    with pytest.warns(UserWarning, match="."):
        posterior = model.fit(4, tune=tune)
    return posterior, "; ".join(posterior.warnings)


def test_targets_that_say_nothing_or_fit_exactly() -> None:
    nothing, words = said(BayesianLinearModel(PHI, 0 * TARGETS))
    assert "runs to infinity and was bounded" in words
    assert nothing.mean.abs().max() == 0
    assert nothing.deviations.isfinite().all()
    exactly, words = said(BayesianLinearModel(PHI, PHI.sum(1), solver=ConjugateGradients(tolerance=1e-9)))
    assert "the noise runs to zero or infinity and was bounded" in words
    torch.testing.assert_close(exactly.mean, torch.ones(SIZE).double(), rtol=1e-2, atol=1e-2)


def test_what_is_said() -> None:
    unrelated = 0.1 * NOISE * normal(ROWS, seed=5)
    assert "runs to infinity and was bounded" in said(BayesianLinearModel(PHI, unrelated, noise=NOISE))[1]
    short = BayesianLinearModel(PHI, TARGETS, noise=NOISE, tuning=Tuning(steps=1))
    assert "had not come to rest after 1 steps" in said(short)[1]
    unfinished = BayesianLinearModel(PHI, TARGETS, noise=NOISE, solver=ConjugateGradients(rank=0, iterations=2))
    assert "too wide" in said(unfinished, tune=False)[1]
