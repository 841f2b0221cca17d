"""A task: a network and the data it is to explain. The only place where a mini-batch is scaled to the whole data set.

    log p(D, theta) ~ N/B sum_{i in batch} log p(y_i | f(x_i, theta)) + log p(theta)

The task reads the data set by index, not through the user's loader: in order, without padding or augmentation where exact
sums are needed (curvature, HMC, evidence), shuffled by an explicit generator and augmented for training.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset
from torch.utils.data import sampler as samplers
from torch.utils.data.distributed import DistributedSampler

from caveat.batches import Inputs, concatenate, count_rows, first_not_finite, move, tensors
from caveat.likelihoods import Hyper, Likelihood
from caveat.network import Network, ParameterFilter
from caveat.priors import Params, Prior

__all__ = ["Augment", "Batch", "Data", "Rows", "Task"]

Batch = tuple[Inputs, Tensor]
Data = DataLoader | Dataset | tuple[Tensor, Tensor]
Augment = Callable[[Inputs, torch.Generator], Inputs]

_TARGET_KEYS = ("labels", "label", "targets", "target", "y")


class Rows:
    """A data set read by index, as (inputs, targets) batches.

    Args:
        data: a `DataLoader` (its data set, collation and batch size are used, its sampler must be a plain one), a
            map-style `Dataset` of (input, target) pairs, or a pair of tensors.
        needs_targets: whether rows without targets are an error.
    """

    def __init__(self, data: Data, needs_targets: bool = True) -> None:
        self.batch_size, self._collate, self._workers = 128, None, 0
        self.needs_targets = needs_targets
        self.known_finite = False  # whether all inputs were looked at once
        indices: Sequence[int] | None = None
        if isinstance(data, tuple) and all(isinstance(part, Tensor) for part in data):
            data = TensorDataset(*data)
        if isinstance(data, DataLoader):
            indices = _plain_indices(data)
            self.batch_size = data.batch_size or 128
            self._collate, self._workers = data.collate_fn, data.num_workers
            data = data.dataset
        if isinstance(data, IterableDataset) or not isinstance(data, Dataset | list):
            raise ValueError(
                f"the data is a {type(data).__name__}, which cannot be read by index: pass a DataLoader over a map-style data set, "
                "such a data set, or a pair of tensors (list(iterable) makes a map-style data set)"
            )
        if not isinstance(data, Sized):
            raise ValueError(f"{type(data).__name__} has no length: give it __len__, since sums over the data need its size")
        self.dataset: Any = data
        self.indices = torch.as_tensor(list(range(len(data)) if indices is None else indices), dtype=torch.long)
        if not len(self.indices):
            raise ValueError("the data is empty: there is not one row to read")
        self._flatten_subsets()

    def _flatten_subsets(self) -> None:
        """Look through `Subset`s, so that a part of a tensor data set is still read at once."""
        while type(self.dataset) is Subset:
            self.indices = torch.as_tensor(self.dataset.indices, dtype=torch.long)[self.indices]
            self.dataset = self.dataset.dataset

    @property
    def in_memory(self) -> bool:
        """Whether rows are tensors that can be indexed many at a time."""
        return type(self.dataset) is TensorDataset

    def __len__(self) -> int:
        return len(self.indices)

    def part(self, positions: Tensor) -> "Rows":
        """The rows at these positions, as rows of their own."""
        chosen = object.__new__(Rows)
        chosen.__dict__ |= self.__dict__ | {"indices": self.indices[positions]}
        return chosen

    def batches(self, order: Sequence[Tensor], device: torch.device | str = "cpu") -> Iterator[Batch]:
        """One batch for each tensor of positions in `order`."""
        device = torch.device(device)
        if self.in_memory:
            for positions in order:
                chosen = self.indices[positions.to(self.indices.device)]
                yield self._checked(tuple(t[chosen] for t in self.dataset.tensors), device)
            return
        loader = DataLoader(
            self.dataset,
            batch_sampler=[self.indices[positions].tolist() for positions in order],
            collate_fn=self._collate,
            num_workers=self._workers,
            generator=torch.Generator().manual_seed(0),  # without one, making an iterator moves the global random state
        )
        for batch in loader:
            yield self._checked(batch, device)

    def ordered(self, size: int | None = None, device: torch.device | str = "cpu") -> Iterator[Batch]:
        """All rows once, in order."""
        yield from self.batches(torch.arange(len(self)).split(size or self.batch_size), device)

    def _checked(self, batch: Any, device: torch.device) -> Batch:
        x, y = _split_batch(batch, self.needs_targets)
        bad = None if self.known_finite else first_not_finite(x)
        if bad is not None:
            raise ValueError(f"the inputs hold NaN or infinity (row {bad} of a batch of {count_rows(x)}): clean or impute them first")
        return move(x, device), y.to(device, non_blocking=True)

    def everything(self) -> Batch:
        """All rows as one batch, in order; of a data set that must be read row by row, at most 10,000 spread over it."""
        if self.in_memory:
            return _split_batch(tuple(t[self.indices] for t in self.dataset.tensors), self.needs_targets)
        spread = torch.linspace(0, len(self) - 1, min(len(self), 10_000)).long()
        pieces = list(self.batches(spread.split(self.batch_size)))
        return concatenate([x for x, _ in pieces]), torch.cat([y for _, y in pieces])

    def on(self, device: torch.device) -> "Rows":
        """These rows with their tensors on a device, where they are tensors and take at most a quarter of its free memory."""
        if not self.in_memory or device.type != "cuda":
            return self
        needed = sum(t.numel() * t.element_size() for t in self.dataset.tensors)
        if needed > torch.cuda.mem_get_info(device)[0] // 4:
            return self
        moved = self.part(torch.arange(len(self)))
        moved.dataset = TensorDataset(*(t.to(device) for t in self.dataset.tensors))
        moved.indices = moved.indices.to(device)
        return moved

    def fingerprint(self) -> str:
        """A digest of the number of rows and of sixteen of them, spread over the data."""
        digest = hashlib.sha256(str(len(self)).encode())
        positions = torch.linspace(0, len(self) - 1, 16).long()
        for x, y in self.batches([positions]):
            for tensor in tensors((x, y)):
                digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()


class Task:
    """A network and its training data, with validation data when a method is to tune itself.

    Args:
        model: the module (copied, never touched).
        data: training rows: a `DataLoader`, a map-style `Dataset`, or a pair of tensors.
        likelihood: what the outputs say about the targets.
        prior: over the weights; `GaussianPrior(1.0)` unless given.
        validation: a share of the rows (split off once, by index), or validation data of their own.
        parameters: which parameters inference is about: a name pattern, several, or a predicate.
        augment: `augment(x, generator) -> x` on a training batch; never used for exact sums.
        initialise: draws fresh weights in place on a module; by default `reset_parameters` of every layer.
        split_seed: which rows a validation share takes.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Data,
        likelihood: Likelihood,
        prior: Prior | None = None,
        *,
        validation: float | Data | None = None,
        parameters: ParameterFilter = "*",
        augment: Augment | None = None,
        initialise: Callable[[nn.Module], None] | None = None,
        split_seed: int = 0,
    ) -> None:
        self.network = Network(model, likelihood, prior, parameters, initialise)
        self.augment = augment
        rows = Rows(data)
        self.validation: Rows | None = None
        if isinstance(validation, float):
            rows, self.validation = _split(rows, validation, split_seed)
        elif validation is not None:
            self.validation = Rows(validation)
        self.train = rows
        self.warnings: list[str] = []
        self._check()

    @property
    def n(self) -> int:
        """The number of training rows."""
        return len(self.train)

    def log_joint(
        self, outputs: Tensor, targets: Tensor, params: Params, hyper: Hyper, *, batch_rows: int | None = None, share: float = 1.0
    ) -> Tensor:
        """Unbiased estimate of log p(D, theta) from the outputs of a batch.

        When the batch of `batch_rows` rows is spread over ranks, each counts its rows and its `share` of the prior, so that
        the ranks' values and gradients sum to those of the whole.
        """
        network = self.network
        likelihood = network.likelihood.log_prob(outputs, targets, hyper).sum()
        selected = {name: params[name] for name in network.names}
        return self.n / (batch_rows or len(targets)) * likelihood + share * network.prior.log_prob(selected)

    def log_likelihood(self, network: Network, params: Params, hyper: Hyper, rows: Rows | None = None) -> Tensor:
        """Mean log likelihood of a row over all training rows (or those given), in order, without gradients; float64."""
        rows = rows or self.train
        total = torch.zeros((), dtype=torch.float64)
        with torch.no_grad():
            for x, y in rows.ordered(device=network.device):
                total += network.likelihood.log_prob(network(params, x), y, hyper).sum().double().cpu()
        return total / len(rows)

    def fitted_hyper(self, network: Network, params: Params, rows: Rows | None = None) -> Hyper:
        """What the likelihood learns beside the weights, by maximum likelihood at these weights."""
        rows = rows or self.train
        outputs, targets = [], []
        with torch.no_grad():
            for x, y in rows.ordered(device=network.device):
                outputs.append(network(params, x))
                targets.append(y)
        hyper = {k: v.to(network.device) for k, v in self.hyper.items()}
        return network.likelihood.fitted_hyper(torch.cat(outputs), torch.cat(targets), hyper)

    def fingerprint(self) -> dict[str, str]:
        """Digests of the network and of the training rows."""
        return {"network": self.network.fingerprint(), "data": self.train.fingerprint()}

    def _check(self) -> None:
        """Read the first rows through the network, and all targets, so that a mistake shows now and not an hour later."""
        likelihood = self.network.likelihood
        everything, targets = self.train.everything()
        likelihood.check_targets(targets)
        bad = first_not_finite(everything)
        if bad is not None:
            raise ValueError(f"the training inputs hold NaN or infinity, first in row {bad}: clean or impute them first")
        self.train.known_finite = self.train.in_memory
        first = [torch.arange(min(self.n, 2))]
        x, _ = next(self.train.batches(first))
        self.network.check_inputs(x)
        try:
            with torch.no_grad():
                outputs = self.network(self.network.params(), move(x, self.network.device)).cpu()
        except (RuntimeError, TypeError, IndexError) as error:
            shapes = [tuple(t.shape) for t in tensors(x)]
            raise ValueError(f"the network could not take the first training rows (inputs {shapes}): {error}") from error
        # Every target against the network's width, from the shape of one output.
        likelihood.check(outputs[:1].expand(len(targets), *outputs.shape[1:]), targets)
        if not self.train.in_memory and not _same(x, next(self.train.batches(first))[0]):
            self.warnings.append(
                "the training data differ each time they are read (augmentation inside the data set?): exact sums over the data "
                "will be noisy; pass a data set without it, and augment=... for training"
            )
        self.hyper = likelihood.initial_hyper(targets)
        self.baseline = likelihood.baseline(targets)


