"""Chains: what Markov chain methods share. Who moves which chain where, random streams, and the store of draws.

Every random number of a chain comes from a stream of its own, named by seed, chain and iteration: a chain is the same
after a kill, bit for bit, and to rounding alone, beside others, on another rank and with other threads. Draws go into
arrays [chains, draws, ...] that are mapped to files where the run has a folder, so that memory does not grow with their
number.
"""

import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

import torch
from numpy.lib.format import open_memmap
from torch import Tensor

from caveat.engine.batchnorm import has_batchnorm
from caveat.engine.coordinates import Coordinates
from caveat.engine.cost import refuse_if_too_large
from caveat.engine.distributed import Ranks
from caveat.engine.draws import pick
from caveat.engine.run import Run
from caveat.engine.target import Lane, Pieces, vmap_takes
from caveat.network import Network, Params
from caveat.storage import CorruptFile, State
from caveat.task import Task

__all__ = ["Chains", "DrawStore", "random_stream", "say_what_is_left_out", "stored_draws"]

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


def stored_draws(method: Any, state: State, network: Network, n: int, rng: torch.Generator) -> Iterator[Params]:
    """The `draws` of a method whose state holds chains: each draw as often as the others, in order."""
    chains, draws = next(iter(state["params"].values())).shape[:2]
    for i in pick(chains * draws, n, rng):
        yield {name: stack[i // draws, i % draws].to(network.device) for name, stack in state["params"].items()}


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


class DrawStore:
    """Arrays [chains, draws, ...] of weights and of statistics, in files where the run has a folder."""

    def __init__(
        self,
        run: Run,
        dtype: torch.dtype,
        coordinates: Coordinates,
        size: tuple[int, int],
        stats: dict[str, torch.dtype],
    ) -> None:
        self.run, self.coordinates = run, coordinates
        if run.folder is None:
            needed = size[0] * size[1] * coordinates.size * dtype.itemsize
            what = f"keeping {size[0]} x {size[1]} draws of {coordinates.size:,} numbers in memory"
            refuse_if_too_large(what, needed, torch.device("cpu"), "give the fit a folder=, which keeps them on disk")
        shapes = {name: shape for name, (_, shape) in coordinates.places.items()}
        self.state: State = {
            "params": {n: self._array(f"params-{i}", (*size, *shapes[n]), dtype) for i, n in enumerate(shapes)},
            "stats": {name: self._array(f"stats-{name}", size, kind) for name, kind in stats.items()},
        }

    def _array(self, file: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self.run.folder is None:
            return torch.zeros(shape, dtype=dtype)
        path, kind = self.run.folder / f"{file}.npy", torch.zeros((), dtype=dtype).numpy().dtype
        begun = (self.run.folder / "checkpoint.json").exists()
        if begun and not path.exists():
            raise CorruptFile(f"{path} is missing, and with it draws that were made: delete {self.run.folder}")
        if self.run.ranks.first and not begun:
            open_memmap(path, "w+", kind, shape).flush()
            if sys.platform == "linux":  # a full disk is an error now, not a fault in the middle
                with path.open("r+b") as file_itself:
                    os.posix_fallocate(file_itself.fileno(), 0, path.stat().st_size)
        self.run.ranks.wait()
        found = torch.from_numpy(open_memmap(path, "r+"))
        if found.shape != shape or found.dtype != dtype:
            raise CorruptFile(f"{path} is not the file that was begun: delete {self.run.folder}")
        return found

    def flush(self) -> None:
        """Have the draws on disk before a checkpoint says that they are."""
        for path in self.run.folder.glob("*.npy") if self.run.folder is not None and self.run.ranks.first else ():
            with path.open("rb") as file_itself:
                os.fsync(file_itself.fileno())

    def write(self, draw: int, weights: Tensor, stats: Params) -> None:
        """One draw of every chain: flat weights [chains, P] and statistics [chains]."""
        if self.run.folder is not None and not self.run.ranks.first:
            return  # the first rank writes the files
        for name, value in self.coordinates.split(weights.cpu()).items():
            self.state["params"][name][:, draw] = value
        for name, value in stats.items():
            self.state["stats"][name][:, draw] = value.cpu()
