"""Shifts of rows [N, D]: tables, and signals such as MNIST-1D; and splits that leave a gap.

Rows are taken as a `DataSet` has them, standardised: a standard deviation is 1.
"""

import torch
from torch import Tensor

from caveat.data.dataset import Arrays, DataSet, assemble
from caveat.data.shifts.draws import RowDraws

__all__ = ["feature_shift", "gap_mask", "gap_split", "signal_noise", "signal_scale", "signal_shift"]


def feature_shift(x: Tensor, deviations: float, draws: RowDraws) -> Tensor:
    """Every column moves by this many standard deviations, up or down: the same way for all rows, by the seed."""
    signs = torch.where(draws.shared(x.shape[1]) < 0.5, -1.0, 1.0)
    return x + deviations * signs


def signal_noise(x: Tensor, deviations: float, draws: RowDraws) -> Tensor:
    """Add deviations e with e standard normal."""
    return x + deviations * draws.normal(x.shape[1])


def signal_shift(x: Tensor, share: float, draws: RowDraws) -> Tensor:
    """Moved along the axis by a share of the length, to the left or right by each row; what leaves comes in again."""
    length = x.shape[1]
    sign = torch.where(draws.uniform(1) < 0.5, -1.0, 1.0)  # [N, 1]
    place = torch.arange(length) - sign * share * length
    low = place.floor()
    first, second = (x.gather(1, (low + step).long() % length) for step in (0, 1))
    return torch.lerp(first, second, place - low)


def signal_scale(x: Tensor, more: float, draws: RowDraws) -> Tensor:
    """Larger or smaller by a factor 1 + more, as each row has it."""
    return x * torch.where(draws.uniform(1) < 0.5, 1 / (1 + more), 1 + more)


def gap_mask(values: Tensor, share: float = 1 / 3, seed: int = 0) -> Tensor:
    """The middle share of values [N], True where a row is in it; the seed draws the order of equal ones."""
    if values.ndim != 1 or not 0 < share < 1:
        raise ValueError(f"a gap takes one column and a share in (0, 1), not shape {tuple(values.shape)} and {share}")
    n = len(values)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    count = round(share * n)
    start = (n - count) // 2
    ranks = values[order].argsort(stable=True)
    mask = torch.zeros(n, dtype=torch.bool)
    mask[order[ranks[start : start + count]]] = True
    return mask


def gap_split(data: DataSet, feature: int, seed: int = 0) -> DataSet:
    """A table split anew: all its rows, tested on the middle third along one feature (Foong et al. 2019).

    Inputs are standardised again, by the new training rows. The published gap splits of the `uci/` sets, which differ
    where values tie, are `load(name, gap=True)`.
    """
    x, y = (torch.cat(parts) for parts in zip(data.train.tensors, data.test.tensors, strict=True))
    if x.ndim != 2 or "constant_features" not in data.preprocessing:
        raise ValueError(f"{data.name} is not a table with standardised columns, which a gap split takes")
    if not 0 <= feature < x.shape[1]:
        raise ValueError(f"feature={feature}, but {data.name} has features 0 to {x.shape[1] - 1}")
    mean, std = (torch.tensor(data.preprocessing[key], dtype=torch.float64) for key in ("mean", "std"))
    x = x.double() * std + mean
    is_test = gap_mask(x[:, feature], seed=seed)
    targets = y if data.likelihood == "gaussian" else y.flatten().long()
    arrays = Arrays(*(part[mask].numpy() for mask in (~is_test, is_test) for part in (x, targets)))
    provenance = {"source": data.preprocessing["source"], "split": f"gap in feature {feature}, seed {seed}"}
    return assemble(data.name, arrays, data.likelihood, data.class_names, provenance)
