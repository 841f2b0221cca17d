"""Chains made by hand: independent draws of the weights of a linear network."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import caveat
from caveat.engine.method import Method
from caveat.network import Network, Params
from caveat.storage import State

ROWS = 20


@dataclass(frozen=True)
class Sampler(Method):
    """Stored draws, every one once, chain by chain."""

    chains: int = 4

    def draws(self, state: State, network: Network, n: int, rng: torch.Generator) -> Iterator[Params]:
        for s in range(n):
            yield {name: stack.flatten(0, 1)[s] for name, stack in state["params"].items()}


def independent(chains: int, draws: int, *shape: int) -> Tensor:
    return torch.randn(chains, draws, *shape, generator=torch.Generator().manual_seed(math.prod(shape)))


def made(
    likelihood: caveat.Likelihood | None = None,
    *,
    chains: int = 4,
    draws: int = 400,
    change: Callable[[Params, Params], None] | None = None,
) -> tuple[caveat.Posterior, Tensor, Tensor]:
    """A linear network whose weights are independent draws, until `change(params, stats)` spoils them; its data."""
    likelihood = likelihood or caveat.Categorical()
    x = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(1))
    y = torch.arange(ROWS) % 3 if likelihood.kind == "classification" else x[:, :1] * 2
    n_outputs = 3 if likelihood.kind == "classification" else 1
    network = Network(nn.Linear(3, n_outputs), likelihood)
    params = {name: 0.3 * independent(chains, draws, *w.shape) for name, w in network.params().items()}
    if likelihood.kind == "regression":
        params["hyper/log_noise"] = 0.1 * independent(chains, draws, 1).double()
    stats = {
        "lp": independent(chains, draws, 7).sum(-1).double(),
        "energy": independent(chains, draws, 11).sum(-1).double(),
        "acceptance_rate": torch.full((chains, draws), 0.9, dtype=torch.float64),
        "step_size": torch.full((chains, draws), 0.01, dtype=torch.float64),
        "diverging": torch.zeros(chains, draws, dtype=torch.bool),
        "n_steps": torch.full((chains, draws), 34),
    }
    if change is not None:
        change(params, stats)
    info = caveat.fit(
        caveat.Task(network.module.requires_grad_(), (x, y), likelihood),
        caveat.MAP(training=caveat.Training(epochs=1)),
        progress=False,
    ).info
    state: State = {"params": params, "hyper": likelihood.initial_hyper(y), "stats": stats}
    return caveat.Posterior(Sampler(chains), state, network, info), x, y


@pytest.fixture
def chains_by_hand() -> Callable[..., tuple[caveat.Posterior, Tensor, Tensor]]:
    return made
