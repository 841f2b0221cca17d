"""Ranks: the processes that torchrun started, or just this one. Sums over ranks are torch.distributed's.

Methods split work in two ways: the rows of a batch (sums are then added up), or whole members and chains (results are
then exchanged). Both come down to sums: a rank that has nothing to contribute adds zeros.
"""

import atexit
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from caveat.priors import Params
from caveat.storage import State

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
                whole = tensor.contiguous()
                distributed.all_reduce(whole)
                if whole is not tensor:
                    tensor.copy_(whole)

    def average(self, tensors: Iterable[Tensor]) -> None:
        """Replace each floating-point tensor by its mean over the ranks, in place; others are left as they are.

        BatchNorm statistics of a rank are those of its own rows: after an epoch, all ranks go on with their mean.
        """
        if self.size > 1:
            floating = [tensor for tensor in tensors if tensor.is_floating_point()]
            self.add(floating)
            for tensor in floating:
                tensor /= self.size

    def mine(self, jobs: Sequence[int]) -> list[int]:
        """The jobs of this rank: every size-th one, so that they are dealt out in turn."""
        return list(jobs[self.rank :: self.size])

    def part(self, rows: Tensor) -> Tensor:
        """This rank's consecutive share of the rows (of near equal size; it may be empty)."""
        return rows.tensor_split(self.size)[self.rank]

    def gather(self, mine: dict[int, Params], count: int) -> Params:
        """Stack `count` draws, of which this rank made some, along a leading axis on every rank."""
        # The first rank always has job 0, so it knows the names, shapes and types for those that made none.
        first = mine[min(mine)] if mine else {}
        described = [[(name, t.shape, t.dtype, t.device.type) for name, t in first.items()]]
        if self.size > 1:
            distributed.broadcast_object_list(described, src=0)
        stacked: Params = {}
        for name, shape, dtype, kind in described[0]:
            device = first[name].device if first else torch.device(kind)
            stacked[name] = torch.zeros((count, *shape), dtype=dtype, device=device)
        for position, draw in mine.items():
            for name, value in draw.items():
                stacked[name][position] = value
        self.add(tensor.view(torch.uint8) for tensor in stacked.values())  # bytes: any type, bit for bit
        return stacked

    def share(self, mine: dict[int, tuple[State, Any]], count: int) -> list[tuple[State, Any]]:
        """The states of `count` jobs and plain json beside each, on every rank; `mine` has those that this one did."""
        return (
            [mine[job] for job in range(count)]
            if self.size == 1
            else [self._from_owner(mine.get(job), job % self.size) for job in range(count)]
        )

    def _from_owner(self, made: tuple[State, Any] | None, owner: int) -> tuple[State, Any]:
        """A state and json from the rank that made them; all ranks add up its bytes, of which the others have none."""
        described: list[Any] = [None]
        if made is not None:
            state, told = made
            described = [
                ({g: [(n, t.shape, t.dtype, t.device.type) for n, t in ts.items()] for g, ts in state.items()}, told)
            ]
        distributed.broadcast_object_list(described, src=owner)
        shapes, told = described[0]
        on_gpu = distributed.get_backend() == "nccl"
        place = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        state = {}
        for group, tensors in shapes.items():
            state[group] = {}
            for name, shape, dtype, kind in tensors:
                value = torch.zeros(shape, dtype=dtype, device=place)
                if made is not None:
                    value.copy_(made[0][group][name])
                self.add([value.view(-1).view(torch.uint8)])
                state[group][name] = value.to(kind if kind == "cpu" else place)
        return state, told

    def differing(self, identity: dict[str, Any]) -> dict[str, list[int]]:
        """The entries of an identity that some ranks have otherwise than the first one, and which ranks these are."""
        identities: list[Any] = [identity] * self.size
        if self.size > 1:
            distributed.all_gather_object(identities, identity)
        first = identities[0]
        keys = sorted({key for other in identities for key in other})
        ranks = {key: [r for r, other in enumerate(identities) if other.get(key) != first.get(key)] for key in keys}
        return {key: others for key, others in ranks.items() if others}

    def from_first(self, value: Any) -> Any:
        """What the first rank gives, on every rank."""
        values = [value]
        if self.size > 1:
            distributed.broadcast_object_list(values, src=0)
        return values[0]

    def wait(self) -> None:
        """Wait until every rank has come here."""
        if self.size > 1:
            distributed.barrier()


def current_ranks(device: torch.device) -> Ranks:
    """The ranks of a torchrun job, joined on first use, or of a group that was joined before; alone otherwise."""
    joined = distributed.is_available() and distributed.is_initialized()
    if not joined:
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return Ranks()
        if device.type == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) if device.index is None else device.index)
        # Members and chains take their own time, and torchrun ends the others when one fails: waiting long is no fault.
        distributed.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(days=30))
        atexit.register(_leave)
    return Ranks(distributed.get_rank(), distributed.get_world_size())


def _leave() -> None:
    """Leave the group that was joined here, before the interpreter goes.

    gloo's threads let go of the last tensors a moment after an operation is done; where that falls into the end of the
    interpreter, the process aborts (pytorch pull request 179291). A moment's wait is what there is against it.
    """
    time.sleep(0.2)
    if distributed.is_initialized():
        distributed.destroy_process_group()
    time.sleep(0.2)
