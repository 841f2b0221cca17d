"""MAP against closed forms: ridge regression, its noise, and a temperature that is known."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

import caveat
from caveat import GaussianPrior, Training


def regression(n: int = 80, outputs: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, generator=rng, dtype=torch.float64)
    weights = torch.randn(3, outputs, generator=rng, dtype=torch.float64)
    return x, x @ weights + 0.5 + 0.3 * torch.randn(n, outputs, generator=rng, dtype=torch.float64)


def ridge(x: torch.Tensor, y: torch.Tensor, noise: float, precision: float) -> torch.Tensor:
    """The exact MAP of a linear layer with bias, [D, d + 1]."""
    design = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
    hessian = design.T @ design / noise**2 + precision * torch.eye(design.shape[1], dtype=x.dtype)
    return torch.linalg.solve(hessian, design.T @ y / noise**2).T


@pytest.mark.parametrize(
    "training",
    [
        Training(epochs=400, optimizer="sgd", learning_rate=0.05),
        Training(epochs=600, optimizer="adam", learning_rate=0.02),
        Training(epochs=600, optimizer="sgd", learning_rate=0.02, schedule="step", clip=100.0),
        Training(epochs=400, optimizer="sgd", learning_rate=0.05, schedule="onecycle"),
    ],
    ids=lambda t: f"{t.optimizer}-{t.schedule}",
)
def test_linear_regression_reaches_the_ridge_solution(training: Training) -> None:
    torch.manual_seed(0)  # of the first weights: from some, Adam ends a little farther off
    x, y = regression()
    task = caveat.Task(nn.Linear(3, 1).double(), (x, y), caveat.Gaussian(noise=0.7), GaussianPrior(5.0))
    params = caveat.fit(task, caveat.MAP(training=dataclasses.replace(training, batch_size=80)), progress=False).state[
        "params"
    ]
    found = torch.cat([params["weight"], params["bias"][:, None]], 1)
    torch.testing.assert_close(found, ridge(x, y, 0.7, 5.0), atol=2e-4, rtol=0)


def test_per_layer_precision_is_in_the_loss() -> None:
    x, y = regression()
    prior = GaussianPrior({"weight": 1000.0, "bias": 1e-6})
    task = caveat.Task(nn.Linear(3, 1).double(), (x, y), caveat.Gaussian(noise=1.0), prior)
    training = Training(epochs=2000, optimizer="adam", learning_rate=0.02, batch_size=80)
    params = caveat.fit(task, caveat.MAP(training=training), progress=False).state["params"]
    design = torch.cat([x, torch.ones(80, 1, dtype=torch.float64)], 1)
    hessian = design.T @ design + torch.diag(torch.tensor([1000.0, 1000.0, 1000.0, 1e-6], dtype=torch.float64))
    exact = torch.linalg.solve(hessian, design.T @ y)[:, 0]
    torch.testing.assert_close(torch.cat([params["weight"][0], params["bias"]]), exact, atol=1e-4, rtol=0)


def test_a_gaussian_prior_takes_the_steps_of_weight_decay() -> None:
    """A precision of alpha in the loss of N rows is the decay alpha / N of torch's SGD, step for step."""
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(50, 4, generator=rng), torch.arange(50) % 3
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    theirs = copy.deepcopy(module)
    optimizer = torch.optim.SGD(theirs.parameters(), 0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    for _ in range(20):
        optimizer.zero_grad()
        nn.functional.cross_entropy(theirs(x), y).backward()
        optimizer.step()
    task = caveat.Task(module, (x, y), caveat.Categorical(), GaussianPrior(5e-4 * len(x)))
    training = Training(
        epochs=20, batch_size=50, optimizer="sgd", learning_rate=0.1, momentum=0.9, schedule="constant", warmup=0.0
    )
    ours = caveat.fit(task, caveat.MAP(training=training), progress=False).state["params"]
    for name, expected in theirs.named_parameters():
        torch.testing.assert_close(ours[name], expected.detach(), rtol=1e-4, atol=1e-5)


def test_noise_is_the_residuals_root_mean_square_for_each_output() -> None:
    x, y = regression(outputs=2)
    y[:, 1] += torch.randn(80, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    task = caveat.Task(nn.Linear(3, 2).double(), (x, y), caveat.Gaussian(), GaussianPrior(1e-6))
    posterior = caveat.fit(
        task, caveat.MAP(training=Training(epochs=300, learning_rate=0.03, batch_size=80)), progress=False
    )
    design = torch.cat([x, torch.ones(80, 1, dtype=torch.float64)], 1)
    residuals = y - design @ torch.linalg.lstsq(design, y).solution
    prediction = posterior.predict(x)
    torch.testing.assert_close(prediction.aleatoric[0], residuals.square().mean(0), rtol=2e-3, atol=0)
    assert float(prediction.epistemic.max()) == 0


def test_standardised_targets_come_back_in_their_own_units() -> None:
    x, y = regression()
    far = 1000 + 50 * y
    task = caveat.Task(nn.Linear(3, 1).double(), (x, far), caveat.Gaussian(standardise=True), GaussianPrior(1e-6))
    posterior = caveat.fit(
        task, caveat.MAP(training=Training(epochs=400, learning_rate=0.03, batch_size=80)), progress=False
    )
    design = torch.cat([x, torch.ones(80, 1, dtype=torch.float64)], 1)
    fitted = design @ torch.linalg.lstsq(design, far).solution
    torch.testing.assert_close(posterior.predict(x).mean, fitted, atol=0.1, rtol=0)
    assert float(posterior.predict(x).aleatoric[0].sqrt()) == pytest.approx(
        float((far - fitted).square().mean().sqrt()), rel=0.01
    )


@pytest.mark.parametrize("true_temperature", [0.5, 2.0])
def test_temperature_is_found_where_it_is_known(true_temperature: float) -> None:
    rng = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(20_000, 4, generator=rng, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(-1), 1, generator=rng)[:, 0]
    identity = nn.Linear(4, 4, bias=False).double()
    with torch.no_grad():
        identity.weight.copy_(torch.eye(4) * true_temperature)
    task = caveat.Task(identity, (logits[:100], labels[:100]), caveat.Categorical(), validation=(logits, labels))
    posterior = caveat.fit(task, caveat.MAP(temperature=True, training=Training(epochs=0)), progress=False)
    assert float(posterior.state["hyper"]["temperature"]) == pytest.approx(true_temperature, rel=0.03)
    torch.testing.assert_close(posterior.state["params"]["weight"], identity.weight.detach())


def test_temperature_needs_validation_data_and_a_likelihood_that_has_one() -> None:
    x, y = regression()
    task = caveat.Task(nn.Linear(3, 1).double(), (x, y), caveat.Gaussian())
    with pytest.raises(ValueError, match=r"validation=0\.1"):
        caveat.fit(task, caveat.MAP(temperature=True), progress=False)
    counts = caveat.Task(nn.Linear(3, 1).double(), (x, y.round().abs()), caveat.Poisson(), validation=0.2)
    with pytest.raises(ValueError, match="no meaning for Poisson"):
        caveat.fit(counts, caveat.MAP(temperature=True, training=Training(epochs=1)), progress=False)


def test_a_trained_network_kept_as_it_is_gets_its_own_noise() -> None:
    x, y = regression()
    module = nn.Linear(3, 1).double()
    design = torch.cat([x, torch.ones(80, 1, dtype=torch.float64)], 1)
    solution = torch.linalg.lstsq(design, y).solution[:, 0]
    with torch.no_grad():
        module.weight.copy_(solution[:3])
        module.bias.copy_(solution[3:])
    task = caveat.Task(module, (x, y), caveat.Gaussian())
    posterior = caveat.fit(task, caveat.MAP(training=Training(epochs=0)), progress=False)
    residuals = y - design @ solution[:, None]
    torch.testing.assert_close(posterior.predict(x).aleatoric[0], residuals.square().mean(0))


def test_a_temperature_at_the_end_of_its_range_is_warned_about() -> None:
    x = torch.randn(30, 2, generator=torch.Generator().manual_seed(0))
    module = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[-1.0, 0.0], [1.0, 0.0]]))
    task = caveat.Task(module, (x, (x[:, 0] > 0).long()), caveat.Categorical(), validation=0.5)
    posterior = caveat.fit(task, caveat.MAP(temperature=True, training=Training(epochs=0)), progress=False)
    assert "too few or too easy" in posterior.info.warnings[0]