def _same(x: Inputs, other: Inputs) -> bool:
    return all(torch.equal(a, b) for a, b in zip(tensors(x), tensors(other), strict=True))


def _split(rows: Rows, share: float, seed: int) -> tuple[Rows, Rows]:
    held_out = round(share * len(rows))
    if not 0 < held_out < len(rows):
        raise ValueError(f"validation={share} of {len(rows)} rows leaves {len(rows) - held_out} to train on and {held_out} to validate with")
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    return rows.part(order[held_out:].sort().values), rows.part(order[:held_out].sort().values)


def _plain_indices(loader: DataLoader) -> Sequence[int] | None:
    """The rows a loader's sampler stands for; samplers that weight or repeat rows have no such set."""
    sampler = loader.sampler
    if isinstance(loader.dataset, IterableDataset) or isinstance(sampler, samplers.SequentialSampler | DistributedSampler):
        return None
    if isinstance(sampler, samplers.RandomSampler) and not sampler.replacement and sampler.num_samples == len(loader.dataset):  # type: ignore[arg-type]
        return None
    if isinstance(sampler, samplers.SubsetRandomSampler):
        return sorted(sampler.indices)
    raise ValueError(
        f"the loader's {type(sampler).__name__} weights, repeats or reorders rows, and a posterior needs each row once: "
        "pass the data set itself, or a torch.utils.data.Subset of it"
    )


def _split_batch(batch: Any, needs_targets: bool) -> Batch:
    """A batch as (inputs, targets)."""
    if isinstance(batch, dict):
        key = next((key for key in _TARGET_KEYS if key in batch), None)
        if key is not None:
            return {name: value for name, value in batch.items() if name != key}, torch.as_tensor(batch[key])
        if not needs_targets:
            return batch, torch.zeros(count_rows(batch), dtype=torch.long)
        raise ValueError(f"a batch is a dict of {sorted(batch)} without targets: name them one of {', '.join(_TARGET_KEYS)}")
    if isinstance(batch, list | tuple) and len(batch) == 2:
        return _as_inputs(batch[0]), torch.as_tensor(batch[1])
    if isinstance(batch, list | tuple) and len(batch) > 2:
        return tuple(batch[:-1]), torch.as_tensor(batch[-1])
    if not needs_targets:
        inputs = _as_inputs(batch[0] if isinstance(batch, list | tuple) else batch)
        return inputs, torch.zeros(count_rows(inputs), dtype=torch.long)
    raise ValueError(f"the loader gives a {type(batch).__name__} without targets: rows must be (input, target) pairs")


def _as_inputs(x: Any) -> Inputs:
    return tuple(x) if isinstance(x, list) else x
