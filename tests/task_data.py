"""Rows of a small regression, and tasks and data sets made from them."""

from collections import UserDict

import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

from caveat import Categorical, Task

N = 13


def data(n: int = N, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(1), dtype=dtype)
    return x, torch.arange(n) % 3


def linear(dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def task(rows, likelihood=None, **options) -> Task:
    return Task(options.pop("model", None) or linear(), rows, likelihood or Categorical(), **options)


class Lazy(Dataset):
    """Rows read one by one, as from files."""

    def __init__(self, n: int = N) -> None:
        self.x, self.y = data(n)
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        self.read.append(i)
        return self.x[i], int(self.y[i])


class Plain:
    """Map-style without torch's base class, as in other libraries."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> dict:
        return {"x": data()[0][i], "labels": int(data()[1][i])}


class Augmented(Lazy):
    """Noise drawn from the global random state each time a row is read."""

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.x[i] + torch.rand(4), int(self.y[i])


class Stream(IterableDataset):
    def __iter__(self):
        yield from zip(*data(), strict=True)


class Named(nn.Module):
    """Takes its inputs by name or by position."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        return self.layer(x if shift is None else x + shift)


def as_dict(rows: list[tuple[Tensor, Tensor]]) -> dict:
    return {"x": torch.stack([x for x, _ in rows]), "labels": torch.tensor([int(y) for _, y in rows])}


def every_kind() -> dict:
    x, y = data()
    pair = TensorDataset(x, y)
    padded = TensorDataset(torch.cat([x[:2], x]), torch.cat([y[:2], y]))
    return {
        "pair": (x, y),
        "dataset": pair,
        "loader": DataLoader(pair, 5),
        "shuffled loader": DataLoader(pair, 5, shuffle=True, drop_last=True),
        "lazy": Lazy(),
        "lazy loader": DataLoader(Lazy(), 4, shuffle=True),
        "list": list(zip(x, y, strict=True)),
        "subset": Subset(padded, range(2, N + 2)),
        "subset of subset": Subset(Subset(padded, list(range(1, N + 2))), torch.arange(1, N + 1)),
        "subset sampler": DataLoader(padded, 4, sampler=SubsetRandomSampler([*range(N + 1, 1, -1)])),
        "batch sampler": DataLoader(pair, batch_sampler=BatchSampler(SubsetRandomSampler(range(N)), 4, False)),
        "dict batches": DataLoader(pair, 4, collate_fn=as_dict),
        "mapping batches": DataLoader(Lazy(), 4, collate_fn=lambda rows: UserDict(as_dict(rows))),
        "other library": DataLoader(Plain(), 4, shuffle=True),
        "worker": DataLoader(Lazy(), 4, num_workers=1),
        "stream": Stream(),
        "loader of a stream": DataLoader(Stream(), 4),
        "arrays": (x.numpy().astype("float64"), y.numpy()),
    }
