"""Ensemble of any method: several posteriors, each fitted from weights of its own, averaged as a mixture.

    p(theta | D) ~ 1/M sum_m q_m(theta),   q_m fitted from fresh weights m

A Gaussian describes the surroundings of one mode of the posterior, and points from different starts describe several
modes without surroundings; a mixture has both: SWAG as the method is multi-SWAG (Wilson & Izmailov 2020), Laplace a
mixture of Laplace approximations (Eschenhagen et al. 2021). Without a method, members are points: a deep ensemble.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from caveat.engine.fresh_weights import FreshWeights
from caveat.engine.members import (
    MixturePredictor,
    as_one_state,
    check_points,
    draws_of_points,
    fresh_points,
    points_of_modules,
    start_of,
    state_of_member,
)
from caveat.engine.method import Method
from caveat.engine.predictors import DrawPredictor, Predictor
from caveat.engine.run import Info, Run, StartsFrom
from caveat.engine.training import ADAM, Training
from caveat.knobs import Count, check_knobs
from caveat.network import Network, Params, unwrapped
from caveat.storage import CorruptFile, State, digest_of, moved_state
from caveat.task import Task

__all__ = ["Ensemble"]


@dataclass(frozen=True)
class Ensemble(Method):
    """Posteriors of one method from different initial weights, averaged; points, unless a method is given."""

    of: Method | None = None  # the method of every member, such as SWAG(); points without one
    members: Count = 5
    training: Training = ADAM  # of points, and of those that members start from where the method needs some
    networks: tuple[str, ...] = ()  # digests of trained networks; `from_modules` sets them
    given: tuple[nn.Module, ...] = field(default=(), init=False, repr=False, compare=False)  # those networks
    starts_from: ClassVar[StartsFrom] = "fresh"
    quick: ClassVar["Ensemble"]

    def __post_init__(self) -> None:
        check_knobs(self)
        object.__setattr__(self, "training", self.training.filled(ADAM))
        if self.of is not None and Method not in type(self.of).__mro__:
            raise ValueError(f"Ensemble(of={self.of!r}): must be a method, such as caveat.SWAG()")
        trains_points = self.of is None or self.of.starts_from == "trained"
        if self.training != ADAM and (not trains_points or self.networks):
            who = "networks that are trained" if self.networks else f"{type(self.of).__name__}, which trains by itself"
            raise ValueError(f"Ensemble(training=...) is for points, and these members are of {who}: leave it out")
        if self.networks and self.of is not None and self.of.starts_from == "fresh":
            raise ValueError(f"{type(self.of).__name__} draws its own starting weights: it cannot be at given networks")

    @classmethod
    def from_modules(cls, modules: Sequence[nn.Module], of: Method | None = None) -> "Ensemble":
        """An ensemble at networks that are trained already: `fit` takes them as they are, without any training.

        With a method that starts from a trained network, such as `Laplace()`, it is fitted at each of them.
        """
        modules = tuple(modules)
        if not modules or not all(isinstance(module, nn.Module) for module in modules):
            raise TypeError(f"Ensemble.from_modules({modules!r}): give a list of trained modules")
        ensemble = cls(of=of, members=len(modules), networks=tuple(_digest(module) for module in modules))
        object.__setattr__(ensemble, "given", modules)
        return ensemble

    @property
    def default_draws(self) -> int:
        """Every member as often as it is drawn from alone."""
        return self.members * (1 if self.of is None else self.of.default_draws)

    def memory(self, network: Network) -> int:
        """Bytes of all members, each as if it kept what it is made with."""
        alone = network.n_parameters * network.dtype.itemsize if self.of is None else self.of.memory(network)
        return self.members * alone

    def check(self, task: Task, device: torch.device) -> None:
        """Refuse what the method of the members would, and networks that are no longer there."""
        if self.networks and [_digest(module) for module in self.given] != [*self.networks]:
            raise ValueError(
                "the networks of this ensemble are not at hand, or were changed since Ensemble.from_modules([...]) was "
                "called: call it again with them"
            )
        if self.of is not None:
            name = type(task.network.likelihood).__name__
            if name not in self.of.likelihoods and name in Method.likelihoods:
                supported = ", ".join(self.of.likelihoods)
                raise ValueError(f"{type(self.of).__name__} does not support {name}: it supports {supported}")
            self.of.check(task, device)

    def fit(self, task: Task, start: State, run: Run) -> tuple[State, Info]:
        """Fit every member, each in a run of its own, from weights of its own."""
        parts = {m: run.child(f"member-{m + 1}", alone=True) for m in run.ranks.mine(range(self.members))}
        if self.of is None:
            points = self._points(task, parts, run)
            _count(parts, run)
            state = {"params": run.ranks.gather(points, self.members), "hyper": task.hyper}
            return state, run.info(task.network.to(run.device), f"{self.members} point estimates")
        fitted = self._fitted(self.of, task, parts, run)
        _count(parts, run)
        members = run.ranks.share(fitted, self.members)
        told = [each for _, each in members]
        run.warnings.extend(warning for each in told for warning in each["warnings"])
        coverage = [entry | {"treatment": _times(self.members, entry["treatment"])} for entry in told[0]["coverage"]]
        info = Info(coverage, {"members": [each["diagnostics"] for each in told]}, list(run.warnings))
        return as_one_state([own for own, _ in members]), info

    def _points(self, task: Task, parts: dict[int, Run], run: Run) -> dict[int, Params]:
        """The points of this rank's members, which are members themselves or what these start from."""
        if not self.networks:
            points, notes = fresh_points(task, parts, self.training)
            run.warnings.extend(notes)
            return points
        chosen = points_of_modules([self.given[m] for m in parts], task, run.device)
        return dict(zip(parts, chosen, strict=True))

    def _fitted(self, of: Method, task: Task, parts: dict[int, Run], run: Run) -> dict[int, tuple[State, Any]]:
        """State and info of this rank's members; one that is finished is not fitted again."""
        network = task.network.to(run.device)
        if self.networks or of.starts_from == "trained":
            begun = {m: part.child("start", alone=True) for m, part in parts.items()}
            points = self._points(task, begun, run)
            for m, part in parts.items():
                part.absorb(begun[m])
            starts = {m: start_of(points[m], task) for m in parts}
        elif of.starts_from == "scratch":
            fresh_weights = FreshWeights(network)
            starts = {m: {"params": fresh_weights(part.rng), "hyper": task.hyper} for m, part in parts.items()}
            run.warnings.extend(fresh_weights.notes())
        else:
            starts = {m: {"params": network.params(), "hyper": task.hyper} for m in parts}
        fitted = {}
        for m, part in parts.items():
            part.restart_clock()
            if (finished := part.appended("member")) is not None:
                fitted[m] = moved_state(finished[0], run.device), finished[1]
                continue
            state, info = of.fit(task, starts.pop(m), part)
            told = {"coverage": info.coverage, "diagnostics": info.diagnostics, "warnings": part.warnings}
            part.append("member", state, told)
            fitted[m] = state, told
        return fitted

    def check_state(self, state: State, network: Network) -> None:
        """Refuse a state that is not as many states of the method as there are members."""
        if self.of is None:
            check_points(state, network, self.members)
            return
        states = [state_of_member(state, m) for m in range(self.members)]
        if len(as_one_state(states)) != len(state):
            raise CorruptFile(f"the state has groups that are of none of the {self.members} members")
        for own in states:
            self.of.check_state(own, network)

    def draws(self, state: State, network: Network, n: int, rng: torch.Generator) -> Iterator[Params]:
        """N draws, of every member its share."""
        if self.of is None:
            return draws_of_points(state, self.members, n, rng)
        return self.predictor(state, network).draws(n, rng)

    def predictor(self, state: State, network: Network) -> Predictor:
        """What predicts with the members' own predictors."""
        if self.of is None:
            return DrawPredictor(self.draws, state, network)
        of = self.of
        return MixturePredictor([of.predictor(state_of_member(state, m), network) for m in range(self.members)])


def _digest(module: nn.Module) -> str:
    """A digest of a module's values."""
    inner = unwrapped(module)
    return digest_of({"": dict(inner.named_parameters()) | dict(inner.named_buffers())})


def _count(parts: dict[int, Run], run: Run) -> None:
    """Count what the members cost, on all ranks."""
    for part in parts.values():
        run.absorb(part)
    run.add_costs_of_ranks()


def _times(members: int, treatment: str) -> str:
    """What is said of a layer in words, of several members; what is fixed is so in all of them."""
    return treatment if treatment == "fixed" else f"{members} times: {treatment}"


Ensemble.quick = Ensemble(members=4, training=Training(epochs=40))
