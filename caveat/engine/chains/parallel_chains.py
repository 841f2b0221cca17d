"""Parallel chains: which process and thread moves which chain, on which device, and with which random numbers.

Every random number of a chain comes from a stream of its own, named by seed, chain and iteration. A chain that is
killed and resumed is therefore the same bit for bit, and a chain is the same up to rounding whether it runs alone or
beside others, on another rank or with another number of threads.
"""

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import TypeVar

import torch
from torch import Tensor, nn

from caveat.engine.captured_steps import CaptureError, captured
from caveat.engine.chains.coordinates import Coordinates
from caveat.engine.chains.hamiltonian import FusedStack, integrate
from caveat.engine.chains.log_posterior import (
    LogPosterior,
    PassSettings,
    RowPieces,
    log_likelihood_of,
    vmap_takes,
)
from caveat.engine.distributed import Ranks
from caveat.engine.run import Run
from caveat.engine.training import has_batchnorm
from caveat.rows import Batch
from caveat.task import Task

__all__ = ["ParallelChains", "random_stream", "warn_of_what_chains_ignore"]

Result = TypeVar("Result")
SMALL_PIECE = 2**24  # FLOP of a forward pass below which a second thread costs more in waiting than it brings


def random_stream(seed: int, *of: object, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator whose seed comes from a name: the run's seed, and what the numbers are for."""
    name = "/".join(map(str, (seed, *of)))
    return torch.Generator(device).manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big"))


def warn_of_what_chains_ignore(task: Task, run: Run, *, augments: bool = False) -> None:
    """Warn of what a task asks for and chains do not do: BatchNorm statistics of each draw, and augmentation.

    With `augments` it is done, and said to be.
    """
    if has_batchnorm(task.network):
        run.warnings.append(
            "BatchNorm layers keep the statistics that the module came with, for every draw: a network with filter "
            "response normalisation (caveat.models.resnet20_frn) has none to keep"
        )
    if augments and task.augment is None:
        raise ValueError("augment=True has nothing to augment with: give the task augment=")
    if augments:
        run.warnings.append(
            "rows are augmented in every step: what chains then draw from is the posterior of no likelihood, and is "
            "wider than that of the rows as they are; log densities are those of the rows as they are"
        )
    elif task.augment is not None:
        run.warnings.append(
            "the task's augment= is not used: augmented rows have no likelihood that chains could draw from"
        )


class ParallelChains:
    """The chains of a run: which of them this process moves, their log posteriors, and the threads for these.

    If every rank can have as many chains as the others, the ranks divide the chains; otherwise they divide the rows,
    and each rank moves all chains by sums over its rows that are added up over the ranks. Rows may come in several
    `parts`. Chains that are not `batched` see different rows at a time, so each has a log posterior of its own. The
    `settings` of a pass hold for `rows_of_step` rows at a time, or for the pieces in which all rows are seen.
    """

    def __init__(
        self,
        task: Task,
        run: Run,
        count: int,
        coordinates: Coordinates,
        *,
        temperature: float = 1.0,
        parts: int = 1,
        batched: bool = True,
        settings: PassSettings | None = None,
        rows_of_step: int | None = None,
    ) -> None:
        self._settings = settings or PassSettings()
        self.count, self.run, self.parts, self.network = count, run, parts, task.network.to(run.device)
        divided = count % run.ranks.size == 0
        self.ranks = Ranks() if divided else run.ranks  # those that divide the rows
        self.mine = run.ranks.mine(range(count)) if divided else [*range(count)]  # the chains of this process
        self.pieces = RowPieces(task.train, self.network, parts, self.ranks)
        self._threads = torch.get_num_threads()
        plain = self._settings.plain and LogPosterior.can_use_perceptron(self.network, task.train)
        groups = self._groups(plain) if batched else [slice(i, i + 1) for i in range(len(self.mine))]
        # Which of this process's chains each log posterior serves, and its helpers, which take a share of the rows.
        self.log_posteriors: list[tuple[slice, LogPosterior]] = []
        self._helpers: dict[LogPosterior, list[LogPosterior]] = {}
        on_gpu = self.network.device.type == "cuda"
        function = None
        if on_gpu or not self._settings.plain:
            function = log_likelihood_of(self.network, self._settings, rows_of_step or self.pieces.size)
        for which in groups:
            team = [
                LogPosterior(self.network, coordinates, which.stop - which.start, task.hyper, temperature, function)
                for _ in range(max(1, self._threads // len(groups)) if plain and not self.small else 1)
            ]
            self.log_posteriors.append((which, team[0]))
            self._helpers[team[0]] = team[1:]
            if plain:
                for log_posterior in team:
                    log_posterior.use_perceptron(task.train)
        self._pool: ThreadPoolExecutor | None = None
        self._fused = self._fused_stack(task) if plain and batched else None
        self._captures = on_gpu and self.ranks.size == 1
        self._captured: dict[tuple[LogPosterior, int], Callable[[Tensor], tuple[Tensor, ...]]] = {}

    def _fused_stack(self, task: Task) -> FusedStack | None:
        """The native code for whole trajectories, where it serves: all rows here, in memory, with labels."""
        rows, labels = self.pieces.part(), LogPosterior.is_softmax_at_labels(self.network, task.train)
        here = self.parts == 1 and self.ranks.size == 1 and isinstance(rows, list)
        return FusedStack.of(self.network.module, rows) if here and labels else None

    @property
    def small(self) -> bool:
        """Whether pieces of the rows are so small that a second thread would only slow them down."""
        return self.pieces.flops_of_piece < SMALL_PIECE

    def _groups(self, plain: bool) -> list[slice]:
        """Which of this process's chains share a log posterior.

        Plain stacks on a CPU make as many groups as there are threads. Other networks have one chain a group on a CPU,
        where that is as fast, and all chains in one group on a GPU if torch.vmap can do that and does it well: it makes
        grouped convolutions of convolutions, which take five times as long.
        """
        count = len(self.mine)
        if plain:
            at_once = -(-count // self._threads)
        elif self.network.device.type == "cpu" or count == 1 or not self._settings.plain or self._convolves():
            at_once = 1
        else:
            at_once = count if vmap_takes(self.network, next(iter(self.pieces.part()))[0]) else 1
        return [slice(i, min(i + at_once, count)) for i in range(0, count, at_once)]

    def _convolves(self) -> bool:
        return any(isinstance(module, nn.modules.conv._ConvNd) for module in self.network.module.modules())

    def __enter__(self) -> "ParallelChains":
        if not self._settings.plain:
            return self  # chains share one pass, so they take turns
        teams = any(self._helpers.values())
        workers = self._threads if teams else min(len(self.log_posteriors), self._threads)
        threads = 1 if self.small or teams else max(1, self._threads // workers)
        if threads < self._threads and self.network.device.type == "cpu" and self.ranks.size == 1:
            share = (threads,)
            self._pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=share)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            torch.set_num_threads(self._threads)

    def use(self, coordinates: Coordinates) -> None:
        """Go on in other coordinates."""
        self._captured.clear()
        for leader, helpers in self._helpers.items():
            for log_posterior in (leader, *helpers):
                log_posterior.coordinates = coordinates

    def each(self, work: Callable[[LogPosterior, slice], Result]) -> list[Result]:
        """Call `work(log_posterior, which chains)` for every log posterior, in parallel where there are threads."""
        if self._pool is None:
            return [work(log_posterior, which) for which, log_posterior in self.log_posteriors]
        return list(self._pool.map(lambda pair: work(pair[1], pair[0]), self.log_posteriors))

    def gradient(self, log_posterior: LogPosterior, position: Tensor, part: int = 0) -> tuple[Tensor, Tensor]:
        """The log likelihood of one part of the rows, [chains], and the gradient of it and its share of the prior.

        Positions and gradients are [chains, P].
        """
        share, rows = 1 / (self.parts * self.ranks.size), self.pieces.part(part)
        if self._captures and isinstance(rows, list):
            return self._captured_gradient(log_posterior, position, part, rows, share)
        helpers = self._helpers[log_posterior] if self._pool is not None and isinstance(rows, list) else []
        count = 1 + len(helpers)
        others = [
            self._pool.submit(helper.gradient, position, rows[i::count], prior_weight=0)  # type: ignore[union-attr, index]
            for i, helper in enumerate(helpers, 1)
        ]
        rows_here = rows[::count] if others else rows  # type: ignore[index]
        sums = log_posterior.gradient(position, rows_here, prior_weight=share)
        for other in others:
            for total, summand in zip(sums, other.result(), strict=True):
                total += summand
        self.ranks.add(sums)
        return sums

    def trajectory(
        self,
        log_posterior: LogPosterior,
        position: Tensor,
        momentum: Tensor,
        first: Tensor,
        step_size: float,
        steps: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Position, momentum, and the first part's log likelihood and gradient at the end of so many leapfrog steps.

        All of them [chains, P] but the log likelihood, [chains]; `first` is the gradient at the beginning.
        """
        if self._fused is not None and self._fused.serves(log_posterior.coordinates):
            threads = max(1, self._threads // len(self.log_posteriors))
            return self._fused.follow(log_posterior, position, momentum, first, step_size, steps, threads=threads)
        gradient = partial(self.gradient, log_posterior)
        return integrate(gradient, position, momentum, first, step_size, steps, self.parts)

    def _captured_gradient(
        self, log_posterior: LogPosterior, position: Tensor, part: int, rows: list[Batch], share: float
    ) -> tuple[Tensor, Tensor]:
        """The same as `gradient`, recorded at the first call and replayed afterwards."""
        key = log_posterior, part
        try:
            if key not in self._captured:
                gradient = partial(log_posterior.gradient, rows=rows, prior_weight=share)
                self._captured[key] = captured(gradient, position)
        except CaptureError as error:
            self._captures = False
            self.run.warnings.append(f"{error}: gradients are made operation by operation")
            return log_posterior.gradient(position, rows, prior_weight=share)
        total, summed = self._captured[key](position)
        return total, summed

    def densities(self, log_posterior: LogPosterior, position: Tensor) -> tuple[Tensor, Tensor]:
        """The log likelihood of all rows and the log prior at positions [chains, P], each [chains] in float64."""
        likelihood = log_posterior.log_likelihood(position, self.pieces.everything())
        self.ranks.add([likelihood])
        return likelihood, log_posterior.log_prior(position)

    def everyones(self, mine: Tensor) -> Tensor:
        """The values of all chains, [chains, ...], from those of this process's chains."""
        if len(self.mine) == self.count:
            return mine
        everyone = mine.new_zeros(self.count, *mine.shape[1:])
        everyone[self.mine] = mine
        self.run.ranks.add([everyone])
        return everyone

    def agreed(self, due: bool) -> bool:
        """What the first rank says is due."""
        if self.run.ranks.size == 1:
            return due
        said = torch.tensor([float(due and self.run.ranks.first)], device=self.network.device)
        self.run.ranks.add([said])
        return bool(said)

    def count_cost(self, gradients: float) -> None:
        """Add the cost of so many gradients over all rows, of all chains together, to the run's."""
        self.run.gradient_evaluations += gradients
        self.run.flops += 3 * self.pieces.flops * gradients  # a backward pass is two forward ones
