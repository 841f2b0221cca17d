"""The frozen base of a network: tensors that it shares with the user's module, watched for changes, and their digest.

A posterior over adapters is about a base that it neither copies nor stores. Two looks tell whether somebody else has
written it since: torch's version counters, which count writes in place, and a few entries of each tensor, which also
see writes through `.data` (as merging an adapter makes them). The digest reads every byte, once.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

__all__ = ["FrozenBase"]

_PIECE = 16 * 2**20  # bytes that are digested at a time
_ENTRIES = 4  # of each axis are looked at


@dataclass(frozen=True)
class FrozenBase:
    """Tensors of a module that nothing here writes, and what they were when this was made."""

    tensors: dict[str, Tensor]
    versions: tuple[int, ...]  # torch's counts of the writes in place
    entries: dict[str, Tensor]  # a few of each tensor's, by name

    @classmethod
    def of(cls, module: nn.Module, names: Iterable[str]) -> "FrozenBase":
        """The base with these names, as far as the module has them."""
        parameters = dict(module.named_parameters())
        tensors = {name: parameters[name].detach() for name in names if name in parameters}
        plain = (name for name, tensor in tensors.items() if type(tensor) is Tensor)
        entries = {name: _some(tensors[name]).clone() for name in plain}
        return cls(tensors, tuple(tensor._version for tensor in tensors.values()), entries)

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def check(self) -> None:
        """Raise a ValueError if somebody has written into the base since this was made."""
        now = tuple(tensor._version for tensor in self.tensors.values())
        changed = [name for name, old, new in zip(self.tensors, self.versions, now, strict=True) if old != new]
        changed = changed or [name for name, before in self.entries.items() if not _equal(name, before, self.tensors)]
        if changed:
            raise ValueError(
                f"the frozen {changed[0]} was changed in place after the task or posterior was made, which shares its "
                f"{len(self.tensors)} frozen tensors with the module: load the module's weights again and make the "
                "task, or load the posterior, anew (an adapter is merged into a copy of the module, and so is a module "
                "trained further: copy.deepcopy(model))"
            )

    @cached_property
    def digest(self) -> str:
        """A digest of names, types, shapes and values; pieces are read side by side, one at a time from a device."""
        listing = [[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in self.tensors.items()]
        digest = hashlib.sha256(json.dumps(listing).encode())
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            for piece in pool.map(_piece_digest, _pieces(self.tensors.values())):
                digest.update(piece)
        return digest.hexdigest()


def _some(tensor: Tensor) -> Tensor:
    """A view of at most four entries along each axis, whatever the layout."""
    tensor = tensor.detach()
    return tensor[tuple(slice(None, None, max(1, -(-length // _ENTRIES))) for length in tensor.shape)]


def _equal(name: str, before: Tensor, tensors: dict[str, Tensor]) -> bool:
    some = _some(tensors[name])
    return some.device != before.device or torch.equal(some, before)


def _pieces(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The bytes of all tensors, in pieces."""
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)  # a copy only where the layout is not that of its axes
        yield from flat.split(max(1, _PIECE // flat.element_size()))


def _piece_digest(piece: Tensor) -> bytes:
    return hashlib.sha256(piece.contiguous().cpu().view(torch.uint8).numpy().data).digest()
