"""Predictors: what a posterior predicts with, made once from its state and network and used by any number of threads.

A module holds the weights of a draw while it runs, so two threads cannot share one: a predictor has replicas of it.
Most methods predict with weight draws. Draws are the outer loop and pieces of the inputs the inner one, so that each
draw is made once.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from caveat.batches import Inputs, move, slices
from caveat.likelihoods import Hyper
from caveat.network import Network, Params
from caveat.storage import State

__all__ = [
    "PIECE_ROWS",
    "PREPARED_BYTES",
    "DrawFunction",
    "DrawPredictor",
    "FixedForm",
    "Fixing",
    "LinearDraws",
    "LinearMixture",
    "Predictor",
    "PreparedDraws",
    "Replicas",
    "WeightDraws",
    "forward_in_pieces",
    "outputs_of_draws",
    "pick",
]

PIECE_ROWS = 512  # rows that go through the module at once
PREPARED_BYTES = 2**28  # of draws that are kept from one prediction to the next
PREPARED_MODULES = 128  # of which each has a module of its own: swapping weights in takes as long as a small network
DrawFunction = Callable[[State, Network, int, torch.Generator], Iterator[Params]]  # a method's `draws`
Thing = TypeVar("Thing")


class Predictor(Protocol):
    """What a posterior predicts with, made once from its state and network; any number of threads may use it."""

    def draws(self, n: int, rng: torch.Generator) -> Iterator[Params]:
        """Weight samples, n of them, one after the other; raises a TypeError where the method has none to give."""

    def outputs(self, x: Inputs, n: int, rng: torch.Generator) -> tuple[Tensor, Hyper]:
        """Outputs of n draws, [S, B, ...], and the hyperparameters of the likelihood that go with them."""

    def moments(self, x: Inputs, joint: bool = False) -> tuple[Tensor, Tensor] | None:
        """Mean [B, ...] and covariance of the outputs, [B, D, D] or joint [B D, B D]; None where not closed."""


@dataclass(frozen=True)
class WeightDraws:
    """A prediction that is the average over fixed settings of the weights."""

    members: list[tuple[Network, Params]]  # of each draw its network, and all that differs from the network's own
    hyper: Hyper  # what the likelihood learned in a draw is among its params, under "hyper/"


@dataclass(frozen=True)
class LinearDraws:
    """A prediction of the linearised network, f(x) + J(x) d for fixed directions d of chosen weights.

    The directions are draws; or, with `closed`, sum_k (J d_k)^2 is the variance of each output.
    """

    network: Network  # its names are the parameters that directions move
    params: Params  # where it is linearised, with buffers
    directions: Tensor  # [K, n], over the chosen weights
    index: Tensor | None  # which those are, as positions in the concatenation of the parameters; None for all
    hyper: Hyper
    closed: bool


@dataclass(frozen=True)
class LinearMixture:
    """A prediction that is the average over the draws of several linearised networks, none of them closed."""

    members: list[LinearDraws]
    hyper: Hyper  # of all draws; those of the members do not count


FixedForm = WeightDraws | LinearDraws | LinearMixture


@runtime_checkable
class Fixing(Protocol):
    """A predictor whose prediction can be written down once and for all, as a module for service needs it."""

    def fixed_form(self, n: int | None, rng: torch.Generator, example: Inputs) -> FixedForm:
        """What `outputs` with n draws computes, or `moments` without n; raises a TypeError where that is not fixed."""


class Replicas(Generic[Thing]):
    """Replicas of something that only one thread can use at a time, each lent to one caller.

    A replica is made when none is free and kept for the next caller, so there are as many as calls that ever ran side
    by side, and nobody waits.
    """

    def __init__(self, make: Callable[[], Thing]) -> None:
        self._make = make
        self._free: deque[Thing] = deque()  # its append and pop are atomic: no lock that a fork could leave held

    @contextmanager
    def lent(self) -> Iterator[Thing]:
        """Lend a replica to the caller for the length of a block."""
        try:
            replica = self._free.pop()
        except IndexError:
            replica = self._make()
        try:
            yield replica
        finally:
            self._free.append(replica)


class PreparedDraws(Generic[Thing]):
    """What was drawn last, by the state of the generator: the same seed gives the same draws, which are made once.

    The generator moves on as if they had been drawn. Threads that ask side by side may make the same draws twice.
    """

    def __init__(self, most_bytes: int = PREPARED_BYTES) -> None:
        self._most_bytes = most_bytes
        self._last: tuple[tuple[int, bytes], Thing, Tensor] | None = None

    def of(self, n: int, rng: torch.Generator, nbytes: int, make: Callable[[], Thing]) -> Thing:
        """N draws of so many bytes together: those that are known, or new ones, kept unless they are too large."""
        if nbytes > self._most_bytes:
            return make()
        key, last = (n, rng.get_state().numpy().tobytes()), self._last
        if last is None or last[0] != key:
            thing = make()
            last = self._last = (key, thing, rng.get_state())
        rng.set_state(last[2])
        return last[1]


class DrawPredictor:
    """Predicts with weight draws: each has a replica of the network's module, or few replicas serve many draws."""

    def __init__(self, draws: DrawFunction, state: State, network: Network) -> None:
        self._draws, self._state, self._network = draws, state, network
        self._networks = Replicas(network.replica)
        self._draw_bytes = network.n_parameters * network.dtype.itemsize
        self._prepared: PreparedDraws[_DrawModules] = PreparedDraws()

    def draws(self, n: int, rng: torch.Generator) -> Iterator[Params]:
        """The method's own weight draws, n of them."""
        with self._networks.lent() as network:
            yield from self._draws(self._state, network, n, rng)

    def outputs(self, x: Inputs, n: int, rng: torch.Generator) -> tuple[Tensor, Hyper]:
        """Outputs [S, B, ...] of n weight draws, and their hyper."""
        network, hyper, nbytes = self._network, self._state["hyper"], n * self._draw_bytes
        if nbytes > PREPARED_BYTES or n > PREPARED_MODULES:
            with self._networks.lent() as replica:
                return outputs_of_draws(self._draws(self._state, replica, n, rng), hyper, replica, x)
        prepared = self._prepared.of(
            n, rng, nbytes, lambda: _DrawModules(network, list(self._draws(self._state, network, n, rng)))
        )
        return prepared.outputs(x), hyper | prepared.learned

    def fixed_form(self, n: int | None, rng: torch.Generator, example: Inputs) -> WeightDraws:
        """The draws that `outputs` makes."""
        assert n is not None  # there is no closed form
        with self._networks.lent() as network:
            members = [(network, params) for params in self._draws(self._state, network, n, rng)]
        return WeightDraws(members, self._state["hyper"])

    def moments(self, x: Inputs, joint: bool = False) -> None:
        """None: outputs of weight draws have no closed form."""
        return None


