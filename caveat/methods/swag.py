"""SWAG: a Gaussian fitted to the path of SGD around a trained point (Maddox et al. 2019).

    theta ~ N(mean, scale/2 (diag(variance) + D D^T / (K - 1))),   D = the last K iterates less the running mean
    theta = mean + sqrt(scale/2) variance^(1/2) z1 + sqrt(scale / (2 (K - 1))) D z2,   z1, z2 standard normal

One iterate is taken at the end of each epoch, at a constant learning rate. With rank 0 the covariance is
scale diag(variance). How far SGD wanders is a matter of learning rate, batch size and the order of the rows, not of the
posterior; so the path gives the shape, and the scale is found such that draws fit the training rows as much worse than
their mean as those of a posterior would: E[log p(D | mean) - log p(D | theta)] = d / 2, where d is the number of
directions that the rows tell something about.

A network with BatchNorm needs new statistics for every draw, which takes data; so a fixed set of draws is prepared
while fitting (only seeds and statistics are stored), and predictions choose among them.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from caveat.engine.flat_weights import flat
from caveat.engine.method import Method
from caveat.engine.predictors import pick
from caveat.engine.run import Info, Run, StartsFrom
from caveat.engine.running_moments import RunningMoments
from caveat.engine.state_checks import buffers_like, check_hyper, check_like, check_names, check_tensor, network_tensors
from caveat.engine.training import (
    Training,
    Variables,
    has_batchnorm,
    refreshed_statistics,
    statistic_names,
    train_point,
)
from caveat.knobs import Count, NonNegativeInt, Positive, check_knobs
from caveat.likelihoods import Hyper
from caveat.network import Network, Params
from caveat.storage import CorruptFile, State
from caveat.task import Task

__all__ = ["SWAG"]

# Of the path: a constant rate, so that SGD wanders, and a bound on steps, so that it does not stray.
OWN = Training(epochs=30, optimizer="sgd", learning_rate=0.1, schedule="constant", warmup=0.0, clip=1.0)


@dataclass(frozen=True)
class SWAG(Method):
    """A Gaussian around the average of SGD's path, its covariance low-rank plus diagonal."""

    rank: NonNegativeInt = 20  # last iterates that make up the low-rank part; 0 is diagonal
    scale: Positive | None = None  # multiplies the covariance: 1 is the paper's; None: as wide as a posterior would be
    default_draws: Count = 30  # a prediction's draws; with BatchNorm, the draws prepared while fitting
    training: Training = OWN
    starts_from: ClassVar[StartsFrom] = "trained"
    quick: ClassVar["SWAG"]

    def __post_init__(self) -> None:
        check_knobs(self)
        object.__setattr__(self, "training", self.training.filled(OWN))
        if self.training.patience:
            raise ValueError("SWAG averages over every epoch, so it cannot stop early: leave training.patience at 0")
        if self._epochs < (3 if self.rank else 2) or self.rank == 1:
            raise ValueError(
                f"SWAG needs a rank of 0 and 2 epochs, or a rank of at least 2 and 3 epochs, to see a spread; "
                f"got rank={self.rank}, epochs={self._epochs}"
            )

    @property
    def _columns(self) -> int:
        """Columns of D: the first iterate is its own mean, so it has no deviation."""
        return min(self.rank, self._epochs - 1)

    @property
    def _epochs(self) -> int:
        assert self.training.epochs is not None  # `OWN` has a number of them
        return self.training.epochs

    @property
    def _factor(self) -> float:
        """What multiplies the covariance that is stored: a scale that was found is in it already."""
        return 1.0 if self.scale is None else self.scale

    def memory(self, network: Network) -> int:
        """Bytes of two moments and of the deviations."""
        return (2 + self._columns) * network.n_parameters * network.dtype.itemsize

    def fit(self, task: Task, start: State, run: Run) -> tuple[State, Info]:
        """Follow SGD, collecting moments and the last iterates; refresh BatchNorm at the mean and for each draw."""
        network = task.network.to(run.device)
        path = _empty_path({name: start["params"][name] for name in network.names}, self._columns)
        training = _noisy(self.training, task, run)
        point = train_point(task, network, start, training, run, after_epoch=_collect, extra=path)
        state, info = self.along(task, start, path, point.params, run)
        return state, replace(info, diagnostics={"history": point.history} | info.diagnostics)

    def along(self, task: Task, start: State, path: Params, trained: Params, run: Run) -> tuple[State, Info]:
        """The posterior of a path of SGD, which need not be one that was followed here.

        `path` has, for each weight, "mean/<name>" over as many epochs as `training` has, "spread/<name>", the summed
        squares around it, and "deviations/<name>", the last iterates less the running mean; `trained` are the weights
        and buffers that training left.
        """
        network = task.network.to(run.device)
        gaussian = self._gaussian(path, trained, network)
        centre, prepared = gaussian.mean | gaussian.buffers, None
        if has_batchnorm(network):
            centre |= refreshed_statistics(network, centre, task.train)
        hyper = task.fitted_hyper(network, centre, task.validation)
        diagnostics: dict[str, Any] = {"scale": self.scale}
        if self.scale is None:
            width = _PosteriorWidth(task, network, centre, hyper)
            diagnostics |= {"scale": width.scale(gaussian, run), "directions": width.directions}
            gaussian = gaussian.scaled(diagnostics["scale"])
        if has_batchnorm(network):
            prepared = self._prepared_draws(gaussian, network, task, run)
        before, after = (
            float(task.log_likelihood(network, params, noise))
            for params, noise in ((start["params"], start["hyper"]), (centre, hyper))
        )
        if after < before - 0.05:
            run.warnings.append(
                f"the average of SGD's path fits the training rows worse than its start (log likelihood {after:.3f} a "
                f"row against {before:.3f}): lower training.learning_rate (now {self.training.descent.learning_rate:g})"
            )
        diagnostics["median_std"] = float(flat(network, gaussian.variance).sqrt().median())
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
            params = gaussian.draw(self._factor, torch.Generator().manual_seed(int(seeds[i])))
            mine[i] = refreshed_statistics(network, params, task.train)
        return PreparedDraws(seeds, run.ranks.gather(mine, self.default_draws))

    def check_state(self, state: State, network: Network) -> None:
        """Refuse a state that is not the Gaussian of a path of this network's weights."""
        swag = SWAGState.of(state)
        known = {"mean", "variance", "buffers", "hyper"} | ({"deviations"} if self._columns else set())
        check_names("state", state, known | ({"seeds", "statistics"} if has_batchnorm(network) else set()))
        weights, buffers = network_tensors(network)
        check_like("mean", swag.gaussian.mean, weights)
        check_like("variance", swag.gaussian.variance, weights)
        if any(bool((variance < 0).any()) for variance in swag.gaussian.variance.values()):
            raise CorruptFile("variance holds negative numbers")
        check_like("deviations", swag.gaussian.deviations, weights if self._columns else {}, (self._columns,))
        check_like("buffers", swag.gaussian.buffers, buffers_like(swag.gaussian.buffers, buffers))
        if swag.prepared is not None:
            draws = (self.default_draws,)
            check_tensor("seeds/seed", swag.prepared.seeds, draws, (torch.int64,))
            if bool((swag.prepared.seeds < 0).any()):
                raise CorruptFile("seeds/seed holds negative numbers")
            statistics = {name: buffers[name] for name in statistic_names(network)}
            check_like("statistics", swag.prepared.statistics, statistics, draws)
        check_hyper(swag.hyper, network)

    def draws(self, state: State, network: Network, n: int, rng: torch.Generator) -> Iterator[Params]:
        """N draws from the Gaussian; with BatchNorm, those whose statistics were prepared."""
        swag = SWAGState.of(state)
        if swag.prepared is None:
            for _ in range(n):
                yield swag.gaussian.draw(self._factor, rng)
            return
        seeds, statistics = swag.prepared.seeds, swag.prepared.statistics
        for i in pick(len(seeds), n, rng):
            params = swag.gaussian.draw(self._factor, torch.Generator().manual_seed(int(seeds[i])))
            yield params | {name: stack[i] for name, stack in statistics.items()}


