"""SG-MCMC as it comes, without a learning rate: closed-form posteriors, learned noise, and warnings from `fit`."""

import pytest
import torch
from torch import Tensor, nn

import caveat
from caveat import SGMCMC


def line(rows: int = 150, slope: float = 1.0, noise: float = 0.1) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 1, generator=rng)
    return x, slope * x + noise * torch.randn(rows, 1, generator=rng)


def test_the_posterior_of_linear_regression_with_small_noise() -> None:
    """At a rate of 0.03 these chains run away: the curvature is 1 / noise^2 = 400 times that of the squares."""
    noise, prior, outputs = 0.05, 2.0, 100
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(40, 3, generator=rng, dtype=torch.float64)
    x = x @ torch.tensor([[1.0, 0.5, 0.0], [0.0, 0.8, -0.4], [0.0, 0.0, 0.4]], dtype=torch.float64)
    y = (x @ x.new_tensor([1.0, -0.5, 0.3]))[:, None].expand(-1, outputs) + 0.02
    module = nn.Linear(3, outputs, bias=False).double()
    task = caveat.Task(module, (x, y), caveat.Gaussian(noise=noise), caveat.GaussianPrior(prior))
    posterior = caveat.fit(task, SGMCMC(chains=2, length=60, burn_in=500), progress=False)
    precision = x.T @ x / noise**2 + prior * torch.eye(3)
    mean = torch.linalg.solve(precision, x.T @ y[:, 0] / noise**2)
    white = (posterior.state["params"]["weight"].flatten(0, 2) - mean) @ torch.linalg.cholesky(precision)
    assert float(white.mean(0).abs().max()) < 0.05
    # 1.11 along the steepest direction, and 1 along the others.
    torch.testing.assert_close(white.T @ white / len(white), torch.eye(3, dtype=torch.float64), rtol=0, atol=0.15)
    assert all("mixed" in warning for warning in posterior.info.warnings)  # of 120 draws that are not independent
    assert 0.03 < posterior.info.diagnostics["share_of_stable_step"] < 0.2


def test_learned_noise_is_the_noise_of_the_data() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(1, 20), nn.ReLU(), nn.Linear(20, 1))
    task = caveat.Task(module, line(), caveat.Gaussian())
    state = caveat.fit(task, SGMCMC(chains=2, length=50), progress=False).state
    noise = state["params"]["hyper/log_noise"].exp()
    assert 0.085 < float(noise.mean()) < 0.125


def test_a_rate_that_noise_hides_is_said() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(1, 20), nn.ReLU(), nn.Linear(20, 1))
    task = caveat.Task(module, line(), caveat.Gaussian())
    method = SGMCMC(2, 20, 1, 30, learning_rate=0.03, momentum=0.9, batch_size=128)
    warnings = caveat.fit(task, method, progress=False).info.warnings
    assert any("worse than the marginal" in warning or "at which chains run away" in warning for warning in warnings)


def test_chains_that_have_not_mixed_are_said() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(1, 20), nn.ReLU(), nn.Linear(20, 1))
    task = caveat.Task(module, line(), caveat.Gaussian())
    info = caveat.fit(task, SGMCMC(chains=3, length=20, burn_in=20, thin=1), progress=False).info
    assert any("have not mixed: R-hat up to" in warning for warning in info.warnings)
    assert info.diagnostics["rhat_predictions"] > 1.1


def test_few_rows_get_as_many_steps_as_many_do() -> None:
    few, some, many = SGMCMC().plan(100, 128), SGMCMC().plan(2000, 128), SGMCMC().plan(50_000, 128)
    assert (few.batch, few.steps, few.burn_in, few.thin) == (100, 1, 2000, 50)
    assert (some.batch, some.steps, some.burn_in, some.thin) == (128, 16, 125, 4)
    assert (many.steps, many.burn_in, many.thin) == (391, 100, 1)
    assert SGMCMC(batch_size=10).plan(100, 128).batch == 10


def test_batchnorm_keeps_its_statistics_and_says_so() -> None:
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).double()
    task = caveat.Task(module, (x, (x[:, 0] > 0).long()), caveat.Categorical())
    posterior = caveat.fit(task, SGMCMC(1, 2, 1, 1), progress=False)
    assert any("filter response normalisation" in warning for warning in posterior.info.warnings)
    assert posterior.predict(x).samples.shape == (2, 20, 2)


def test_rows_are_augmented_only_where_it_is_asked_for_and_then_said() -> None:
    x, y = line()
    calls = []

    def shifted(rows: Tensor, rng: torch.Generator) -> Tensor:
        calls.append(len(rows))
        return rows + 0.1 * torch.randn(rows.shape, generator=rng)

    task = caveat.Task(nn.Linear(1, 1), (x, y), caveat.Gaussian(noise=0.1), augment=shifted)
    left_out = caveat.fit(task, SGMCMC(2, 2, 1, 1, batch_size=50), progress=False)
    assert not calls
    assert any("augment= is not used" in warning for warning in left_out.info.warnings)
    used = caveat.fit(task, SGMCMC(2, 2, 1, 1, batch_size=50, augment=True), progress=False)
    assert calls == [50] * 18, "three batches an epoch, of two chains; curvatures are those of the rows as they are"
    assert any("the posterior of no likelihood" in warning for warning in used.info.warnings)
    assert not torch.equal(left_out.state["params"]["weight"], used.state["params"]["weight"])
    plain = caveat.Task(nn.Linear(1, 1), (x, y), caveat.Gaussian(noise=0.1))
    with pytest.raises(ValueError, match="give the task augment="):
        caveat.fit(plain, SGMCMC(2, 2, 1, 1, batch_size=50, augment=True), progress=False)
    with pytest.raises(ValueError, match="give batch_size"):
        SGMCMC(augment=True)
