"""The methods: one file each, found by looking. The file's name is the method's name in the CLI.

A method is a frozen dataclass with the attributes of `Method` below; nothing registers it. `docs/add_a_method.md` has
a skeleton.
"""

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from functools import cache
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from caveat.batches import Inputs
from caveat.engine.run import Info, Run, StartsFrom
from caveat.likelihoods import Hyper, Likelihood
from caveat.network import Network, Params
from caveat.rows import Rows
from caveat.storage import State
from caveat.task import Task

__all__ = ["Checks", "Method", "discover", "method_name"]


class Method(Protocol):
    """What makes a class a method; its dataclass fields are its knobs."""

    starts_from: ClassVar[StartsFrom]
    likelihoods: ClassVar[tuple[str, ...]]  # names of the likelihoods it supports
    quick: ClassVar[Any]  # an instance that fits digits in under five seconds on two cores

    @property
    def default_draws(self) -> int:
        """How many draws a prediction uses unless told otherwise."""

    def closed_form(self, likelihood: Likelihood) -> bool:
        """Whether a prediction is made from `moments`, unless draws are asked for."""

    def memory(self, network: Network) -> int:
        """Bytes that the fitted state and its making need, beside one pass of training."""

    def fit(self, task: Task, start: State, run: Run) -> tuple[State, Info]:
        """Find the posterior's state, from the point `start` (groups "params" and "hyper", on the run's device)."""

    def draws(self, state: State, network: Network, n: int, rng: torch.Generator) -> Iterator[Params]:
        """N weight samples."""

    def outputs(self, state: State, network: Network, x: Inputs, n: int, rng: torch.Generator) -> tuple[Tensor, Hyper]:
        """Outputs of n draws, [S, B, ...], and the hyper that goes with them."""

    def moments(self, state: State, network: Network, x: Inputs, joint: bool = False) -> tuple[Tensor, Tensor] | None:
        """Mean [B, ...] and covariance of the outputs, [B, D, D] or joint [B D, B D]; None where not closed."""

    def update(self, state: State, network: Network, rows: Rows, run: Run) -> State:
        """The state with more data taken in; a TypeError where that takes a new fit."""


@runtime_checkable
class Checks(Protocol):
    """A method that can refuse a task before the start, which may be hours of training, is fitted."""

    def check(self, task: Task, device: torch.device) -> None:
        """Raise what `fit` would raise on that device, as far as it is known without a trained point."""


@cache
def discover() -> dict[str, type[Any]]:
    """Every method of this package by its CLI name."""
    found: dict[str, type[Any]] = {}
    for module_info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{module_info.name}")
        for _, member in inspect.getmembers(module, inspect.isclass):
            if (
                member.__module__ == module.__name__
                and dataclasses.is_dataclass(member)
                and hasattr(member, "starts_from")
            ):
                found[module_info.name] = member
    return found


def method_name(method: Any) -> str:
    """The CLI name of a method: the name of the file that defines it."""
    return type(method).__module__.rsplit(".", 1)[-1]
