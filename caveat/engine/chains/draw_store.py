"""Draws of chains on disk: arrays [chains, draws, ...], mapped to files where the run has a folder.

Memory does not grow with the number of draws, and a checkpoint says only what is on disk already.
"""

import os
import sys
from collections.abc import Iterator

import torch
from numpy.lib.format import open_memmap
from torch import Tensor

from caveat.engine.chains.coordinates import Coordinates
from caveat.engine.cost import refuse_if_too_large
from caveat.engine.run import Run
from caveat.engine.weight_draws import pick
from caveat.network import Network, Params
from caveat.storage import CorruptFile, State

__all__ = ["DrawStore", "stored_draws"]


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


def stored_draws(state: State, network: Network, n: int, rng: torch.Generator) -> Iterator[Params]:
    """Draws of a state that holds chains: each as often as the others, in order."""
    chains, draws = next(iter(state["params"].values())).shape[:2]
    for i in pick(chains * draws, n, rng):
        yield {name: stack[i // draws, i % draws].to(network.device) for name, stack in state["params"].items()}
