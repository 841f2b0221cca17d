"""Another domain: networks that were trained on scikit-learn's digits read those of MNIST, shrunk to 8 x 8.

    python experiments/hmc/domain.py            # domain.csv: minutes on one core
    python experiments/hmc/domain.py --summary  # only the table of the README

Does HMC lose more than a MAP and an ensemble when the images come from elsewhere, and does the EmpCov prior mend it
(Izmailov et al. 2021, of MNIST and SVHN, STL-10 and CIFAR-10)? The rows and `hmc` of `posteriors.toml`.
"""

import csv
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded

import torch
from problems import problem, task
from tables import measured, table
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from weights import fitted

import caveat
from caveat import DeepEnsemble, Training, data

METRICS = ("accuracy", "nll", "ece")


def shrunk() -> TensorDataset:
    """MNIST's test images without their margins of 4 pixels, in the size and standardisation of digits."""
    digits, mnist = data.load("digits", seed=0), data.load("mnist")
    (x, y), (mean, std) = mnist.test.tensors, scale(mnist)
    pixels = (x * std + mean)[..., 4:24, 4:24]
    mean, std = scale(digits)
    return TensorDataset((F.interpolate(pixels, size=(8, 8), mode="bilinear", antialias=True) - mean) / std, y)


def scale(found: data.DataSet) -> tuple[float, float]:
    """Mean and standard deviation of pixels in [0, 1]."""
    mean, std = (float(torch.tensor(found.preprocessing[key]).flatten()[0]) for key in ("mean", "std"))
    return mean, std


def measure(path: Path, references: Path) -> None:
    """HMC, EmpCov, MAP and an ensemble, on digits and on MNIST."""
    rows = problem("digits")
    tests = {"digits": rows.test, "mnist": shrunk()}
    posteriors = fitted(rows, references)
    ensemble = DeepEnsemble(5, Training(epochs=300, learning_rate=1e-2))
    posteriors["ensemble of 5"] = caveat.fit(task(rows), ensemble, seed=0, progress=False)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["method", *(f"{name} {metric}" for name in tests for metric in METRICS)])
        for name, posterior in posteriors.items():
            scores = caveat.evaluate(posterior, tests, seed=0, progress=False)
            writer.writerow([name, *(f"{scores[test][metric].mean:.5g}" for test in tests for metric in METRICS)])


def main() -> None:
    path = measured(__file__, __doc__, measure)
    with path.open() as file:
        heads, *rows = csv.reader(file)
    table(heads, [(row[0], row[1:]) for row in rows])


if __name__ == "__main__":
    main()
