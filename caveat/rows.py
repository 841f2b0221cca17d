"""Rows: a data set read by index, in any order, as (inputs, targets) batches.

The user's loader says which data, how rows are collated and how many go together; which rows come when is decided here.
Reading rows does not move the global random state, unless the data set itself draws from it.
"""

import hashlib
import itertools
import traceback
from collections.abc import Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate
from torch.utils.data import sampler as samplers
from torch.utils.data.distributed import DistributedSampler

from caveat.batches import (
    Inputs,
    as_inputs,
    concatenate,
    count_rows,
    first_not_finite,
    move,
    padded_to_one_width,
    tensors,
)
from caveat.randomness import seeded

__all__ = ["Batch", "Data", "Rows", "evenly_spread", "free_of_gpu", "without_targets"]

Batch = tuple[Inputs, Tensor]
Data = DataLoader | Dataset | tuple[Tensor, Tensor]

MOST_STREAMED = 1_000_000  # rows of a stream that are read into memory, and their bytes
MOST_STREAMED_BYTES = 2**31

_TARGET_KEYS = ("labels", "label", "targets", "target", "y")


class Rows:
    """A data set read by index, as (inputs, targets) batches.

    Args:
        data: a `DataLoader` (its data set, collation, workers and batch size are used, its sampler must take each
            row once), a map-style data set of (input, target) pairs, or a pair of tensors or arrays. A stream
            (`IterableDataset`) is read into memory, once, where it has an end and there is room for it.
        needs_targets: whether rows without targets are an error.
        names: of the classes, in order, where targets are words.
    """

    def __init__(self, data: Data, needs_targets: bool = True, names: Sequence[str] = ()) -> None:
        self.batch_size, self.needs_targets, self.names = 128, needs_targets, tuple(names)
        self.known_finite = False  # whether all inputs were looked at once
        self._reading: dict[str, Any] = {"collate_fn": default_collate}  # how a loader is to read rows
        indices: Tensor | None = None
        if isinstance(data, tuple) and data and all(isinstance(part, Tensor | numpy.ndarray) for part in data):
            inputs = as_inputs(data[:-1] or data, torch.get_default_dtype())
            data = _tensor_dataset((*inputs, _as_targets(data[-1], self.names)) if data[1:] else inputs)
        if isinstance(data, DataLoader):
            indices, self.batch_size = _plain_reading(data)
            settings = ("collate_fn", "num_workers", "worker_init_fn", "multiprocessing_context")
            self._reading = {name: getattr(data, name) for name in settings}
        dataset: Any = data.dataset if isinstance(data, DataLoader) else data
        if isinstance(dataset, IterableDataset):
            dataset = _read_to_its_end(dataset)
        not_rows = isinstance(dataset, Tensor | tuple | Mapping | str)
        if not_rows or not hasattr(dataset, "__getitem__"):
            raise ValueError(
                f"the data is a {type(dataset).__name__}, which cannot be read by index: pass a DataLoader over a "
                "map-style data set, such a data set, or a pair of tensors (list(iterable) makes a map-style data set)"
            )
        if not isinstance(dataset, Sized):
            raise ValueError(f"{type(dataset).__name__} has no length: give it __len__, which sums over the data need")
        self.dataset: Any = dataset
        self.indices = torch.arange(len(dataset)) if indices is None else indices
        if not len(self.indices):
            raise ValueError("the data is empty: there is not one row to read")
        if self._reading["collate_fn"] is not default_collate:
            collate, chosen = self._reading["collate_fn"], self.indices.tolist()
            self._reading["collate_fn"] = padded_to_one_width(collate, dataset, chosen, self._targets_of)
        while type(self.dataset) is Subset:  # so that a part of a tensor data set is still read at once
            self.indices = torch.as_tensor(self.dataset.indices, dtype=torch.long)[self.indices]
            self.dataset = self.dataset.dataset

    def _targets_of(self, batch: Any) -> Tensor:
        """The targets of what a collator gives."""
        return _split_batch(batch, self.needs_targets, self.names)[1]

    @property
    def in_memory(self) -> bool:
        """Whether rows are tensors that can be indexed many at a time."""
        return type(self.dataset) is TensorDataset and self._reading["collate_fn"] is default_collate

    def __len__(self) -> int:
        return len(self.indices)

    def part(self, positions: Tensor) -> "Rows":
        """The rows at these positions, as rows of their own."""
        chosen = object.__new__(Rows)
        chosen.__dict__ |= self.__dict__ | {"indices": self.indices[positions]}
        return chosen

    def some(self, count: int) -> "Rows":
        """At most `count` of these rows, evenly spaced."""
        return self.part(evenly_spread(len(self), count))

    def batches(self, order: Sequence[Tensor], device: torch.device | str = "cpu") -> Iterator[Batch]:
        """One batch for each tensor of positions in `order`."""
        chosen = [self.indices.index_select(0, positions.to(self.indices.device)) for positions in order]
        device = torch.device(device)
        if self.in_memory:
            for rows in chosen:
                yield self._checked(tuple(_taken(t, rows) for t in self.dataset.tensors), rows, device)
            return
        # Making an iterator draws a seed for the workers: not from the global random state, which stays as it is, but
        # depending on its seed, so that augmentation in workers changes when training seeds an epoch.
        rng = torch.Generator().manual_seed(torch.initial_seed())
        listed = [rows.tolist() for rows in chosen]
        loader: DataLoader = DataLoader(self.dataset, batch_sampler=listed, generator=rng, **self._reading)
        read = iter(loader)
        for rows in chosen:
            yield self._checked(self._collated(read, rows), rows, device)

    def _collated(self, read: Iterator[Any], rows: Tensor) -> Any:
        """The next batch of a loader's iterator, whose own words say little of rows that do not fit together."""
        try:
            return next(read)
        except (RuntimeError, TypeError) as error:
            if self._reading["collate_fn"] is not default_collate or not _in_collation(error):
                raise
            raise ValueError(
                f"rows {int(rows[0])} to {int(rows[-1])} do not go into one batch ({error}): rows of different lengths "
                "or kinds need a DataLoader with a collate_fn that pads them, such as transformers' "
                "DataCollatorWithPadding(tokenizer)"
            ) from error

    def resident(self, positions: Tensor) -> Batch:
        """The batch at positions on the device where the rows are (`on`), without a look at its values."""
        rows = self.indices[positions]
        return _split_batch(tuple(t[rows] for t in self.dataset.tensors), self.needs_targets, self.names)

    def ordered(self, size: int | None = None, device: torch.device | str = "cpu") -> Iterator[Batch]:
        """All rows once, in order."""
        yield from self.batches(torch.split(torch.arange(len(self)), size or self.batch_size), device)

    def _checked(self, batch: Any, rows: Tensor, device: torch.device) -> Batch:
        x, y = _split_batch(batch, self.needs_targets, self.names)
        if y.ndim == 0 or y.shape[0] != rows.shape[0]:
            raise ValueError(
                f"a batch of {len(rows)} rows came with targets of shape {tuple(y.shape)}: give one to each row"
            )
        bad = None if self.known_finite else first_not_finite(x)
        if bad is not None:
            raise ValueError(
                f"the inputs hold NaN or infinity, first in row {int(rows[bad])}: clean or impute them first"
            )
        return move(x, device), y.to(device, non_blocking=True)

    def _sampled(self) -> Tensor:
        """Positions of all rows; of data that must be read row by row, of at most 10,000 spread over them."""
        return torch.arange(len(self)) if self.in_memory else evenly_spread(len(self), 10_000)

    def _sample(self) -> Iterator[Batch]:
        """The sampled rows in order."""
        yield from self.batches(torch.split(self._sampled(), 1024 if self.in_memory else self.batch_size))

    def everything(self) -> Batch:
        """All rows as one batch, in order; of data that must be read row by row, at most 10,000 spread over them."""
        pieces = list(self._sample())
        return concatenate([x for x, _ in pieces]), torch.cat([y for _, y in pieces])

    def targets(self) -> Tensor:
        """The targets of `everything`, whose inputs are looked at but not kept."""
        pieces = [y for _, y in self._sample()]
        shapes = list(dict.fromkeys(tuple(y.shape[1:]) for y in pieces))
        if len(shapes) > 1:
            raise ValueError(
                f"rows of different batches have targets of different shapes, {shapes[0]} and {shapes[1]}, and sums "
                "over the data need one: pad all rows to one length (padding='max_length' of a tokenizer or its "
                "collator), or let the collator give padding a label below zero, which is the likelihood's ignore_index"
            )
        return torch.cat(pieces)

    def number_in_data(self, row: int) -> int:
        """The number in the data set, from 0, of a row of `targets`: parts, spreads and samplers leave rows out."""
        return int(self.indices[self._sampled()[row]])

    def on(self, device: torch.device) -> "Rows":
        """These rows on a device, where they are tensors and take at most a quarter of its free memory."""
        if not self.in_memory or device.type != "cuda":
            return self
        needed = sum(t.numel() * t.element_size() for t in self.dataset.tensors)
        if needed > free_of_gpu(device) // 4:
            return self
        moved = self.part(torch.arange(len(self)))
        moved.dataset = TensorDataset(*(t.to(device) for t in self.dataset.tensors))
        moved.indices = moved.indices.to(device)
        return moved

    def fingerprint(self) -> str:
        """A digest of the number of rows and the batch size and of the rows: all that are in memory, else sixteen."""
        digest = hashlib.sha256(f"{len(self)} {self.batch_size}".encode())
        order = torch.arange(len(self)) if self.in_memory else evenly_spread(len(self), 16)
        with seeded(0):  # for data that are augmented as they are read
            for x, y in self.batches(torch.split(order, 1024)):
                for tensor in tensors((x, y)):
                    digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
                    digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def _taken(tensor: Tensor, rows: Tensor) -> Tensor:
    """The rows of a tensor: quicker than by brackets, which take an index from another device as well."""
    return tensor.index_select(0, rows) if tensor.device == rows.device else tensor[rows]


