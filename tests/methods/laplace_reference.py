"""Small trained networks of every likelihood, Laplace posteriors of them, and dense references for these."""

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import caveat
from caveat import Laplace

PRIOR = caveat.GaussianPrior({"0.*": 0.5, "2.*": 2.0})
LIKELIHOODS: dict[str, tuple[Any, int]] = {
    "Categorical": (caveat.Categorical(class_weights=(1.0, 2.0, 0.5)), 3),
    "Bernoulli": (caveat.Bernoulli(), 2),
    "Gaussian": (caveat.Gaussian(standardise=True), 1),
    "HeteroscedasticGaussian": (caveat.HeteroscedasticGaussian(), 2),
    "Poisson": (caveat.Poisson(), 1),
}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def data(likelihood: str, n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    x, noise = normal(n, 3, seed=seed), 0.3 * normal(n, 1, seed=seed + 1)
    signal = x[:, :1] + x[:, 1:2] ** 2 + noise
    targets = {
        "Categorical": (signal[:, 0] > 0).long() + (signal[:, 0] > 1).long(),
        "Bernoulli": torch.cat([signal > 0.5, x[:, 2:] > 0], 1).double(),
        "Gaussian": 7 + 5 * signal,
        "HeteroscedasticGaussian": signal,
        "Poisson": signal.abs().round(),
    }
    return x, targets[likelihood]


@cache
def trained(likelihood: str, n: int = 30) -> tuple[caveat.Task, caveat.Posterior]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, LIKELIHOODS[likelihood][1])).double()
    task = caveat.Task(module, data(likelihood, n), LIKELIHOODS[likelihood][0], PRIOR)
    return task, caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=60)), progress=False)


def fit(task: caveat.Task, start: caveat.Posterior | None = None, **knobs: Any) -> caveat.Posterior:
    method = Laplace(**{"skip": 0.0, "precision": "given", "structure": "full"} | knobs)
    return caveat.fit(task, method, start=start, progress=False)


def at(dense: Any, posterior: caveat.Posterior) -> Any:
    return dense(posterior.network, posterior.state["params"], posterior.state["hyper"])


def flat_prior(posterior: caveat.Posterior) -> Tensor:
    own = posterior.network.params()
    return torch.cat([torch.full((v.numel(),), 0.5 if n[0] == "0" else 2.0) for n, v in own.items()]).double()


def precision(dense: Any, posterior: caveat.Posterior, task: caveat.Task, structure: str = "full") -> Tensor:
    ggn = at(dense, posterior).ggn(*task.train.everything())
    return (ggn.diagonal().diag() if structure == "diagonal" else ggn) + flat_prior(posterior).diag()


def assert_close(found: Tensor, wanted: Tensor, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max()))


def assert_covariance(draws: Tensor, covariance: Tensor) -> None:
    """Draws [S, n] around zero; the standard error of an entry is at most sqrt(2 c_ii c_jj / S)."""
    spread = covariance.diagonal().sqrt()
    error = (draws.T @ draws / len(draws) - covariance) / (spread.unsqueeze(1) * spread) * math.sqrt(len(draws) / 2)
    assert float(error.abs().max()) < 5
