"""A task: a network and the data it is to explain. The only place where a mini-batch is scaled to the whole data set.

    log p(D, theta) ~ N/B sum_{i in batch} log p(y_i | f(x_i, theta)) + log p(theta)

The task reads the data set by index, not through the user's loader: in order, without padding or augmentation where
exact sums are needed (curvature, HMC, evidence), shuffled by an explicit generator and augmented for training. Reading
rows does not move the global random state, unless the data set itself draws from it.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate
from torch.utils.data import sampler as samplers
from torch.utils.data.distributed import DistributedSampler

from caveat.batches import Inputs, concatenate, count_rows, first_not_finite, map_tensors, move, tensors
from caveat.likelihoods import Hyper, Likelihood
from caveat.network import Network, ParameterFilter
from caveat.priors import Params, Prior
from caveat.storage import encode

__all__ = ["Augment", "Batch", "Data", "Rows", "Task"]

Batch = tuple[Inputs, Tensor]
Data = DataLoader | Dataset | tuple[Tensor, Tensor]
Augment = Callable[[Inputs, torch.Generator], Inputs]

_TARGET_KEYS = ("labels", "label", "targets", "target", "y")


class Rows:
    """A data set read by index, as (inputs, targets) batches.

    Args:
        data: a `DataLoader` (its data set, collation, workers and batch size are used, its sampler must be a plain
            one), a map-style data set of (input, target) pairs, or a pair of tensors.
        needs_targets: whether rows without targets are an error.
    """

    def __init__(self, data: Data, needs_targets: bool = True) -> None:
        self.batch_size, self.needs_targets = 128, needs_targets
        self.known_finite = False  # whether all inputs were looked at once
        self._reading: dict[str, Any] = {"collate_fn": default_collate}  # how a loader is to read rows
        indices: Tensor | None = None
        if isinstance(data, tuple) and data and all(isinstance(part, Tensor) for part in data):
            data = _tensor_dataset(data)
        if isinstance(data, DataLoader) and not isinstance(data.dataset, IterableDataset):
            indices, self.batch_size = _plain_reading(data)
            kept = ("collate_fn", "num_workers", "worker_init_fn", "multiprocessing_context")
            self._reading = {name: getattr(data, name) for name in kept}
        dataset: Any = data.dataset if isinstance(data, DataLoader) else data
        not_rows = isinstance(dataset, IterableDataset | Tensor | tuple | Mapping | str)
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
        while type(self.dataset) is Subset:  # so that a part of a tensor data set is still read at once
            self.indices = torch.as_tensor(self.dataset.indices, dtype=torch.long)[self.indices]
            self.dataset = self.dataset.dataset

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

    def batches(self, order: Sequence[Tensor], device: torch.device | str = "cpu") -> Iterator[Batch]:
        """One batch for each tensor of positions in `order`."""
        chosen = [self.indices[positions.to(self.indices.device)] for positions in order]
        device = torch.device(device)
        if self.in_memory:
            for rows in chosen:
                yield self._checked(tuple(t[rows] for t in self.dataset.tensors), rows, device)
            return
        # Making an iterator draws a seed for the workers: not from the global random state, which stays as it is, but
        # depending on its seed, so that augmentation in workers changes when training seeds an epoch.
        rng = torch.Generator().manual_seed(torch.initial_seed())
        listed = [rows.tolist() for rows in chosen]
        loader: DataLoader = DataLoader(self.dataset, batch_sampler=listed, generator=rng, **self._reading)
        for rows, batch in zip(chosen, loader, strict=True):
            yield self._checked(batch, rows, device)

    def ordered(self, size: int | None = None, device: torch.device | str = "cpu") -> Iterator[Batch]:
        """All rows once, in order."""
        yield from self.batches(torch.split(torch.arange(len(self)), size or self.batch_size), device)

    def _checked(self, batch: Any, rows: Tensor, device: torch.device) -> Batch:
        x, y = _split_batch(batch, self.needs_targets)
        if y.ndim == 0 or len(y) != len(rows):
            raise ValueError(
                f"a batch of {len(rows)} rows came with targets of shape {tuple(y.shape)}: give one to each row"
            )
        bad = None if self.known_finite else first_not_finite(x)
        if bad is not None:
            raise ValueError(
                f"the inputs hold NaN or infinity, first in row {int(rows[bad])}: clean or impute them first"
            )
        return move(x, device), y.to(device, non_blocking=True)

    def _sample(self) -> Iterator[Batch]:
        """All rows in order; of data that must be read row by row, at most 10,000 spread over them."""
        spread = torch.arange(len(self)) if self.in_memory else _spread(len(self), 10_000)
        yield from self.batches(torch.split(spread, 1024 if self.in_memory else self.batch_size))

    def everything(self) -> Batch:
        """All rows as one batch, in order; of data that must be read row by row, at most 10,000 spread over them."""
        pieces = list(self._sample())
        return concatenate([x for x, _ in pieces]), torch.cat([y for _, y in pieces])

    def targets(self) -> Tensor:
        """The targets of `everything`, whose inputs are looked at but not kept."""
        return torch.cat([y for _, y in self._sample()])

    def on(self, device: torch.device) -> "Rows":
        """These rows on a device, where they are tensors and take at most a quarter of its free memory."""
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
        with torch.random.fork_rng(devices=[]):  # for data that are augmented as they are read
            torch.default_generator.manual_seed(0)
            for x, y in self.batches([_spread(len(self), 16)]):
                for tensor in tensors((x, y)):
                    digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
                    digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
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
        with torch.random.fork_rng(devices=[]):  # for data that are augmented as they are read
            self._check()

    @property
    def n(self) -> int:
        """The number of training rows."""
        return len(self.train)

    def log_joint(
        self,
        outputs: Tensor,
        targets: Tensor,
        params: Params,
        hyper: Hyper,
        *,
        batch_rows: int | None = None,
        share: float = 1.0,
    ) -> Tensor:
        """Unbiased estimate of log p(D, theta) from the outputs of a batch.

        When the batch of `batch_rows` rows is spread over ranks, each counts its rows and its `share` of the prior, so
        that the ranks' values and gradients sum to those of the whole.
        """
        network = self.network
        likelihood = network.likelihood.log_prob(outputs, targets, hyper).sum()
        scaled = self.n / (batch_rows or len(targets)) * likelihood
        if not share:
            return scaled
        return scaled + share * network.prior.log_prob({name: params[name] for name in network.names})

    def log_likelihood(self, network: Network, params: Params, hyper: Hyper, rows: Rows | None = None) -> Tensor:
        """Mean log likelihood of a row over all training rows (or those given), without gradients; float64."""
        rows = self.train if rows is None else rows
        total = torch.zeros((), dtype=torch.float64)
        with torch.no_grad():
            for x, y in rows.ordered(device=network.device):
                total += network.likelihood.log_prob(network(params, x), y, hyper).sum().double().cpu()
        return total / len(rows)

    def fitted_hyper(self, network: Network, params: Params, rows: Rows | None = None) -> Hyper:
        """What the likelihood learns beside the weights, by maximum likelihood at these weights."""
        if not self.hyper:
            return {}
        rows = self.train if rows is None else rows
        outputs, targets = [], []
        with torch.no_grad():
            for x, y in rows.ordered(device=network.device):
                outputs.append(network(params, x))
                targets.append(y)
        hyper = {k: v.to(network.device) for k, v in self.hyper.items()}
        return network.likelihood.fitted_hyper(torch.cat(outputs), torch.cat(targets), hyper)

    def fingerprint(self) -> dict[str, str]:
        """Digests of the network, of its likelihood and prior, and of the rows."""
        rows = {"data": self.train, "validation": self.validation}
        return {
            "network": self.network.fingerprint(),
            "likelihood": _described(self.network.likelihood),
            "prior": _described(self.network.prior),
        } | {name: part.fingerprint() for name, part in rows.items() if part is not None}

    def _check(self) -> None:
        """Send the first rows through the network and read all targets: a mistake shows now, not an hour later."""
        likelihood, output = self.network.likelihood, self._first_output()
        for name, rows in (("training", self.train), ("validation", self.validation)):
            if rows is None:
                continue
            try:
                targets = rows.targets()
                likelihood.check(output.expand(len(targets), *output.shape[1:]), targets)
            except ValueError as error:
                raise ValueError(f"the {name} data do not fit: {error}") from error
            rows.known_finite = rows.in_memory
            if rows is self.train:
                self.hyper, self.baseline = likelihood.initial_hyper(targets), likelihood.baseline(targets)

    def _first_output(self) -> Tensor:
        """The network's output for the first row, [1, ...]."""
        x = self._first_inputs()
        self.network.check_inputs(x)
        passed = map_tensors(lambda tensor: tensor.to(self.network.device, copy=True), x)
        shapes = [tuple(tensor.shape) for tensor in tensors(x)]
        try:
            with torch.no_grad():
                outputs = self.network(self.network.params(), passed).cpu()
        except Exception as error:
            raise ValueError(
                f"the network could not take the first training rows (inputs {shapes}): {error}"
            ) from error
        if outputs.ndim == 0 or len(outputs) != min(self.n, 2):
            raise ValueError(
                f"the network's outputs {tuple(outputs.shape)} for inputs {shapes} are not one for each row"
            )
        if bool(outputs.isnan().any()):
            raise ValueError("the network's outputs for the first training rows are NaN: look at its weights")
        if not _same(move(passed, torch.device("cpu")), x):
            raise ValueError(
                "the module changes its inputs in place, so that a second pass would see others: "
                "take inplace=True off its first layer, or let forward start with x = x.clone()"
            )
        return outputs[:1]

    def _first_inputs(self) -> Inputs:
        """The inputs of the first rows, which are read twice to see whether they stay the same."""
        first = [torch.arange(min(self.n, 2))]
        reads = []
        for seed in (0, 1):
            torch.default_generator.manual_seed(seed)
            reads.append(next(self.train.batches(first))[0])
        if not _same(*reads):
            self.warnings.append(
                "the training data differ each time they are read (augmentation inside the data set?): exact sums over "
                "the data will be noisy; pass a data set without it, and augment=... for training"
            )
        return reads[0]


