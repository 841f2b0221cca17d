"""Parallel chains: who moves which chain on which device, and with which random numbers.

Every random number of a chain comes from a stream of its own, named by seed, chain and iteration: a chain is the same
after a kill, bit for bit, and to rounding alone, beside others, on another rank and with other threads.
"""

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

import torch
from torch import Tensor

from caveat.engine.chains.coordinates import Coordinates
from caveat.engine.chains.log_posterior import Lane, Pieces, vmap_takes
from caveat.engine.distributed import Ranks
from caveat.engine.run import Run
from caveat.engine.training import has_batchnorm
from caveat.task import Task

__all__ = ["Chains", "random_stream", "say_what_is_left_out"]

Result = TypeVar("Result")
SMALL_PIECE = 2**24  # FLOP of a forward pass below which a second thread costs more in waiting than it brings


def random_stream(seed: int, *of: object, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator named by what it is for."""
    name = "/".join(map(str, (seed, *of)))
    return torch.Generator(device).manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:7]))


def say_what_is_left_out(task: Task, run: Run) -> None:
    """What a chain does not do with a task."""
    if has_batchnorm(task.network):
        run.warnings.append(
            "BatchNorm layers keep the statistics that the module came with, for every draw: a network with filter "
            "response normalisation (caveat.models.resnet20_frn) has none to keep"
        )
    if task.augment is not None:
        run.warnings.append(
            "the task's augment= is not used: augmented rows have no likelihood that chains could draw from"
        )


class Chains:
    """The chains of a run: which of them this process has, their lanes, and the threads that lanes run on.

    Ranks share out the chains where every rank gets as many as the others, otherwise the rows: each rank then moves all
    chains with the sums over its own rows, added up over the ranks. Rows may come in several `parts`. Chains that are
    not `batched` see rows of their own, so a lane has one of them.
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
    ) -> None:
        self.count, self.run, self.parts, self.network = count, run, parts, task.network.to(run.device)
        shared = count % run.ranks.size == 0
        self.ranks = Ranks() if shared else run.ranks  # that share the rows
        self.mine = run.ranks.mine(range(count)) if shared else [*range(count)]
        self.pieces = Pieces(task.train, self.network, parts, self.ranks)
        self._threads = torch.get_num_threads()
        plain = Lane.can_write_out(self.network, task.train)
        groups = self._groups(plain) if batched else [slice(i, i + 1) for i in range(len(self.mine))]
        # Which of this process's chains a lane has, and the lanes that share its rows.
        self.lanes: list[tuple[slice, Lane]] = []
        self._helpers: dict[Lane, list[Lane]] = {}
        for own in groups:
            team = [
                Lane(self.network, coordinates, own.stop - own.start, task.hyper, temperature)
                for _ in range(max(1, self._threads // len(groups)) if plain and not self.small else 1)
            ]
            self.lanes.append((own, team[0]))
            self._helpers[team[0]] = team[1:]
            if plain:
                for lane in team:
                    lane.write_out(task.train)
        self._pool: ThreadPoolExecutor | None = None

    @property
    def small(self) -> bool:
        """Whether a second thread would cost a piece of the rows more in waiting than it brings."""
        return self.pieces.flops_of_piece < SMALL_PIECE

    def _groups(self, plain: bool) -> list[slice]:
        """Which of this process's chains go together: on a CPU as many as there are threads, else all, where they can.

        Without backpropagation that is written out, a thread a chain is as fast on a CPU.
        """
        count = len(self.mine)
        if plain:
            at_once = -(-count // self._threads)
        elif self.network.device.type == "cpu" or count == 1:
            at_once = 1
        else:
            at_once = count if vmap_takes(self.network, next(iter(self.pieces.part()))[0]) else 1
        return [slice(i, min(i + at_once, count)) for i in range(0, count, at_once)]

    def __enter__(self) -> "Chains":
        teams = any(self._helpers.values())
        workers = self._threads if teams else min(len(self.lanes), self._threads)
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
        """Have the density in other coordinates."""
        for lane, helpers in self._helpers.items():
            for one in (lane, *helpers):
                one.coordinates = coordinates

    def each(self, work: Callable[[Lane, slice], Result]) -> list[Result]:
        """`work(lane, which chains)` for every lane, side by side where there are threads."""
        if self._pool is None:
            return [work(lane, own) for own, lane in self.lanes]
        return list(self._pool.map(lambda pair: work(pair[1], pair[0]), self.lanes))

    def gradient(self, lane: Lane, position: Tensor, part: int = 0) -> tuple[Tensor, Tensor]:
        """Log likelihood of one part of the rows and the gradient that it and its share of the prior give."""
        share, rows = 1 / (self.parts * self.ranks.size), self.pieces.part(part)
        helpers = self._helpers[lane] if self._pool is not None and isinstance(rows, list) else []
        count = 1 + len(helpers)
        others = [
            self._pool.submit(helper.gradient, position, rows[i::count], prior=0)  # type: ignore[union-attr, index]
            for i, helper in enumerate(helpers, 1)
        ]
        found = lane.gradient(position, rows[::count] if others else rows, prior=share)  # type: ignore[index]
        for other in others:
            for mine, its in zip(found, other.result(), strict=True):
                mine += its
        self.ranks.add(found)
        return found

    def density(self, lane: Lane, position: Tensor) -> tuple[Tensor, Tensor]:
        """Log likelihood of all rows, [chains], and log prior, both in float64."""
        likelihood = lane.log_likelihood(position, self.pieces.everything())
        self.ranks.add([likelihood])
        return likelihood, lane.log_prior(position)

    def everyones(self, own: Tensor) -> Tensor:
        """Rows of all chains, [chains, ...], from those of this process."""
        if len(self.mine) == self.count:
            return own
        everyone = own.new_zeros(self.count, *own.shape[1:])
        everyone[self.mine] = own
        self.run.ranks.add([everyone])
        return everyone

    def agreed(self, due: bool) -> bool:
        """What the first rank says."""
        if self.run.ranks.size == 1:
            return due
        said = torch.tensor([float(due and self.run.ranks.first)], device=self.network.device)
        self.run.ranks.add([said])
        return bool(said)

    def count_cost(self, gradients: float) -> None:
        """Add gradients over all rows, of all chains together, to the run's costs."""
        self.run.gradient_evaluations += gradients
        self.run.flops += 3 * self.pieces.flops * gradients  # a backward pass is two forward ones
