"""What makes a class a method, and what a fitted one predicts with.

    method.fit(task, start, run)        -> state, info
    method.predictor(state, network)    -> predictor
    predictor.outputs(x, n, rng)        -> outputs of n draws, [S, B, ...]

A method is a frozen dataclass that inherits from `Method`; its fields are its knobs. Most methods need `fit`, `memory`
and `draws` only: the defaults here support every likelihood, predict by sending weight draws through the network, and
refuse what they cannot do. `docs/add_a_method.md` has a complete example.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, Protocol, get_args

import torch

from caveat.engine.predictors import DrawPredictor, Predictor
from caveat.engine.run import Info, Run, StartsFrom
from caveat.engine.state_checks import check_hyper, check_names, check_not_nan
from caveat.knobs import knob_classes
from caveat.likelihoods import Likelihood
from caveat.network import Network, Params
from caveat.rows import Rows
from caveat.storage import State
from caveat.task import Task

__all__ = ["Method", "Predictor", "not_a_method"]

EVERY_LIKELIHOOD = ("Categorical", "Bernoulli", "Gaussian", "HeteroscedasticGaussian", "Poisson")


class Method(Protocol):
    """A way to a posterior. Its dataclass fields are its knobs, each with a default."""

    starts_from: ClassVar[StartsFrom]
    likelihoods: ClassVar[tuple[str, ...]] = EVERY_LIKELIHOOD  # names of those that it supports
    quick: ClassVar[Any]  # an instance that fits digits in under five seconds on two cores

    @property
    def default_draws(self) -> int:
        """How many draws a prediction uses unless told otherwise."""
        raise NotImplementedError(f"{type(self).__name__} must say how many draws a prediction uses: default_draws")

    def closed_form(self, likelihood: Likelihood) -> bool:
        """Whether a prediction is made from `moments` unless draws are asked for; no, unless a method says so."""
        return False

    def memory(self, network: Network) -> int:
        """How many bytes the fitted state and its making need, beside one pass of training."""
        ...

    def check(self, task: Task, device: torch.device) -> None:
        """Raise what `fit` would raise on that device, as far as it is known before a start is trained."""
        return None

    def fit(self, task: Task, start: State, run: Run) -> tuple[State, Info]:
        """Find the posterior's state from a point.

        `start` has the groups "params" and "hyper" on the run's device. It is the method's own: a method that trains
        few weights takes the whole ones out of it (`start.pop("params")`), so that nobody holds them meanwhile.
        """
        ...

    def draws(self, state: State, network: Network, n: int, rng: torch.Generator) -> Iterator[Params]:
        """Weight samples, n of them, from which the default predictor predicts."""
        raise TypeError(f"{type(self).__name__} has no weight draws: use predict(x)")

    def predictor(self, state: State, network: Network) -> Predictor:
        """What predicts from a state: weight draws sent through the network, unless a method has a way of its own."""
        return DrawPredictor(self.draws, state, network)

    def check_state(self, state: State, network: Network) -> None:
        """Raise a CorruptFile for a state, read from files, that is not one of this method and network.

        Unless a method knows more of its state, only what the likelihood has beside the weights is looked at, and NaN.
        """
        check_names("state", state, ["hyper"], state.keys())
        check_hyper(state["hyper"], network)
        for group, tensors in state.items():
            for name, tensor in tensors.items():
                check_not_nan(f"{group}/{name}", tensor)

    def update(self, state: State, network: Network, rows: Rows, run: Run) -> State:
        """The state with more data taken in; raises a TypeError unless the method can do that without a new fit."""
        name = type(self).__name__
        raise TypeError(f"{name} cannot take more data once it is fitted: fit it again with all of them")


def not_a_method(candidate: Any) -> str | None:
    """Why something cannot be used as a method, with what to do about it; None for a method."""
    if not isinstance(candidate, type) or Method not in candidate.__mro__:
        return f"{candidate!r} is not a class that inherits from caveat.Method: let it"
    name = candidate.__name__
    if not dataclasses.is_dataclass(candidate) or not candidate.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        return f"{name} is not a frozen dataclass: put @dataclass(frozen=True) on it"
    if getattr(candidate, "starts_from", None) not in get_args(StartsFrom):
        return f"{name}.starts_from is not one of {', '.join(get_args(StartsFrom))}: set it"
    missing = [member for member in ("default_draws", "fit", "memory") if _is_default(candidate, member)]
    if _is_default(candidate, "draws") and _is_default(candidate, "predictor"):
        missing.append("draws")
    if missing:
        return f"{name} has no {missing[0]}: add it"
    try:
        knob_classes(candidate)
        candidate()
    except Exception as error:  # whatever its own checks may raise
        return f"{name}() cannot be made ({type(error).__name__}: {error}): give every knob a type and a default"
    if not isinstance(getattr(candidate, "quick", None), candidate):
        return f"{name}.quick is not a {name}: set it to one that fits digits in under five seconds"
    return None


def _is_default(method: type, member: str) -> bool:
    """Whether a class has left something as `Method` has it."""
    return getattr(method, member) is getattr(Method, member)
