"""Noise that is learned from rows which the weights can learn by heart is said to be so."""

import pytest
import torch
from torch import nn

import caveat
from caveat import Training
from tests.test_contract import METHODS, short

SAID = "weights can learn by heart"
POINTS = ["map", "deep_ensemble", "swag", "ivon", "rigl", "mean_field_vi", "ssvi", "variational_dropout", "laplace",
          "subnetwork_laplace", "sampled_laplace", "group_variational_dropout"]  # fmt: skip


def network(outputs: int, width: int = 50) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, outputs))


def noisy_task(
    likelihood: caveat.Likelihood, validation: float | None = None, rows: int = 60, width: int = 50
) -> caveat.Task:
    rng = torch.Generator().manual_seed(rows + 3)
    direction, x = torch.randn(3, 1, generator=rng), torch.randn(rows, 3, generator=rng)
    y = torch.tanh(x @ direction) * 2 + x[:, :1] + 0.5 * torch.randn(rows, 1, generator=rng)
    model = network(2 if type(likelihood) is caveat.HeteroscedasticGaussian else 1, width)
    return caveat.Task(model, (x, y), likelihood, validation=validation)


def said(posterior: caveat.Posterior) -> int:
    return sum(SAID in warning for warning in posterior.info.warnings)


def test_noise_learned_by_heart_is_far_too_small_and_said() -> None:
    found = caveat.fit(noisy_task(caveat.Gaussian()), caveat.MAP(), progress=False)
    assert float(found.state["hyper"]["log_noise"].exp()) < 0.2  # it is .5
    (warning,) = found.info.warnings
    assert "60 training rows, which 251 weights can learn by heart" in warning
    held_out = caveat.fit(noisy_task(caveat.Gaussian(), 0.2), caveat.MAP(), progress=False)
    assert float(held_out.state["hyper"]["log_noise"].exp()) > 0.4
    assert not said(held_out)


@pytest.mark.parametrize("name", POINTS)
def test_every_method_whose_noise_is_that_of_a_point_says_so_once(name: str) -> None:
    method = METHODS[name]
    start = caveat.MAP(training=Training(epochs=60)) if method.starts_from == "trained" else None
    assert said(caveat.fit(noisy_task(caveat.Gaussian()), short(method), start=start, progress=False)) == 1


def test_nothing_is_said_where_noise_is_given_or_sampled_or_rows_are_many() -> None:
    brief = caveat.MAP(training=Training(epochs=2))
    assert not said(caveat.fit(noisy_task(caveat.Gaussian(noise=0.5)), brief, progress=False))
    assert not said(caveat.fit(noisy_task(caveat.Gaussian(), width=10), brief, progress=False))
    chains = caveat.SGMCMC(chains=2, length=8, burn_in=10, thin=1)
    assert not said(caveat.fit(noisy_task(caveat.Gaussian()), chains, progress=False))
    assert said(caveat.fit(noisy_task(caveat.HeteroscedasticGaussian()), brief, progress=False))


def test_a_module_that_was_trained_elsewhere_gets_the_noise_that_validation_rows_show() -> None:
    task = noisy_task(caveat.Gaussian())
    trained = caveat.fit(task, caveat.MAP(), progress=False)
    module = network(1)
    module.load_state_dict(trained.state["params"])
    rows, method = task.train.everything(), caveat.LastLayerLaplace()
    assert said(caveat.fit(caveat.Task(module, rows, caveat.Gaussian()), method, progress=False))
    new_rows = noisy_task(caveat.Gaussian(), rows=61).train.everything()
    seen = caveat.fit(caveat.Task(module, rows, caveat.Gaussian(), validation=new_rows), method, progress=False)
    assert not said(seen)
    assert float(seen.state["hyper"]["log_noise"].exp()) > 3 * float(trained.state["hyper"]["log_noise"].exp())