def _same(x: Inputs, other: Inputs) -> bool:
    return all(torch.equal(a, b) for a, b in zip(tensors(x), tensors(other), strict=True))


def _described(value: Any) -> str:
    """A digest of a likelihood or prior with its settings; the name of one that cannot be saved."""
    found: dict[str, Tensor] = {}
    try:
        digest = hashlib.sha256(json.dumps(encode(value, found, "")).encode())
    except TypeError:
        return type(value).__name__
    for tensor in found.values():
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _split(rows: Rows, share: float, seed: int) -> tuple[Rows, Rows]:
    held_out = round(share * len(rows))
    rest = len(rows) - held_out
    if held_out < 1 or rest < 1:
        raise ValueError(
            f"validation={share} of {len(rows)} rows leaves {rest} to train on and {held_out} to validate with"
        )
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    return rows.part(order[held_out:].sort().values), rows.part(order[:held_out].sort().values)


def _spread(n: int, count: int) -> Tensor:
    """At most `count` positions spread evenly over n."""
    return torch.linspace(0, n - 1, min(n, count), dtype=torch.float64).long()


def _tensor_dataset(parts: tuple[Tensor, ...]) -> TensorDataset:
    lengths = [len(part) if part.ndim else 0 for part in parts]
    if len(set(lengths)) > 1:
        raise ValueError(f"the data is a tuple of tensors with {lengths} rows: each must have as many as the others")
    return TensorDataset(*parts)


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
    sampler: Any = batches.sampler if type(batches) is samplers.BatchSampler else batches
    size: int = getattr(batches, "batch_size", 128)
    if isinstance(sampler, DistributedSampler):
        return None, size
    if isinstance(sampler, samplers.SubsetRandomSampler):
        return torch.as_tensor(sampler.indices, dtype=torch.long).sort().values, size
    shuffled = isinstance(sampler, samplers.RandomSampler) and not sampler.replacement
    rows: Any = loader.dataset
    if (shuffled or isinstance(sampler, samplers.SequentialSampler)) and len(sampler) == len(rows):
        return None, size
    raise ValueError(
        f"the loader's {type(sampler).__name__} weights, repeats or leaves out rows, and a posterior needs each row "
        "once: pass the data set itself, or a torch.utils.data.Subset of it"
    )


