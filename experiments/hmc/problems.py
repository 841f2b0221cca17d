"""The problems of this experiment: rows, networks, a prior, and corruptions of the test rows.

    digits     64-32-10    1,237 rows to train on, 200 to tune on, 360 to test on
    mnist1d    40-32-10    1,000                   500             1,000
    mnist      784-30-10   1,000                   500             1,000

SiLU networks, and a Gaussian prior whose precision is the base of every sweep. A seed draws the rows. `posteriors.toml`
names the functions of this file; the scripts beside it take `problem` and `task`.
"""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import caveat
from caveat import data, models
from caveat.data import DataSet

PRECISIONS = {"digits": 10.0, "mnist1d": 3.0, "mnist": 30.0}  # of the prior
ROWS = {"digits": (1237, 200, 360), "mnist1d": (1000, 500, 1000), "mnist": (1000, 500, 1000)}


def digits(data_dir: Path | None, seed: int) -> DataSet:
    return drawn(data.load("digits", data_dir, seed=seed), seed)


def mnist1d(data_dir: Path | None, seed: int) -> DataSet:
    return drawn(data.load("mnist1d", data_dir), seed)


def mnist(data_dir: Path | None, seed: int) -> DataSet:
    return drawn(data.load("mnist", data_dir), seed)


def drawn(whole: DataSet, seed: int) -> DataSet:
    """Some rows of a data set, chosen by a seed."""
    train, validation, test = ROWS[whole.name]
    rng = torch.Generator().manual_seed(seed)
    first = torch.randperm(len(whole.train), generator=rng)[: train + validation]
    last = torch.randperm(len(whole.test), generator=rng)[:test]
    return replace(
        whole,
        train=chosen(whole.train, first[:train]),
        validation=chosen(whole.train, first[train:]),
        test=chosen(whole.test, last),
    )


def chosen(rows: TensorDataset, positions: Tensor) -> TensorDataset:
    return TensorDataset(*(tensor[positions] for tensor in rows.tensors))


def digits_net() -> nn.Module:
    return models.mlp(64, 10, (32,), nn.SiLU)


def mnist1d_net() -> nn.Module:
    return models.mlp(40, 10, (32,), nn.SiLU)


def mnist_net() -> nn.Module:
    return models.mlp(784, 10, (30,), nn.SiLU)


def problem(name: str) -> DataSet:
    """The rows of a problem, those of seed 0."""
    return {"digits": digits, "mnist1d": mnist1d, "mnist": mnist}[name](None, 0)


def network(name: str) -> nn.Module:
    """The network of a problem, at the initial weights of seed 0."""
    torch.manual_seed(0)
    return {"digits": digits_net, "mnist1d": mnist1d_net, "mnist": mnist_net}[name]()


def task(rows: DataSet, prior: caveat.Prior | None = None) -> caveat.Task:
    """A problem with its Gaussian prior, unless another is given."""
    prior = prior or caveat.GaussianPrior(PRECISIONS[rows.name])
    return caveat.Task(network(rows.name), rows.train, caveat.Categorical(), prior, validation=rows.validation)


def noise(rows: DataSet, std: float, seed: int) -> Tensor:
    """Gaussian noise; the standard deviation of the training rows is 1."""
    x = rows.test.tensors[0]
    return x + std * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))


def brightness(rows: DataSet, more: float, seed: int) -> Tensor:
    """The same number added to every pixel."""
    return rows.test.tensors[0] + more


def contrast(rows: DataSet, share: float, seed: int) -> Tensor:
    """A share of the distance from the row's mean is taken away."""
    x = rows.test.tensors[0]
    mean = x.flatten(1).mean(1).reshape(-1, *[1] * (x.ndim - 1))
    return mean + (1 - share) * (x - mean)


def blur(rows: DataSet, passes: float, seed: int) -> Tensor:
    """Rows [N, D] or images [N, 1, H, W] some times through the filter (1, 2, 1)/4 along each axis."""
    x = rows.test.tensors[0]
    taps = x.new_tensor([0.25, 0.5, 0.25])
    for _ in range(int(passes)):
        if x.ndim == 2:
            x = F.conv1d(F.pad(x[:, None], (1, 1), mode="replicate"), taps[None, None])[:, 0]
        else:
            x = F.conv2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), torch.outer(taps, taps)[None, None])
    return x


def rotation(rows: DataSet, degrees: float, seed: int) -> Tensor:
    """Images rotated, what comes in being black."""
    return data.rotate(rows.test.tensors[0], degrees, rows.preprocessing["black"][0])


def empcov(rows: DataSet, precision: float) -> caveat.Prior:
    """EmpCov, as wide as the Gaussian prior along the training rows: the first layer's outputs vary as much there.

    That is tr((alpha Sigma + epsilon I) Sigma) = tr(Sigma) / precision, with epsilon a thousandth of 1 / precision.
    """
    covariance = rows.train.tensors[0].flatten(1).double().T.cov(correction=0)
    epsilon = 1e-3 / precision
    alpha = float(covariance.trace() * (1 / precision - epsilon) / covariance.square().sum())
    return caveat.EmpCovPrior("1.weight", covariance, alpha, epsilon, precision)
