"""SWAG: a Gaussian fitted to the path of SGD around a trained point (Maddox et al. 2019).

    theta ~ N(mean, scale/2 (diag(variance) + D D^T / (K - 1))),   D = the last K iterates less the running mean
    theta = mean + sqrt(scale/2) variance^(1/2) z1 + sqrt(scale / (2 (K - 1))) D z2,   z1, z2 standard normal

One iterate is taken at the end of each epoch, at a constant learning rate. With rank 0 the covariance is
scale diag(variance). A network with BatchNorm needs new statistics for every draw, which takes data; so a fixed set of
draws is prepared while fitting (only seeds and statistics are stored), and predictions choose among them.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from caveat.engine.flat_weights import flat
from caveat.engine.method import Method
from caveat.engine.predictors import pick
from caveat.engine.run import Info, Run, StartsFrom
from caveat.engine.running_moments import RunningMoments
from caveat.engine.training import Training, Variables, has_batchnorm, refreshed_statistics, train_point
from caveat.knobs import Count, NonNegativeInt, Positive, check_knobs
from caveat.likelihoods import Hyper
from caveat.network import Network, Params
from caveat.storage import CorruptFile, State
from caveat.task import Task

__all__ = ["SWAG"]


@dataclass(frozen=True)
class SWAG(Method):
    """A Gaussian around the average of SGD's path, its covariance low-rank plus diagonal."""

    rank: NonNegativeInt = 20  # last iterates that make up the low-rank part; 0 is diagonal
    scale: Positive = 1.0  # multiplies the covariance; the paper's sampling formula is scale 1
    default_draws: Count = 30  # a prediction's draws; with BatchNorm, the draws prepared while fitting
    training: Training = Training(
        epochs=30, optimizer="sgd", learning_rate=0.1, schedule="constant", warmup=0.0, clip=1.0
    )
    starts_from: ClassVar[StartsFrom] = "trained"
    quick: ClassVar["SWAG"]

    def __post_init__(self) -> None:
        check_knobs(self)
        if self.training.patience:
            raise ValueError("SWAG averages over every epoch, so it cannot stop early: leave training.patience at 0")
        if self.training.epochs is None:
            raise ValueError("SWAG averages over epochs, so it has to know how many: give training.epochs")
        if self.training.epochs < (3 if self.rank else 2) or self.rank == 1:
            raise ValueError(
                f"SWAG needs a rank of 0 and 2 epochs, or a rank of at least 2 and 3 epochs, to see a spread; "
                f"got rank={self.rank}, epochs={self.training.epochs}"
            )

    @property
    def _columns(self) -> int:
        """Columns of D: the first iterate is its own mean, so it has no deviation."""
        return min(self.rank, self._epochs - 1)

    @property
    def _epochs(self) -> int:
        assert self.training.epochs is not None  # `__post_init__` has seen to it
        return self.training.epochs

    def memory(self, network: Network) -> int:
        """Bytes of two moments and of the deviations."""
        return (2 + self._columns) * network.n_parameters * network.dtype.itemsize

    def fit(self, task: Task, start: State, run: Run) -> tuple[State, Info]:
        """Follow SGD, collecting moments and the last iterates; refresh BatchNorm at the mean and for each draw."""
        network = task.network.to(run.device)
        path = _empty_path({name: start["params"][name] for name in network.names}, self._columns)
        point = train_point(task, network, start, self.training, run, after_epoch=_collect, extra=path)
        gaussian = self._gaussian(path, point.params, network)
        centre, prepared = gaussian.mean | gaussian.buffers, None
        if has_batchnorm(network):
            centre |= refreshed_statistics(network, centre, task.train)
            prepared = self._prepared_draws(gaussian, network, task, run)
        hyper = task.fitted_hyper(network, centre, task.validation)
        before, after = (
            float(task.log_likelihood(network, params, noise))
            for params, noise in ((start["params"], start["hyper"]), (centre, hyper))
        )
        if after < before - 0.05:
            run.warnings.append(
                f"the average of SGD's path fits the training rows worse than its start (log likelihood {after:.3f} a "
                f"row against {before:.3f}): lower training.learning_rate (now {self.training.learning_rate:g})"
            )
        diagnostics = {"history": point.history, "median_std": float(flat(network, gaussian.variance).sqrt().median())}
        treatment = f"Gaussian, diagonal + rank {self._columns}" if self._columns else "diagonal Gaussian"
        return SWAGState(gaussian, hyper, prepared).tensors(), run.info(network, treatment, diagnostics)

    def _gaussian(self, path: Params, trained: Params, network: Network) -> "PathGaussian":
        """The Gaussian that the path of SGD gives, with the buffers that training left."""
        mean, squares, deviations = (
            {name: path[f"{kind}/{name}"] for name in network.names if f"{kind}/{name}" in path}
            for kind in ("mean", "spread", "deviations")
        )
        variance = {name: square / self._epochs for name, square in squares.items()}
        buffers = {name: value for name, value in trained.items() if name not in mean}
        return PathGaussian(mean, variance, deviations, buffers)

    def _prepared_draws(self, gaussian: "PathGaussian", network: Network, task: Task, run: Run) -> "PreparedDraws":
        """Seeds of draws, and the BatchNorm statistics of each."""
        seeds = torch.randint(2**62, (self.default_draws,), generator=run.rng)
        mine = {}
        for i in run.ranks.mine(range(self.default_draws)):
            params = gaussian.draw(self.scale, torch.Generator().manual_seed(int(seeds[i])))
            mine[i] = refreshed_statistics(network, params, task.train)
        return PreparedDraws(seeds, run.ranks.gather(mine, self.default_draws))

    def draws(self, state: State, network: Network, n: int, rng: torch.Generator) -> Iterator[Params]:
        """N draws from the Gaussian; with BatchNorm, those whose statistics were prepared."""
        swag = SWAGState.of(state)
        if swag.prepared is None:
            for _ in range(n):
                yield swag.gaussian.draw(self.scale, rng)
            return
        seeds, statistics = swag.prepared.seeds, swag.prepared.statistics
        for i in pick(len(seeds), n, rng):
            params = swag.gaussian.draw(self.scale, torch.Generator().manual_seed(int(seeds[i])))
            yield params | {name: stack[i] for name, stack in statistics.items()}