def _split_batch(batch: Any, needs_targets: bool) -> Batch:
    """A batch as (inputs, targets)."""
    if isinstance(batch, Mapping):
        key = next((key for key in _TARGET_KEYS if key in batch), None)
        if key is not None:
            return {name: value for name, value in batch.items() if name != key}, _as_targets(batch[key])
        if not needs_targets:
            return dict(batch), torch.zeros(count_rows(dict(batch)), dtype=torch.long)
        known = ", ".join(_TARGET_KEYS)
        raise ValueError(f"a batch is a dict of {sorted(batch)} without targets: name them one of {known}")
    if isinstance(batch, list | tuple) and len(batch) == 2:
        return _as_inputs(batch[0]), _as_targets(batch[1])
    if isinstance(batch, list | tuple) and len(batch) > 2:
        return tuple(batch[:-1]), _as_targets(batch[-1])
    if not needs_targets:
        inputs = _as_inputs(batch[0] if isinstance(batch, list | tuple) else batch)
        return inputs, torch.zeros(count_rows(inputs), dtype=torch.long)
    raise ValueError(f"the rows are each a {type(batch).__name__} without targets: they must be (input, target) pairs")


def _as_inputs(x: Any) -> Inputs:
    return dict(x) if isinstance(x, Mapping) else tuple(x) if isinstance(x, list) else x


def _as_targets(y: Any) -> Tensor:
    try:
        return torch.as_tensor(y)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"the targets of a batch are a {type(y).__name__} that makes no tensor: {error}") from error