def free_of_gpu(device: torch.device) -> int:
    """How many bytes tensors can still take on a GPU: what is free, and what torch keeps of tensors that are gone."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def evenly_spread(n: int, count: int) -> Tensor:
    """At most `count` positions spread evenly over n."""
    return torch.linspace(0, n - 1, min(n, count), dtype=torch.float64).long()


def _tensor_dataset(parts: tuple[Any, ...]) -> TensorDataset:
    for part in parts:
        if not isinstance(part, Tensor):
            raise ValueError(
                f"the data has an array of {part.dtype}, and numbers are needed: of words, name the classes, classes = "
                "sorted(set(labels)), and give each row classes.index(label)"
            )
    lengths = [len(part) if part.ndim else 0 for part in parts]
    if len(set(lengths)) > 1:
        raise ValueError(f"the data is a tuple of tensors with {lengths} rows: each must have as many as the others")
    return TensorDataset(*parts)


def _read_to_its_end(stream: IterableDataset) -> list[Any]:
    """The rows of a stream, which can then be counted, split and read again in any order."""
    rows: list[Any] = []
    size = 0
    for row in stream:
        rows.append(row)
        size += sum(tensor.nbytes for tensor in tensors(as_inputs(row, torch.get_default_dtype())))
        if len(rows) > MOST_STREAMED or size > MOST_STREAMED_BYTES:
            raise ValueError(
                f"the stream {type(stream).__name__} has more than {len(rows) - 1:,} rows, {size / 1e9:.1f} GB of "
                "tensors, and has not ended: rows are counted and read again, so give a data set that is read by index "
                "(list(stream) is one, where it ends and there is room for it)"
            )
    return rows


def _plain_reading(loader: DataLoader) -> tuple[Tensor | None, int]:
    """The rows that a loader's sampler stands for (None for all), and its batch size.

    Samplers that weight or repeat rows stand for no set of rows.
    """
    batches = loader.batch_sampler
    if batches is None:
        raise ValueError(
            "the loader has batch_size=None, so its data set gives whole batches: pass a data set of single rows, "
            "which a posterior counts, with a batch size"
        )
    if isinstance(loader.dataset, IterableDataset):
        return None, loader.batch_size or 128
    sampler: Any = batches.sampler if type(batches) is samplers.BatchSampler else batches
    size: int = getattr(batches, "batch_size", 128)
    if isinstance(sampler, DistributedSampler):
        return None, size
    if isinstance(sampler, samplers.SubsetRandomSampler):
        return torch.as_tensor(sampler.indices, dtype=torch.long).sort().values, size
    rows: Any = loader.dataset
    if _takes_each_row_once(sampler, len(rows)):
        return None, size
    if isinstance(sampler, samplers.WeightedRandomSampler):
        raise ValueError(
            "the loader's WeightedRandomSampler draws rows by weights, and a posterior takes each row once: a row that "
            "is drawn twice as often would count as two observations. Pass the data set itself, and what the weights "
            "are for in the likelihood: Categorical(class_weights=...) multiplies the log likelihood of rare classes"
        )
    raise ValueError(
        f"the loader's {type(sampler).__name__} weights, repeats or leaves out rows, and a posterior needs each row "
        "once: pass the data set itself, or a torch.utils.data.Subset of it"
    )


def _takes_each_row_once(sampler: Any, n: int) -> bool:
    """Whether a sampler of rows or of batches of them stands for n rows, each once, in whatever order.

    One that is not known is read once. Random numbers that it takes from torch's global generator or from one of its
    own are put back.
    """
    if isinstance(sampler, samplers.SequentialSampler):
        return len(sampler) == n
    if isinstance(sampler, samplers.RandomSampler):
        return not sampler.replacement and len(sampler) == n
    own = getattr(sampler, "generator", None)
    state = own.get_state() if isinstance(own, torch.Generator) else None
    counts = torch.zeros(n, dtype=torch.long)
    with torch.random.fork_rng(devices=[]):
        for rows in itertools.islice(sampler, n + 1):
            taken = torch.as_tensor(rows, dtype=torch.long).reshape(-1)
            if not len(taken) or int(taken.min()) < 0 or int(taken.max()) >= n:
                break
            counts.index_add_(0, taken, torch.ones_like(taken))
    if isinstance(own, torch.Generator) and state is not None:
        own.set_state(state)
    return bool((counts == 1).all())


def _in_collation(error: BaseException) -> bool:
    """Whether an error came from putting rows together, and not from reading one."""
    return any(Path(frame.filename).name == "collate.py" for frame in traceback.extract_tb(error.__traceback__))


def _split_batch(batch: Any, needs_targets: bool, names: tuple[str, ...]) -> Batch:
    """A batch as (inputs, targets)."""
    if isinstance(batch, Mapping):
        key = next((key for key in _TARGET_KEYS if key in batch), None)
        if key is not None:
            return {name: value for name, value in batch.items() if name != key}, _as_targets(batch[key], names)
        if not needs_targets:
            return dict(batch), torch.zeros(count_rows(dict(batch)), dtype=torch.long)
        known = ", ".join(_TARGET_KEYS)
        raise ValueError(f"a batch is a dict of {sorted(batch)} without targets: name them one of {known}")
    if isinstance(batch, list | tuple) and len(batch) == 2:
        return _as_inputs(batch[0]), _as_targets(batch[1], names)
    if isinstance(batch, list | tuple) and len(batch) > 2:
        return tuple(batch[:-1]), _as_targets(batch[-1], names)
    if not needs_targets:
        inputs = _as_inputs(batch[0] if isinstance(batch, list | tuple) else batch)
        return inputs, torch.zeros(count_rows(inputs), dtype=torch.long)
    raise ValueError(f"the rows are each a {type(batch).__name__} without targets: they must be (input, target) pairs")


def without_targets(x: Any, likeness: Any) -> Any:
    """A batch that is a dict without its targets, where those of the fit, whose likeness is given, had none either."""
    known = likeness.get("entries") if isinstance(likeness, dict) else None
    if not isinstance(x, Mapping) or known is None:
        return x
    return {name: value for name, value in x.items() if name in known or name not in _TARGET_KEYS}


def _as_inputs(x: Any) -> Inputs:
    return dict(x) if isinstance(x, Mapping) else tuple(x) if isinstance(x, list) else x


def _as_targets(y: Any, names: tuple[str, ...]) -> Tensor:
    if isinstance(y, numpy.ndarray):
        y = y.tolist() if y.dtype.kind in "OSU" else as_inputs(y, torch.get_default_dtype())
    if isinstance(y, list | tuple) and any(isinstance(label, str) for label in y):
        return _numbered(y, names)
    try:
        return torch.as_tensor(y)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"the targets of a batch are a {type(y).__name__} that makes no tensor: {error}") from error


def _numbered(words: Sequence[Any], names: tuple[str, ...]) -> Tensor:
    """The places of words among the names of the classes."""
    if not names:
        raise ValueError(
            f"the targets are words ({', '.join(map(repr, dict.fromkeys(words[:3])))}), and a likelihood takes "
            "numbers: name the classes in their order, Categorical(names=sorted(set(labels))), or give each row "
            "classes.index(label)"
        )
    places = {name: place for place, name in enumerate(names)}
    if (unknown := next((word for word in words if word not in places), None)) is not None:
        raise ValueError(f"the target {unknown!r} is no class of Categorical(names={list(names)}): add it there")
    return torch.tensor([places[word] for word in words])
