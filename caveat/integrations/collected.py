"""What a posterior needs from a training that somebody else runs, collected while it runs.

    MAP, Laplace and whatever else begins at a trained network     its weights at the end
    SWAG                                                           moments of the weights after each epoch
    DeepEnsemble                                                   the weights at the end of each of several trainings

`Collector.epoch_ended` and `training_ended` are what the callbacks of `lightning.py` and `transformers.py` call.
"""

import dataclasses
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from caveat.engine.run import Info, Run, StartsFrom
from caveat.engine.running_moments import RunningMoments
from caveat.engine.training import Training
from caveat.fitting import fit
from caveat.methods import Method
from caveat.methods.deep_ensemble import DeepEnsemble
from caveat.methods.map import MAP
from caveat.methods.swag import SWAG
from caveat.network import Network, Params
from caveat.posterior import Posterior
from caveat.storage import State
from caveat.task import Task

__all__ = ["Collector"]

_NO_TRAINING = Training(epochs=0)


class Collector:
    """Collects from the trainings of modules of one architecture until a method has all that it needs.

    Args:
        method: which posterior; `MAP()` keeps the weights as they are, and the training of `SWAG` and `DeepEnsemble` is
            the one that is watched, whatever their own knobs of training say.
        from_epoch: the first epoch, counted from 0, whose weights SWAG takes.
        seed: of what is random in a fit.
    """

    def __init__(self, method: Method, from_epoch: int = 0, seed: int = 0) -> None:
        if not isinstance(method, DeepEnsemble | SWAG | MAP) and method.starts_from != "trained":
            raise ValueError(
                f"{type(method).__name__} trains in a way of its own, which nobody else's training can stand for: use "
                "caveat.fit; a callback makes a MAP, SWAG, a DeepEnsemble, and whatever starts from a trained network"
            )
        self.method, self.from_epoch, self.seed = method, from_epoch, seed
        self._path: _Path | None = None
        self._members: list[Params] = []

    def training_began(self) -> None:
        """Forget an earlier training, but for the members of an ensemble."""
        self._path = None

    def epoch_ended(self, epoch: int, module: nn.Module) -> None:
        """Take the weights after an epoch, counted from 0, where the method wants them."""
        if not isinstance(self.method, SWAG) or epoch < self.from_epoch:
            return
        weights = {n: p.detach() for n, p in module.named_parameters() if p.requires_grad and p.is_floating_point()}
        if self._path is None:
            self._path = _Path.empty(weights, self.method.rank)
        self._path.add(weights)

    def training_ended(self, task: Task) -> Posterior | None:
        """The posterior, of the task that was trained; None of an ensemble that is not complete."""
        method = self.method
        if isinstance(method, SWAG):
            return self._swag(method, task)
        if isinstance(method, DeepEnsemble):
            self._members.append(task.network.params() | task.network.buffers())
            if len(self._members) < method.members:
                return None
            members, self._members = self._members, []
            posterior = fit(task, _Members(members, method), seed=self.seed, progress=False)
            return dataclasses.replace(posterior, method=method)
        if isinstance(method, MAP):
            kept = dataclasses.replace(method, training=_NO_TRAINING)
            return dataclasses.replace(fit(task, kept, seed=self.seed, progress=False), method=method)
        return fit(task, method, seed=self.seed, progress=False)

    def _swag(self, method: SWAG, task: Task) -> Posterior:
        path = self._path
        if path is None or path.count < 3:
            raise ValueError(
                "SWAG needs the weights after 3 epochs or more to see a spread, and there were "
                f"{0 if path is None else path.count} from epoch {self.from_epoch} on: train longer, or from_epoch=0"
            )
        described = dataclasses.replace(method, training=dataclasses.replace(method.training, epochs=path.count))
        posterior = fit(task, _CollectedPath(path.tensors(), described), seed=self.seed, progress=False)
        return dataclasses.replace(posterior, method=described)


class _Path:
    """Running moments of weights, and the last deviations from their mean."""

    def __init__(self, moments: dict[str, RunningMoments], rank: int) -> None:
        self.moments, self.count = moments, 0
        self.deviations: deque[Params] = deque(maxlen=rank)

    @classmethod
    def empty(cls, weights: Params, rank: int) -> "_Path":
        """Before the first epoch."""
        zeros = {n: (torch.zeros_like(w), torch.zeros_like(w)) for n, w in weights.items()}
        return cls({n: RunningMoments(mean, spread, count=0) for n, (mean, spread) in zeros.items()}, rank)

    def add(self, weights: Params) -> None:
        """Take the weights after an epoch."""
        for name, weight in weights.items():
            self.moments[name].add(weight)
        self.count += 1
        if self.count > 1:  # the first is its own mean
            self.deviations.append({name: weight - self.moments[name].mean for name, weight in weights.items()})

    def tensors(self) -> Params:
        """As SWAG collects them, named "kind/name"."""
        path = {f"mean/{name}": moments.mean for name, moments in self.moments.items()}
        path |= {f"spread/{name}": moments.squares for name, moments in self.moments.items()}
        if self.deviations:
            stacks = {name: torch.stack([each[name] for each in self.deviations]) for name in self.moments}
            path |= {f"deviations/{name}": stack for name, stack in stacks.items()}
        return path


@dataclass(frozen=True)
class _CollectedPath(Method):
    """SWAG along a path that was collected."""

    path: Params
    swag: SWAG
    starts_from: ClassVar[StartsFrom] = "trained"
    quick: ClassVar[Any] = None

    @property
    def default_draws(self) -> int:
        """Those of SWAG."""
        return self.swag.default_draws

    def memory(self, network: Network) -> int:
        """What SWAG needs."""
        return self.swag.memory(network)

    def fit(self, task: Task, start: State, run: Run) -> tuple[State, Info]:
        """The Gaussian of the path."""
        network = task.network.to(run.device)
        trained = network.params() | network.buffers()
        path = {name: tensor.to(run.device) for name, tensor in self.path.items()}
        return self.swag.along(task, start, path, trained, run)

    def draws(self, state: State, network: Network, n: int, rng: torch.Generator) -> Iterator[Params]:
        """Those of SWAG."""
        return self.swag.draws(state, network, n, rng)


@dataclass(frozen=True)
class _Members(Method):
    """An ensemble of points that were trained."""

    points: list[Params]
    ensemble: DeepEnsemble
    starts_from: ClassVar[StartsFrom] = "scratch"  # one member is no start, and need not have learned
    quick: ClassVar[Any] = None

    @property
    def default_draws(self) -> int:
        """As many as there are."""
        return self.ensemble.members

    def memory(self, network: Network) -> int:
        """What the ensemble needs."""
        return self.ensemble.memory(network)

    def fit(self, task: Task, start: State, run: Run) -> tuple[State, Info]:
        """The points side by side, each with its own noise where that is learned."""
        network = task.network.to(run.device)
        points = [{n: t.to(run.device) for n, t in point.items()} for point in self.points]
        learned: list[dict[str, Any]] = [task.fitted_hyper(network, point, task.validation) for point in points]
        noise = [{f"hyper/{n}": h[n] for n in h if n == "log_noise"} for h in learned]
        draws = [point | hyper for point, hyper in zip(points, noise, strict=True)]
        params = {name: torch.stack([draw[name] for draw in draws]) for name in draws[0]}
        return {"params": params, "hyper": task.hyper}, run.info(network, f"{len(points)} point estimates")

    def draws(self, state: State, network: Network, n: int, rng: torch.Generator) -> Iterator[Params]:
        """Those of the ensemble."""
        return self.ensemble.draws(state, network, n, rng)