@dataclass(frozen=True)
class PathGaussian:
    """The Gaussian of SGD's path."""

    mean: Params
    variance: Params  # shaped as the mean
    deviations: Params  # D, [K, ...] for each parameter; empty where the covariance is diagonal
    buffers: Params  # the same for every draw

    def draw(self, scale: float, rng: torch.Generator) -> Params:
        """One draw of the weights, with the buffers."""
        columns = len(next(iter(self.deviations.values()))) if self.deviations else 0
        z2 = torch.randn(columns, generator=rng, dtype=torch.float64)
        params: Params = dict(self.buffers)
        for name, mean in self.mean.items():
            z1 = torch.randn(mean.shape, generator=rng, dtype=mean.dtype).to(mean.device)
            half = 0.5 if columns else 1.0
            params[name] = mean + math.sqrt(scale * half) * self.variance[name].sqrt() * z1
            if columns:
                weights = (math.sqrt(scale * 0.5 / (columns - 1)) * z2).to(mean.device, mean.dtype)
                params[name] = params[name] + torch.tensordot(weights, self.deviations[name], 1)
        return params


@dataclass(frozen=True)
class PreparedDraws:
    """The draws of a network with BatchNorm: the seed of each, and its statistics."""

    seeds: Tensor  # [draws]
    statistics: Params  # [draws, ...] for each buffer of BatchNorm


@dataclass(frozen=True)
class SWAGState:
    """What a SWAG posterior keeps."""

    gaussian: PathGaussian
    hyper: Hyper
    prepared: PreparedDraws | None = None  # where the network has BatchNorm

    def tensors(self) -> State:
        """As a posterior keeps it, by group and name."""
        gaussian = self.gaussian
        state: State = {"mean": gaussian.mean}
        state |= {"deviations": gaussian.deviations} if gaussian.deviations else {}
        state |= {"variance": gaussian.variance, "buffers": gaussian.buffers}
        if self.prepared is not None:
            state |= {"seeds": {"seed": self.prepared.seeds}, "statistics": self.prepared.statistics}
        return state | {"hyper": self.hyper}

    @classmethod
    def of(cls, state: State) -> "SWAGState":
        """The state that `tensors` made groups of."""
        missing = {"mean", "variance", "buffers", "hyper"} - state.keys()
        missing |= {"statistics"} - state.keys() if "seeds" in state else set()
        if missing:
            raise CorruptFile(f"this is not the state of a SWAG posterior: it has no group {sorted(missing)[0]!r}")
        deviations = state.get("deviations", {})
        for group, tensors in (("variance", state["variance"]), ("deviations", deviations or state["mean"])):
            if tensors.keys() != state["mean"].keys():
                raise CorruptFile(
                    f"this is not the state of a SWAG posterior: {group!r} is not about the same weights as its mean"
                )
        gaussian = PathGaussian(state["mean"], state["variance"], deviations, state["buffers"])
        prepared = PreparedDraws(state["seeds"]["seed"], state["statistics"]) if "seeds" in state else None
        return cls(gaussian, state["hyper"], prepared)


def _empty_path(weights: Params, columns: int) -> Params:
    """What is collected along the path, named "kind/name", before its first epoch."""
    path = {f"{kind}/{name}": torch.zeros_like(w) for kind in ("mean", "spread") for name, w in weights.items()}
    if columns:
        path |= {f"deviations/{name}": w.new_zeros((columns, *w.shape)) for name, w in weights.items()}
    return path


def _collect(epoch: int, variables: Variables) -> None:
    """Add an epoch's iterate to the running moments, and its deviation from their mean to the last ones."""
    for name, parameter in variables.weights.items():
        weight, path = parameter.detach(), variables.extra
        moments = RunningMoments(path[f"mean/{name}"], path[f"spread/{name}"], count=epoch - 1)
        moments.add(weight)
        deviations: Tensor | None = path.get(f"deviations/{name}")
        if deviations is not None:
            deviations[(epoch - 1) % len(deviations)] = weight - moments.mean


SWAG.quick = SWAG(rank=10, training=replace(SWAG().training, epochs=10))
