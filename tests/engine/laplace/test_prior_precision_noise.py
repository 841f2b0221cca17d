"""Prior precision and learned noise together, on validation rows: against a brute-force grid of dense posteriors."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import caveat
from caveat import Gaussian, Network
from caveat.engine.laplace.gaussians import Curvature
from caveat.engine.laplace.prior_precision import NOISES, SCALES, Tuner
from caveat.engine.laplace.sweep import Sweep
from caveat.engine.run import Run
from caveat.rows import Rows

FORMS: dict[str, Callable[[Sweep], Curvature]] = {
    "full": lambda sweep: sweep.full(None)[0],
    "rows": lambda sweep: sweep.stacked(None)[0],
    "diagonal": lambda sweep: sweep.diagonal()[0],
    "kronecker": lambda sweep: sweep.kronecker()[0],
}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def problem() -> tuple[Sweep, Rows]:
    """A network a little beside the truth, few rows, and validation rows further out, where it is wrong."""
    torch.manual_seed(1)
    x, new = normal(12, 2), 1.5 * normal(60, 2, seed=3)
    module = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    network = Network(module, Gaussian(standardise=True))

    def truth(x: Tensor, seed: int) -> Tensor:
        return 3 * x[:, :1].sin() + 0.2 * normal(len(x), 1, seed=seed)

    rows = Rows((x, truth(x, 1)))
    hyper = network.likelihood.initial_hyper(rows.targets())
    hyper["log_noise"] = hyper["log_noise"] + 0.7  # twice what the targets' spread allows
    return Sweep(network, network.params(), hyper, rows, Run()), Rows((new, truth(new, 2)))


@pytest.mark.parametrize("form", FORMS)
def test_the_pair_is_the_best_of_all_and_its_gaussian_is_the_one_fitted_with_that_noise(form: str) -> None:
    sweep, rows = problem()
    prior = torch.full((sweep.network.n_parameters,), 0.5, dtype=torch.float64)
    new, y = rows.everything()
    row_pass = sweep.jacobian().at(new)

    def nll(noise: float, scale: float) -> tuple[float, Any, Any]:
        hyper = sweep.hyper | {"log_noise": sweep.hyper["log_noise"] + math.log(noise)}
        gaussian = FORMS[form](replace(sweep, hyper=hyper)).gaussian(scale * prior)
        variance = gaussian.covariance(row_pass)[:, 0]
        prediction = sweep.network.likelihood.closed_predictive(row_pass.outputs, variance, hyper)
        return -float(prediction.log_prob(y).mean()), gaussian, hyper

    tuner = Tuner(FORMS[form](sweep), prior, torch.zeros_like(prior), 0.0, Run())
    tuned = tuner.validation_with_noise(sweep.jacobian(), rows, sweep.hyper, lambda hyper: 0.0)
    noise, scale = tuned.report["noise_multiple"], tuned.report["prior_precision_multiple"]
    reached, gaussian, hyper = nll(noise, scale)
    assert tuned.report["validation_nll"] == pytest.approx(reached, rel=1e-6)
    torch.testing.assert_close(tuned.gaussian.covariance(row_pass), gaussian.covariance(row_pass))
    torch.testing.assert_close(tuned.hyper, hyper)
    coarse = [nll(c, s)[0] for c in NOISES[::4] for s in SCALES[6::3]]
    assert reached <= min(coarse) + 1e-3
    assert noise < 1


def test_a_posterior_beside_fitted_noise_has_something_left_to_explain() -> None:
    x = torch.linspace(-2, 2, 40).unsqueeze(1)
    y = (2 * x).sin() + 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 1))
    task = caveat.Task(network, TensorDataset(x[::2], y[::2]), Gaussian(), validation=TensorDataset(x[1::2], y[1::2]))
    point = caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=300)), progress=False)
    method = caveat.Laplace(structure="full", prediction="closed", precision="validation")
    posterior = caveat.fit(task, method, start=point, progress=False)
    at_validation = posterior.predict(x[1::2])
    before = -float(point.predict(x[1::2]).log_prob(y[1::2]).mean())
    after = -float(at_validation.log_prob(y[1::2]).mean())
    assert after <= before + 1e-4
    assert posterior.info.diagnostics["validation_nll"] == pytest.approx(after, abs=1e-3)
    assert posterior.state["hyper"]["log_noise"] <= point.state["hyper"]["log_noise"] + 1e-6
