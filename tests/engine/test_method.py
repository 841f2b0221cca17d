"""The defaults of the protocol: what a method gets, and refuses, that says nothing of its own."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import caveat
from caveat.engine.method import Method
from caveat.engine.run import Info, Run, StartsFrom
from caveat.network import Network, Params
from caveat.storage import State
from caveat.task import Task


@dataclass(frozen=True)
class Mute(Method):
    """The start itself, of numbers only, and nothing to predict with."""

    starts_from: ClassVar[StartsFrom] = "scratch"
    likelihoods: ClassVar[tuple[str, ...]] = ("Gaussian",)

    def memory(self, network: Network) -> int:
        return 0

    def fit(self, task: Task, start: State, run: Run) -> tuple[State, Info]:
        return {"params": start["params"], "hyper": start["hyper"]}, run.info(task.network, "as it is")


@dataclass(frozen=True)
class Jitter(Mute):
    """The smallest method that predicts: the start's weights with noise."""

    spread: float = 0.1
    likelihoods: ClassVar[tuple[str, ...]] = Method.likelihoods

    @property
    def default_draws(self) -> int:
        return 5

    def draws(self, state: State, network: Network, n: int, rng: torch.Generator) -> Iterator[Params]:
        for _ in range(n):
            noise = {k: torch.randn(v.shape, generator=rng) for k, v in state["params"].items()}
            yield {k: v + self.spread * noise[k] for k, v in state["params"].items()}


def task(likelihood: Any = None) -> caveat.Task:
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
    y: Tensor = x[:, :1] if likelihood is None else (x[:, 0] > 0).long()
    torch.manual_seed(0)
    return caveat.Task(nn.Linear(3, 1 if likelihood is None else 2), (x, y), likelihood or caveat.Gaussian())


def test_draws_are_enough_to_predict() -> None:
    own = task()
    posterior = caveat.fit(own, Jitter(), progress=False)
    x, _ = own.train.everything()
    by_hand = [own.network(draw, x) for draw in posterior.sample(5, seed=3)]
    torch.testing.assert_close(posterior.predict(x, seed=3).samples, torch.stack(by_hand))
    assert not posterior.method.closed_form(own.network.likelihood)


def test_what_the_defaults_refuse_is_said_with_the_methods_name() -> None:
    own = task()
    posterior = caveat.fit(own, Jitter(), progress=False)
    x, y = own.train.everything()
    with pytest.raises(TypeError, match=r"Jitter has no closed form: use predict\(x\).samples"):
        posterior.moments(x)
    with pytest.raises(TypeError, match="Jitter cannot take more data once it is fitted"):
        posterior.update((x, y), progress=False)
    with pytest.raises(NotImplementedError, match="Mute must say how many draws"):
        caveat.fit(own, Mute(), progress=False)
    mute = dataclasses.replace(posterior, method=Mute())
    with pytest.raises(TypeError, match=r"Mute has no weight draws: use predict\(x\)"):
        next(mute.sample(1))


def test_every_likelihood_is_supported_unless_a_method_says_otherwise() -> None:
    known = ("Categorical", "Bernoulli", "Gaussian", "HeteroscedasticGaussian", "Poisson")
    assert set(Jitter.likelihoods) == set(known)
    caveat.fit(task(caveat.Categorical()), Jitter(), progress=False)
    with pytest.raises(ValueError, match="Mute does not support Categorical: it supports Gaussian"):
        caveat.fit(task(caveat.Categorical()), Mute(), progress=False)
