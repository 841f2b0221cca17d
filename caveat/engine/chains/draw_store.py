"""Where draws of chains are written as they are made: arrays [chains, draws, ...], in files if the run has a folder.

Memory then does not grow with the number of draws, and a checkpoint refers only to draws that are on disk already.
"""

import hashlib
import os
import sys
from typing import Any

import torch
from numpy.lib.format import open_memmap
from torch import Tensor

from caveat.engine.chains.chain_state import ChainState
from caveat.engine.chains.coordinates import Coordinates
from caveat.engine.cost import refuse_if_too_large
from caveat.engine.run import Run
from caveat.likelihoods import Hyper
from caveat.network import Params
from caveat.storage import CorruptFile

__all__ = ["DrawStore"]


class DrawStore:
    """Arrays of weights [chains, draws, ...] and of statistics [chains, draws], in files where the run has a folder.

    `size` is (chains, draws), and `stats` has the name and type of each statistic.
    """

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
        self.params: Params = {
            name: self._array(f"params-{i}", (*size, *shape), dtype) for i, (name, shape) in enumerate(shapes.items())
        }
        self.stats: Params = {name: self._array(f"stats-{name}", size, kind) for name, kind in stats.items()}
        self._pieces: list[dict[str, Any]] = []  # of the draws that checkpoints refer to: which, and their digest
        self._since, self._digest = 0, hashlib.sha256()  # of the draws that were written since
        self._next = 0

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
        array = torch.from_numpy(open_memmap(path, "r+"))
        if array.shape != shape or array.dtype != dtype:
            raise CorruptFile(f"{path} is not the file that was begun: delete {self.run.folder}")
        return array

    def flush(self) -> list[dict[str, Any]]:
        """Make sure that all draws are on disk before a checkpoint refers to them; what it keeps to know them by."""
        for path in self.run.folder.glob("*.npy") if self.run.folder is not None and self.run.ranks.first else ():
            with path.open("rb") as file_itself:
                os.fsync(file_itself.fileno())
        if self._next > self._since:
            piece = {"first": self._since, "next": self._next, "digest": self._digest.hexdigest()}
            self._pieces.append(piece)
            self._since, self._digest = self._next, hashlib.sha256()
        return self._pieces

    def take_up(self, pieces: list[dict[str, Any]] | None) -> None:
        """Go on after the draws that a checkpoint refers to, once they are known to be as they were written.

        Checkpoints of before draws had digests come with None: their draws are taken as they are.
        """
        for piece in (pieces or []) if self.run.ranks.first else []:
            digest = hashlib.sha256()
            for draw in range(piece["first"], piece["next"]):
                for array in (*self.params.values(), *self.stats.values()):
                    digest.update(array[:, draw].contiguous().numpy().tobytes())
            if digest.hexdigest() != piece["digest"]:
                raise CorruptFile(
                    f"draws {piece['first']} to {piece['next'] - 1} in {self.run.folder} are not as they were written "
                    "(a file that was cut or edited, or a broken disk): delete that folder, and the chains begin again"
                )
        self._pieces = list(pieces or [])
        self._since = self._next = self._pieces[-1]["next"] if self._pieces else 0

    def write(self, draw: int, weights: Tensor, stats: Params) -> None:
        """Write one draw of every chain: its flat weights [chains, P] and statistics [chains]."""
        if self.run.folder is not None and not self.run.ranks.first:
            return  # the first rank writes the files
        for name, value in self.coordinates.split(weights.cpu()).items():
            self.params[name][:, draw] = value
        for name, value in stats.items():
            self.stats[name][:, draw] = value.cpu()
        if self.run.folder is not None:
            for array in (*self.params.values(), *self.stats.values()):
                self._digest.update(array[:, draw].contiguous().numpy().tobytes())
            self._next = draw + 1

    def state(self, hyper: Hyper) -> ChainState:
        """All that was written, with what the likelihood takes beside each draw."""
        return ChainState(self.params, self.stats, {name: value.to(self.run.device) for name, value in hyper.items()})
