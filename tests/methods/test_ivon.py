"""IVON: its step is the formula, and on linear regression it arrives at the mean-field optimum."""

import pytest
import torch
from torch import nn

import caveat
from caveat import Training
from caveat.methods.ivon import VariationalNewton


def test_a_step_is_that_of_the_equations() -> None:
    rng = torch.Generator().manual_seed(0)
    mean, gradient = 0.3 * torch.randn(2, 5, generator=rng, dtype=torch.float64)
    gradient[0] = 4.0  # a step that is cut
    parameter = nn.Parameter(mean.clone())
    rows, delta, rate, b1, b2, h = 30.0, 0.2, 0.1, 0.9, 0.95, torch.full((5,), 0.7, dtype=torch.float64)
    groups = [{"params": [parameter], "highest": rate, "weight_decay": delta}]
    optimizer = VariationalNewton(groups, rows, 0.7, b1, b2, seed=3)
    optimizer.param_groups[0]["lr"] = rate
    average, m = torch.zeros(5, dtype=torch.float64), mean.clone()
    noises = []
    for step in (1, 2):
        noise = optimizer.noise(parameter).clone()
        assert torch.equal(noise, optimizer.noise(parameter)), "one draw a step"
        noises.append(noise)
        parameter.grad = gradient * step
        optimizer.step()
        estimate = gradient * step * noise * rows * (h + delta)
        h = b2 * h + (1 - b2) * estimate + 0.5 * (1 - b2) ** 2 * (h - estimate) ** 2 / (h + delta)
        average = b1 * average + (1 - b1) * gradient * step
        m = m - rate * ((average / (1 - b1**step) + delta * m) / (h + delta)).clamp(-1, 1)
        torch.testing.assert_close(parameter.detach(), m)
        torch.testing.assert_close(optimizer.variance(parameter), 1 / (rows * (h + delta)))
    assert not torch.equal(*noises)


@pytest.mark.parametrize("temperature", [1.0, 0.25])
def test_linear_regression_arrives_at_the_mean_field_optimum(temperature: float) -> None:
    rng = torch.Generator().manual_seed(0)
    mixing = torch.eye(4, dtype=torch.float64) + 0.2 * torch.randn(4, 4, generator=rng, dtype=torch.float64)
    x = torch.randn(200, 4, generator=rng, dtype=torch.float64) @ mixing
    y = x @ torch.randn(4, 1, generator=rng, dtype=torch.float64)
    y += 0.3 * torch.randn(200, 1, generator=rng, dtype=torch.float64)
    torch.manual_seed(0)
    task = caveat.Task(
        nn.Linear(4, 1, bias=False).double(), (x, y), caveat.Gaussian(noise=0.3), caveat.GaussianPrior(2.0)
    )
    method = caveat.IVON(temperature=temperature, training=Training(epochs=1500, batch_size=200, learning_rate=0.1))
    posterior = caveat.fit(task, method, progress=False)
    precision = x.T @ x / 0.09 + 2 * torch.eye(4, dtype=torch.float64)
    mean, variance = torch.linalg.solve(precision, x.T @ y / 0.09).flatten(), temperature / precision.diagonal()
    found = {group: posterior.state[group]["weight"].flatten() for group in ("mean", "variance")}
    assert float(((found["mean"] - mean) / variance.sqrt()).abs().max()) < 0.3
    torch.testing.assert_close(found["variance"], variance, rtol=0.2, atol=0)
    draws = torch.stack([draw["weight"].flatten() for draw in posterior.sample(20_000, seed=0)])
    torch.testing.assert_close(draws.var(0), found["variance"], rtol=0.05, atol=0)


def test_few_steps_and_other_priors_are_answered() -> None:
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    data = (x, (x[:, 0] > 0).long())
    short = caveat.IVON(hessian_momentum=0.9999, training=Training(epochs=3))
    posterior = caveat.fit(caveat.Task(nn.Linear(2, 2), data, caveat.Categorical()), short, progress=False)
    assert any("steps are too few" in warning for warning in posterior.info.warnings)
    wide = caveat.Task(nn.Linear(2, 2), data, caveat.Categorical(), caveat.LaplacePrior(1.0))
    with pytest.raises(ValueError, match="IVON needs a Gaussian prior"):
        caveat.fit(wide, caveat.IVON(), progress=False)
