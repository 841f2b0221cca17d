"""The problems of this experiment: rows, networks, priors, and corruptions of the test rows.

    digits     64-32-10    1,237 rows to train on, 200 to tune on, 360 to test on
    mnist1d    40-32-10    1,000                   500             1,000
    mnist      784-30-10   1,000                   500             1,000

SiLU networks, and a Gaussian prior whose precision is the base of every sweep. A seed draws the rows.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import caveat
from caveat import data, models


@dataclass(frozen=True)
class Size:
    """How large a problem is."""

    hidden: int
    precision: float  # of the prior
    rows: tuple[int, int, int]  # for training, validation, test


PROBLEMS = {
    "digits": Size(32, 10.0, (1237, 200, 360)),
    "mnist1d": Size(32, 3.0, (1000, 500, 1000)),
    "mnist": Size(30, 30.0, (1000, 500, 1000)),
}
STRENGTHS = {
    "noise": (0.3, 0.6, 1.0),  # its standard deviation; the training rows' is 1
    "brightness": (0.5, 1.0, 1.5),  # added to every pixel
    "contrast": (0.4, 0.6, 0.8),  # share of the distance from the row's mean that is taken away
    "blur": (1, 2, 3),  # passes of a (1, 2, 1)/4 filter
    "rotation": (15, 30, 45),  # degrees; images only
}
PARTS = ("train", "validation", "test")


@dataclass(frozen=True)
class Problem:
    """One problem and seed, with the test rows as they are and corrupted."""

    name: str
    seed: int
    rows: dict[str, TensorDataset]  # by part
    black: float

    def task(self, prior: caveat.Prior | None = None) -> caveat.Task:
        """With the Gaussian prior, unless another is given."""
        size = PROBLEMS[self.name]
        prior = prior or caveat.GaussianPrior(size.precision)
        return caveat.Task(
            self.model(), self.rows["train"], caveat.Categorical(), prior, validation=self.rows["validation"]
        )

    def model(self) -> nn.Module:
        """The network, at initial weights of the seed."""
        torch.manual_seed(self.seed)
        return models.mlp(self.rows["train"].tensors[0][0].numel(), 10, (PROBLEMS[self.name].hidden,), nn.SiLU)

    def tests(self) -> dict[str, TensorDataset | dict[float, TensorDataset]]:
        """The test rows: clean, and by corruption and strength."""
        x, y = self.rows["test"].tensors
        found: dict[str, TensorDataset | dict[float, TensorDataset]] = {"clean": self.rows["test"]}
        for kind, strengths in STRENGTHS.items():
            if kind != "rotation" or x.ndim == 4:
                found[kind] = {s: TensorDataset(self._corrupted(x, kind, s), y) for s in strengths}
        return found

    def _corrupted(self, x: Tensor, kind: str, strength: float) -> Tensor:
        if kind == "noise":
            return x + strength * torch.randn(x.shape, generator=torch.Generator().manual_seed(self.seed))
        if kind == "brightness":
            return x + strength
        if kind == "contrast":
            mean = x.flatten(1).mean(1).reshape(-1, *[1] * (x.ndim - 1))
            return mean + (1 - strength) * (x - mean)
        if kind == "rotation":
            return data.rotate(x, strength, self.black)
        for _ in range(int(strength)):
            x = blurred(x)
        return x


def blurred(x: Tensor) -> Tensor:
    """Rows [N, D] or images [N, 1, H, W] through the filter (1, 2, 1)/4 along each axis."""
    taps = x.new_tensor([0.25, 0.5, 0.25])
    if x.ndim == 2:
        return F.conv1d(F.pad(x[:, None], (1, 1), mode="replicate"), taps[None, None])[:, 0]
    return F.conv2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), torch.outer(taps, taps)[None, None])


def problem(name: str, seed: int, file: Path | None = None) -> Problem:
    """A problem, from a file made by `export` or from where the data sets lie."""
    if file is None:
        arrays = gathered(name, seed)
    else:
        with np.load(file) as content:
            prefix = f"{name}/{seed}/"
            arrays = {key.removeprefix(prefix): content[key] for key in content.files if key.startswith(prefix)}
        if not arrays:
            raise ValueError(f"{file} has no {name} of seed {seed}: make it again with --export")
    rows = {part: TensorDataset(*(torch.from_numpy(arrays[f"{part}/{axis}"]) for axis in "xy")) for part in PARTS}
    return Problem(name, seed, rows, float(arrays["black"]))


def gathered(name: str, seed: int) -> dict[str, np.ndarray]:
    """The rows of a problem, chosen by its seed, as plain arrays."""
    found = data.load("digits", seed=seed) if name == "digits" else data.load(name)
    train, validation, test = PROBLEMS[name].rows
    rng = torch.Generator().manual_seed(seed)
    first = torch.randperm(len(found.train), generator=rng)[: train + validation]
    last = torch.randperm(len(found.test), generator=rng)[:test]
    chosen = {"train": first[:train], "validation": first[train:], "test": last}
    arrays = {"black": np.array(found.preprocessing.get("black", [0.0])[0])}
    for part, rows in chosen.items():
        source = found.test if part == "test" else found.train
        arrays |= {f"{part}/{axis}": tensor[rows].numpy() for axis, tensor in zip("xy", source.tensors, strict=True)}
    return arrays


def export(file: Path, seeds: int) -> None:
    """All rows of all problems in one npz file, for a machine without the data sets."""
    arrays = {
        f"{name}/{seed}/{key}": value
        for name in PROBLEMS
        for seed in range(seeds)
        for key, value in gathered(name, seed).items()
    }
    np.savez_compressed(file, **arrays)


def scaled_prior(name: str, factor: float) -> caveat.Prior:
    """The Gaussian prior with its variance times a factor."""
    return caveat.GaussianPrior(PROBLEMS[name].precision / factor)


def family_prior(name: str, family: str) -> caveat.Prior:
    """A prior of another family with the Gaussian's variance."""
    variance = 1 / PROBLEMS[name].precision
    match family:
        case "Laplace":
            return caveat.LaplacePrior((variance / 2) ** 0.5)
        case "Student-t":  # variance scale^2 nu / (nu - 2)
            return caveat.StudentTPrior((variance * 3 / 5) ** 0.5, 5.0)
        case "logistic":
            return caveat.LogisticPrior((3 * variance) ** 0.5 / np.pi)
        case "mixture":  # a third as wide for half of the weights
            return caveat.GaussianMixturePrior(((variance / 5) ** 0.5, (9 * variance / 5) ** 0.5), (0.5, 0.5))
    raise ValueError(f"no prior family {family!r}: there are Laplace, Student-t, logistic and mixture")


def empcov_prior(found: Problem) -> caveat.Prior:
    """EmpCov, as wide as the Gaussian prior along the training rows: the first layer's outputs vary as much there.

    That is tr((alpha Sigma + epsilon I) Sigma) = tr(Sigma) / precision, with epsilon a thousandth of 1 / precision.
    """
    x, precision = found.rows["train"].tensors[0], PROBLEMS[found.name].precision
    covariance = x.flatten(1).double().T.cov(correction=0)
    epsilon = 1e-3 / precision
    alpha = float(covariance.trace() * (1 / precision - epsilon) / covariance.square().sum())
    return caveat.EmpCovPrior("1.weight", covariance, alpha, epsilon, precision)
