"""Ranks: the processes that torchrun started, or just this one. Sums over ranks are torch.distributed's.

Methods split work in two ways: the rows of a batch (sums are then added up), or whole members and chains (results are then
exchanged). Both come down to `add`: a rank that has nothing to say adds zeros.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, distributed

from caveat.priors import Params

__all__ = ["Ranks", "current_ranks"]


@dataclass(frozen=True)
class Ranks:
    """This process's place among `size` processes."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.rank == 0

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by its sum over the ranks, in place."""
        if self.size > 1:
            for tensor in tensors:
                distributed.all_reduce(tensor)

    def mine(self, jobs: Sequence[int]) -> list[int]:
        """The jobs of this rank, dealt out in turn."""
        return list(jobs[self.rank :: self.size])

    def part(self, rows: Tensor) -> Tensor:
        """This rank's consecutive share of the rows (of near equal size; it may be empty)."""
        return rows.tensor_split(self.size)[self.rank]

    def gather(self, mine: dict[int, Params], count: int) -> Params:
        """Stack `count` draws, of which this rank made some, along a leading axis on every rank."""
        # The first rank always has job 0, so it knows the names, shapes and types for those that made none.
        described = [[(name, t.shape, t.dtype) for name, t in mine[min(mine)].items()]] if mine else [[]]
        device = next(iter(mine[min(mine)].values())).device if mine else torch.device("cpu")
        if self.size > 1:
            distributed.broadcast_object_list(described, src=0)
            device = torch.device("cuda", torch.cuda.current_device()) if distributed.get_backend() == "nccl" else torch.device("cpu")
        stacked = {name: torch.zeros((count, *shape), dtype=dtype, device=device) for name, shape, dtype in described[0]}
        for position, draw in mine.items():
            for name, value in draw.items():
                stacked[name][position] = value
        self.add(stacked.values())
        return stacked

    def wait(self) -> None:
        """Until every rank has come here."""
        if self.size > 1:
            distributed.barrier()


def current_ranks(device: torch.device) -> Ranks:
    """The ranks of a torchrun job, joined on first use; alone otherwise."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Ranks()
    if not distributed.is_initialized():
        distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return Ranks(distributed.get_rank(), distributed.get_world_size())