@dataclass(frozen=True)
class PathGaussian:
    """The Gaussian of SGD's path."""

    mean: Params
    variance: Params  # shaped as the mean
    deviations: Params  # D, [K, ...] for each parameter; empty where the covariance is diagonal
    buffers: Params  # the same for every draw

    def scaled(self, scale: float) -> "PathGaussian":
        """The same with `scale` times the covariance."""
        variance = {name: scale * value for name, value in self.variance.items()}
        deviations = {name: math.sqrt(scale) * value for name, value in self.deviations.items()}
        return replace(self, variance=variance, deviations=deviations)

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


class _PosteriorWidth:
    """How wide a Gaussian of a given shape has to be, to be as wide as the posterior.

    Draws of a posterior N(mean, (H + P)^-1), H the curvature of -log p(D | theta) and P that of the prior, fit the rows
    worse than its mean by tr(H (H + P)^-1) / 2 = d / 2 on average. The trace d is the number of directions that the
    rows determine: at most the number D of weights, and at most n, one for each output of each row. Here it is
    D n / (D + n), near the smaller of the two, and half of it where they are alike. An output counts by the information
    that it has (its Fisher information) against that of a network which says nothing: a row that is classified with
    certainty determines nothing.

    Where few rows have taught the mean less than d / 2 more than the label marginals know, draws that fit so much worse
    would know nothing; they then lose half of what the mean has learned.
    """

    def __init__(self, task: Task, network: Network, centre: Params, hyper: Hyper, rows: int = 2000) -> None:
        self.task, self.network, self.centre, self.hyper = task, network, centre, hyper
        self.rows = task.train.some(rows)
        outputs, targets = task.outputs(network, centre, self.rows)
        information, most = (
            network.likelihood.fisher_trace(values, targets, hyper).double()
            for values in (outputs, torch.zeros_like(outputs))
        )
        share = (information / most.clamp_min(1e-30)).clamp(max=1).mean()
        numbers = task.n * outputs[0].numel() * float(share)
        weights = sum(centre[name].numel() for name in network.names)
        self.directions = weights * numbers / (weights + numbers)

    def scale(self, gaussian: "PathGaussian", run: Run) -> float:
        """The scale at which draws fit worse than the centre by half a unit for each direction."""
        if not any(bool(value.any()) for value in gaussian.variance.values()):
            run.warnings.append("SGD did not move, so that its path has no width: raise training.learning_rate")
            return 1.0
        # The loss of a draw is a sum over weights: of few weights it takes more draws to know its mean.
        draws = min(64, max(8, 2000 // sum(value.numel() for value in gaussian.variance.values())))
        best, log_scale = self._fit(self.centre), 0.0
        wanted, learned = 0.5 * self.directions, best - self.task.n * self.task.baseline
        if wanted > learned:
            if learned <= 0:
                run.warnings.append("the mean of SGD's path fits no better than the label marginals: its scale is 1")
                return 1.0
            run.warnings.append(
                f"the training rows have taught the mean of SGD's path {learned:.3g} nats, less than draws of a "
                f"posterior would lose of them ({wanted:.3g}): draws lose half, and more rows would tell their width"
            )
            wanted = 0.5 * learned
        low, high = -math.inf, math.inf  # between them is the scale, once both are found
        for _ in range(20):
            rng = torch.Generator().manual_seed(run.seed)  # the same draws but for their scale
            fits = (self._fit(gaussian.draw(math.exp(log_scale), rng)) for _ in range(draws))
            loss = best - sum(fits) / draws
            loss = loss if math.isfinite(loss) else math.inf
            ratio = min(16.0, max(1 / 16, wanted / max(loss, 1e-30)))
            if abs(math.log(ratio)) < 0.05:
                return math.exp(log_scale)
            low, high = (log_scale, high) if ratio > 1 else (low, log_scale)
            log_scale += math.log(ratio)  # right at once where the loss is quadratic
            if not low < log_scale < high:
                log_scale = (low + high) / 2
        run.warnings.append(
            f"no scale makes draws fit the training rows worse than their mean by {wanted:.3g}, as those of a "
            f"posterior would; {math.exp(log_scale):.3g} comes near: give scale, or another learning_rate"
        )
        return math.exp(log_scale)

    def _fit(self, params: Params) -> float:
        """The log likelihood of all training rows, estimated from some."""
        if has_batchnorm(self.network):
            params = params | refreshed_statistics(self.network, params, self.rows)
        return self.task.n * float(self.task.log_likelihood(self.network, params, self.hyper, self.rows))


def _noisy(training: Training, task: Task, run: Run) -> Training:
    """The knobs of the path: batches that are no more than a quarter of the rows, unless their size is given."""
    if training.batch_size is None:
        return replace(training, batch_size=min(task.train.batch_size, max(1, math.ceil(task.n / 4))))
    if training.batch_size >= task.n:
        run.warnings.append(
            f"batch_size={training.batch_size} takes all {task.n} training rows at once, so that SGD has no noise and "
            "the shape of its path says nothing of the posterior: take a quarter of the rows or fewer"
        )
    return training


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


SWAG.quick = SWAG(rank=10, scale=1.0, training=replace(SWAG().training, epochs=10))
