"""Mean-field VI against the exact mean-field optimum of a linear regression, and what it says and keeps."""

import math
import re

import pytest
import torch
from torch import Tensor, nn

import caveat
from caveat import GaussianPrior, MeanFieldVI, Training

NOISE = 0.5


def regression(d: int = 6, n: int = 60) -> tuple[Tensor, Tensor]:
    """Correlated inputs: the exact posterior is not factorised, and its variances are not the mean field's."""
    rng = torch.Generator().manual_seed(0)
    mix = torch.eye(d, dtype=torch.float64) + 0.4 * torch.randn(d, d, generator=rng, dtype=torch.float64)
    x = torch.randn(n, d, generator=rng, dtype=torch.float64) @ mix
    y = x @ torch.randn(d, 1, generator=rng, dtype=torch.float64)
    return x, y + NOISE * torch.randn(n, 1, generator=rng, dtype=torch.float64)


def optimum(x: Tensor, y: Tensor, precision: Tensor) -> tuple[Tensor, Tensor]:
    """Means and standard deviations of the best factorised Gaussian."""
    hessian = x.T @ x / NOISE**2 + torch.diag(precision)
    return torch.linalg.solve(hessian, x.T @ y / NOISE**2)[:, 0], hessian.diagonal().rsqrt()


def task(prior: GaussianPrior, module: nn.Module | None = None) -> caveat.Task:
    torch.manual_seed(0)
    module = module or nn.Sequential(nn.Linear(6, 1, bias=False))
    return caveat.Task(module.double(), regression(), caveat.Gaussian(noise=NOISE), prior)


METHOD = MeanFieldVI(
    initial_std=0.3,
    std_learning_rate=0.1,
    kl_weight=1.0,
    kl_warmup=0.0,
    training=Training(epochs=1200, learning_rate=0.1, batch_size=60),
)


@pytest.fixture(scope="module")
def fitted() -> caveat.Posterior:
    return caveat.fit(task(GaussianPrior(4.0)), METHOD, progress=False)