class _DrawModules:
    """Modules that hold the weights of a draw each, so that a pass is a pass of the bare module."""

    def __init__(self, network: Network, draws: list[Params]) -> None:
        alike = [next(i for i, other in enumerate(draws) if other is draw) for draw in draws]
        self._place = [sorted(set(alike)).index(i) for i in alike]  # draws that are the same object share a module
        different = [draws[i] for i in sorted(set(alike))]
        self._networks = Replicas(lambda: [network.holding(params) for params in different])
        names = [name for name in draws[0] if name.startswith("hyper/")]
        self.learned = {name.removeprefix("hyper/"): torch.stack([draw[name] for draw in draws]) for name in names}

    def outputs(self, x: Inputs) -> Tensor:
        """Outputs of every draw, [S, B, ...]."""
        with torch.no_grad(), self._networks.lent() as networks:
            each = [_passes_in_pieces(network, x) for network in networks]
        return torch.stack([each[place] for place in self._place])


def _passes_in_pieces(network: Network, x: Inputs) -> Tensor:
    pieces = [network.evaluation_pass(move(piece, network.device)) for piece in slices(x, PIECE_ROWS)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def outputs_of_draws(draws: Iterator[Params], hyper: Hyper, network: Network, x: Inputs) -> tuple[Tensor, Hyper]:
    """Outputs [S, B, ...] of weight draws, and the hyper: one for all, or stacked where each draw has its own."""
    outputs: list[Tensor] = []
    learned: dict[str, list[Tensor]] = {}
    for params in draws:
        outputs.append(forward_in_pieces(network, params, x))
        for name, value in params.items():
            if name.startswith("hyper/"):
                learned.setdefault(name.removeprefix("hyper/"), []).append(value)
    return torch.stack(outputs), hyper | {name: torch.stack(values) for name, values in learned.items()}


def forward_in_pieces(network: Network, params: Params, x: Inputs) -> Tensor:
    """Outputs of all rows [B, ...], a piece of the rows at a time, without gradients."""
    with torch.no_grad():
        return torch.cat([network(params, move(piece, network.device)) for piece in slices(x, PIECE_ROWS)])


def pick(count: int, n: int, rng: torch.Generator) -> list[int]:
    """The numbers of n of `count` stored draws: each as often as the others, the remainder drawn without repeats."""
    whole, rest = divmod(n, count)
    chosen = torch.randperm(count, generator=rng)[:rest].sort().values.tolist()
    return [*range(count)] * whole + chosen
