"""Bytes: of tensors, of native kernels' tables, of a process."""

import resource
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MIB = 2**20


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Each storage once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def table_bytes(pattern: Any) -> int:
    """What native kernels made of a pattern."""
    made = getattr(pattern, "_structures", {}).values()
    return sum(a.nbytes for s in made for a in (s.start, s.offset, s.order) if a is not None)


def resident_bytes(device: str) -> int:
    """Held now: by torch's allocator on a GPU, by this process on a CPU."""
    if device != "cpu":
        return torch.cuda.memory_allocated(device)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
