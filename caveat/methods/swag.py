"""SWAG: a Gaussian fitted to the path of SGD around a trained point (Maddox et al. 2019).

    theta ~ N(mean, scale/2 (diag(variance) + D D^T / (K - 1))),   D = the last K iterates less the running mean
    theta = mean + sqrt(scale/2) variance^(1/2) z1 + sqrt(scale / (2 (K - 1))) D z2,   z1, z2 standard normal

The iterates are taken once an epoch at a constant learning rate. With rank 0 the covariance is scale diag(variance). A
network with BatchNorm needs its statistics again for every draw; that takes data, so a fixed set of draws is prepared
while fitting (only seeds and statistics are stored) and predictions choose among them.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from caveat.engine.method import Method
from caveat.engine.run import Info, Run, StartsFrom
from caveat.engine.running_moments import RunningMoments
from caveat.engine.training import Training, Variables, has_batchnorm, refreshed_statistics, train_point
from caveat.engine.weight_draws import pick
from caveat.knobs import Count, NonNegativeInt, Positive, check_knobs
from caveat.network import Network, Params
from caveat.storage import State
from caveat.task import Task

__all__ = ["SWAG"]


@dataclass(frozen=True)
class SWAG(Method):
    """A Gaussian around the average of SGD's path, its covariance low-rank plus diagonal."""

    rank: NonNegativeInt = 20  # iterates kept for the low-rank part; 0 is diagonal
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
        if self.training.epochs < (3 if self.rank else 2) or self.rank == 1:
            raise ValueError(
                f"SWAG needs a rank of 0 and 2 epochs, or a rank of at least 2 and 3 epochs, to see a spread; "
                f"got rank={self.rank}, epochs={self.training.epochs}"
            )

    @property
    def _kept(self) -> int:
        """Columns of D: the first iterate is its own mean, so it has no deviation."""
        return min(self.rank, self.training.epochs - 1)

    def memory(self, network: Network) -> int:
        """Two moments and the kept iterates."""
        return (2 + self._kept) * network.n_parameters * network.dtype.itemsize

    def fit(self, task: Task, start: State, run: Run) -> tuple[State, Info]:
        """Follow SGD, keep moments and the last iterates; refresh BatchNorm at the mean and for each prepared draw."""
        network = task.network.to(run.device)
        weights = {name: start["params"][name] for name in network.names}
        extra = {f"{kind}/{name}": torch.zeros_like(w) for kind in ("mean", "spread") for name, w in weights.items()}
        if self._kept:
            extra |= {f"deviations/{name}": w.new_zeros((self._kept, *w.shape)) for name, w in weights.items()}
        point = train_point(task, network, start, self.training, run, after_epoch=_collect, extra=extra)
        kinds = dict.fromkeys(key.split("/", 1)[0] for key in extra)
        state: State = {kind: {name: extra[f"{kind}/{name}"] for name in weights} for kind in kinds}
        state["variance"] = {name: s / self.training.epochs for name, s in state.pop("spread").items()}
        state["buffers"] = {name: value for name, value in point.params.items() if name not in weights}
        centre = state["mean"] | state["buffers"]
        if has_batchnorm(network):
            centre |= refreshed_statistics(network, centre, task.train)
            state |= self._prepared_draws(state, network, task, run)
        state["hyper"] = task.fitted_hyper(network, centre, task.validation)
        before, after = (
            float(task.log_likelihood(network, params, hyper))
            for params, hyper in ((start["params"], start["hyper"]), (centre, state["hyper"]))
        )
        if after < before - 0.05:
            run.warnings.append(
                f"the average of SGD's path fits the training rows worse than its start (log likelihood {after:.3f} a "
                f"row against {before:.3f}): lower training.learning_rate (now {self.training.learning_rate:g})"
            )
        diagnostics = {"history": point.history, "median_std": _median_std(state["variance"])}
        treatment = f"Gaussian, diagonal + rank {self._kept}" if self._kept else "diagonal Gaussian"
        return state, run.info(network, treatment, diagnostics)

    def _prepared_draws(self, state: State, network: Network, task: Task, run: Run) -> State:
        """Seeds of draws, and the BatchNorm statistics of each."""
        seeds = torch.randint(2**62, (self.default_draws,), generator=run.rng)
        mine = {}
        for i in run.ranks.mine(range(self.default_draws)):
            params = self._draw(state, torch.Generator().manual_seed(int(seeds[i])))
            mine[i] = refreshed_statistics(network, params, task.train)
        return {"seeds": {"seed": seeds}, "statistics": run.ranks.gather(mine, self.default_draws)}

    def draws(self, state: State, network: Network, n: int, rng: torch.Generator) -> Iterator[Params]:
        """Draws from the Gaussian; with BatchNorm, those whose statistics were prepared."""
        if "seeds" not in state:
            for _ in range(n):
                yield self._draw(state, rng)
            return
        seeds = state["seeds"]["seed"]
        for i in pick(len(seeds), n, rng):
            params = self._draw(state, torch.Generator().manual_seed(int(seeds[i])))
            yield params | {name: stack[i] for name, stack in state["statistics"].items()}

    def _draw(self, state: State, rng: torch.Generator) -> Params:
        kept = len(next(iter(state["deviations"].values()))) if "deviations" in state else 0
        z2 = torch.randn(kept, generator=rng, dtype=torch.float64)
        drawn: Params = dict(state["buffers"])
        for name, mean in state["mean"].items():
            z1 = torch.randn(mean.shape, generator=rng, dtype=mean.dtype).to(mean.device)
            half = 0.5 if kept else 1.0
            drawn[name] = mean + math.sqrt(self.scale * half) * state["variance"][name].sqrt() * z1
            if kept:
                weights = (math.sqrt(self.scale * 0.5 / (kept - 1)) * z2).to(mean.device, mean.dtype)
                drawn[name] = drawn[name] + torch.tensordot(weights, state["deviations"][name], 1)
        return drawn


def _collect(epoch: int, variables: Variables) -> None:
    """Add an epoch's iterate to the running moments, and its deviation from their mean to the last ones."""
    for name, parameter in variables.weights.items():
        weight, path = parameter.detach(), variables.extra
        moments = RunningMoments(path[f"mean/{name}"], path[f"spread/{name}"], count=epoch - 1)
        moments.add(weight)
        deviations: Tensor | None = path.get(f"deviations/{name}")
        if deviations is not None:
            deviations[(epoch - 1) % len(deviations)] = weight - moments.mean


def _median_std(variance: Params) -> float:
    return float(torch.cat([v.flatten() for v in variance.values()]).sqrt().median())


SWAG.quick = SWAG(rank=10, training=replace(SWAG().training, epochs=10))