@pytest.mark.parametrize("initial_std", [0.003, 0.3])
def test_means_and_deviations_reach_the_exact_mean_field_optimum(initial_std: float, fitted: caveat.Posterior) -> None:
    x, y = regression()
    method = MeanFieldVI(**{**vars(METHOD), "initial_std": initial_std})
    posterior = fitted if method == METHOD else caveat.fit(task(GaussianPrior(4.0)), method, progress=False)
    mean, std = optimum(x, y, torch.full((6,), 4.0, dtype=torch.float64))
    hessian = x.T @ x / NOISE**2 + 4 * torch.eye(6)
    assert float((torch.linalg.inv(hessian).diagonal().sqrt() / std).max()) > 2, "the posterior is correlated"
    active = posterior.state["active"]
    torch.testing.assert_close(active["log_std"].exp(), std, rtol=0.06, atol=0)
    assert abs(float((active["log_std"] - std.log()).mean())) < 0.03
    torch.testing.assert_close(active["mean"], mean, rtol=0, atol=0.3 * float(std.min()))
    assert posterior.info.diagnostics["median_std_change"] == pytest.approx(
        float((active["log_std"] - math.log(initial_std)).abs().median())
    )
    # f = w x: the predictive moments in closed form.
    new = torch.randn(5, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    prediction = posterior.predict(new, draws=4000)
    torch.testing.assert_close(prediction.epistemic[:, 0], new.square() @ std.square(), rtol=0.2, atol=0)
    torch.testing.assert_close(prediction.mean[:, 0], new @ mean, rtol=0, atol=0.05)


def test_precisions_of_layers_and_of_single_weights() -> None:
    x, y = regression()
    precision = torch.tensor([1.0, 300.0, 1.0, 1e-2, 50.0, 1.0], dtype=torch.float64)
    prior = GaussianPrior({"0.weight": precision[None]})
    active = caveat.fit(task(prior), METHOD, progress=False).state["active"]
    mean, std = optimum(x, y, precision)
    torch.testing.assert_close(active["log_std"].exp(), std, rtol=0.06, atol=0)
    torch.testing.assert_close(active["mean"], mean, rtol=0, atol=0.3 * float(std.min()))


def test_a_module_that_is_one_layer() -> None:
    x, y = regression()
    few = MeanFieldVI(**{**vars(METHOD), "training": Training(epochs=400, learning_rate=0.1, batch_size=60)})
    posterior = caveat.fit(task(GaussianPrior(4.0), nn.Linear(6, 1, bias=False)), few, progress=False)
    _, std = optimum(x, y, torch.full((6,), 4.0, dtype=torch.float64))
    torch.testing.assert_close(posterior.state["active"]["log_std"].exp(), std, rtol=0.2, atol=0)
    assert next(posterior.sample(1))["weight"].shape == (1, 6)
    assert posterior.info.coverage[0]["treatment"] == "Gaussian, all weights"


def test_the_kl_weight_scales_the_prior_against_the_data() -> None:
    """At beta, the optimum is that of noise^2 beta and the same prior."""
    x, y = regression()
    method = MeanFieldVI(**{**vars(METHOD), "kl_weight": 0.25, "kl_warmup": 0.2, "initial_std": 0.03})
    active = caveat.fit(task(GaussianPrior(4.0)), method, progress=False).state["active"]
    hessian = x.T @ x / (0.25 * NOISE**2) + 4 * torch.eye(6)
    mean = torch.linalg.solve(hessian, x.T @ y / (0.25 * NOISE**2))[:, 0]
    torch.testing.assert_close(active["log_std"].exp(), hessian.diagonal().rsqrt(), rtol=0.08, atol=0)
    torch.testing.assert_close(active["mean"], mean, rtol=0, atol=0.01)


def test_draws_and_local_reparameterisation_agree_for_a_linear_layer(fitted: caveat.Posterior) -> None:
    draws = fitted
    local = caveat.Posterior(
        MeanFieldVI(**{**vars(METHOD), "prediction": "local"}), draws.state, draws.network, draws.info
    )
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    one, other = draws.predict(x, draws=3000), local.predict(x, draws=3000)
    torch.testing.assert_close(one.mean, other.mean, rtol=0, atol=0.03)
    torch.testing.assert_close(one.epistemic, other.epistemic, rtol=0.15, atol=0)
    rows = torch.corrcoef((local.predict(x[:1].expand(2, 6), draws=3000).samples[..., 0]).T)
    assert abs(float(rows[0, 1])) < 0.1, "row by row"
    rows = torch.corrcoef((draws.predict(x[:1].expand(2, 6), draws=100).samples[..., 0]).T)
    assert float(rows[0, 1]) > 0.999, "one set of weights for all rows"


def test_predictions_by_draws_are_those_of_the_weights_that_are_drawn(fitted: caveat.Posterior) -> None:
    posterior = fitted
    x = torch.randn(8, 6, dtype=torch.float64)
    outputs = torch.stack([posterior.network(draw, x) for draw in posterior.sample(3, seed=7)])
    torch.testing.assert_close(posterior.predict(x, draws=3, seed=7).mean, outputs.mean(0))


def test_deviations_that_hardly_moved_are_warned_about() -> None:
    method = MeanFieldVI(std_learning_rate=1e-6, training=Training(epochs=3))
    posterior = caveat.fit(task(GaussianPrior(4.0)), method, progress=False)
    assert any("hardly moved" in w and "std_learning_rate (now 1e-06)" in w for w in posterior.info.warnings)
    kept = caveat.fit(task(GaussianPrior(4.0)), MeanFieldVI(training=Training(epochs=0)), progress=False)
    assert not any("hardly moved" in warning for warning in kept.info.warnings)
    assert float(kept.state["active"]["log_std"].unique()) == pytest.approx(math.log(0.01))


def test_the_knobs_that_are_left_open_arrive_at_the_optimum() -> None:
    """The weight of the KL term is that of the bound, and the rate of the deviations fits the number of steps."""
    x, y = regression()
    posterior = caveat.fit(
        task(GaussianPrior(4.0)), MeanFieldVI(training=Training(epochs=300, learning_rate=0.1)), progress=False
    )
    _, std = optimum(x, y, torch.full((6,), 4.0, dtype=torch.float64))
    told = posterior.info.diagnostics
    torch.testing.assert_close(posterior.state["active"]["log_std"].exp(), std, rtol=0.15, atol=0)
    assert told["kl_weight"] == 1.0
    assert told["std_learning_rate"] == pytest.approx(20 / 300)
    assert not posterior.info.warnings
    exact = float((posterior.state["active"]["log_std"].exp() / std).square().mean())
    assert told["std_balance"] == pytest.approx(exact, rel=0.4)


def test_deviations_that_have_not_arrived_are_warned_about() -> None:
    method = MeanFieldVI(std_learning_rate=0.01, training=Training(epochs=60, learning_rate=0.1))
    posterior = caveat.fit(task(GaussianPrior(4.0)), method, progress=False)
    x, y = regression()
    _, std = optimum(x, y, torch.full((6,), 4.0, dtype=torch.float64))
    assert float((posterior.state["active"]["log_std"].exp() / std).max()) < 0.5
    (warning,) = posterior.info.warnings
    assert re.search(r"have not arrived.* std_learning_rate \(now 0\.01\)", warning)


def test_another_prior_than_a_gaussian_is_refused() -> None:
    laplace = caveat.Task(nn.Linear(6, 1).double(), regression(), caveat.Gaussian(), caveat.LaplacePrior())
    with pytest.raises(ValueError, match=r"Gaussian prior, .*LaplacePrior: use caveat\.GaussianPrior"):
        caveat.fit(laplace, MeanFieldVI(training=Training(epochs=1)), progress=False)


def test_noise_is_learned_beside_the_weights() -> None:
    x, y = regression()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 1)).double()
    few = MeanFieldVI(**{**vars(METHOD), "training": Training(epochs=400, learning_rate=0.1, batch_size=60)})
    fitted = caveat.fit(caveat.Task(module, (x, y), caveat.Gaussian(), GaussianPrior(1.0)), few, progress=False)
    design = torch.cat([x, torch.ones(60, 1, dtype=torch.float64)], 1)
    residuals = y - design @ torch.linalg.lstsq(design, y).solution
    found = float(fitted.predict(x).aleatoric[0].sqrt())
    assert found == pytest.approx(float(residuals.square().mean().sqrt()), rel=0.03)


def test_batchnorm_and_biases_are_points() -> None:
    torch.manual_seed(0)
    x = torch.randn(65, 6)
    module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    made = caveat.Task(module, (x, (x[:, 0] > 0).long()), caveat.Categorical())
    posterior = caveat.fit(made, MeanFieldVI(training=Training(epochs=20, batch_size=32)), progress=False)
    rest = posterior.state["rest"]
    assert rest.keys() == {
        "0.bias", "1.weight", "1.bias", "3.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked",
    }  # fmt: skip
    assert int(rest["1.num_batches_tracked"]) == 60, "three batches an epoch, and no other training pass"
    with torch.no_grad():
        hidden = x @ next(posterior.sample(1))["0.weight"].T + rest["0.bias"]
    torch.testing.assert_close(rest["1.running_mean"], hidden.mean(0), atol=0.3, rtol=0)
