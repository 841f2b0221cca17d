"""The EmpCov prior at the size of MNIST: corrupted images, and digits of another set.

    python experiments/hmc/empcov_mnist.py --data-dir DATA --device cuda                   # empcov_mnist.csv
    python experiments/hmc/empcov_mnist.py --data-dir DATA --rows 500 --test 200 --quick   # to see that it runs

Izmailov et al. 2021 (*Dangers of Bayesian model averaging under covariate shift*): three hidden layers of 256, a prior
variance of 1/100, HMC under a Gaussian and under an EmpCov prior of the same width along the data, beside MAP and a
deep ensemble. (Their other set is SVHN.) On two cores: `empcov_prior` of `posteriors.toml`, and `domain.py`.
"""

import argparse
import csv
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import caveat
from caveat import HMC, MAP, DeepEnsemble, Training, data, models

CORRUPTIONS = ("gaussian_noise", "shot_noise", "impulse_noise", "motion_blur", "fog", "brightness", "contrast")
SEVERITIES = (1, 3, 5)
PRECISION = 100.0
LAYER = "1.weight"


def tests(images: data.DataSet, count: int) -> dict[str, TensorDataset]:
    """Test rows: clean, corrupted, and scikit-learn's digits in MNIST's size and standardisation."""
    mean, std = (float(torch.tensor(images.preprocessing[key]).flatten()[0]) for key in ("mean", "std"))
    x, y = (tensor[:count] for tensor in images.test.tensors)
    pixels = (x * std + mean).clamp(0, 1)
    found = {"clean": TensorDataset(x, y)}
    for name in CORRUPTIONS:
        for severity in SEVERITIES:
            worse: Tensor = caveat.shift(pixels, name, severity=severity, seed=0)
            found[f"{name} {severity}"] = TensorDataset((worse - mean) / std, y)
    other = data.load("digits", seed=0)
    of, by = (torch.tensor(other.preprocessing[key]).reshape(1, -1, 1, 1) for key in ("mean", "std"))
    x, y = (torch.cat(pair) for pair in zip(other.train.tensors, other.test.tensors, strict=True))
    # Digits of 8 x 8 pixels fill their frame, those of MNIST 20 x 20 pixels of 28 x 28.
    large = F.pad(F.interpolate(x * by + of, size=(20, 20), mode="bilinear"), (4, 4, 4, 4))
    return found | {"scikit-learn's digits": TensorDataset((large - mean) / std, y)}


def empcov(x: Tensor) -> caveat.Prior:
    """EmpCov as wide as the Gaussian prior along the rows, as in `problems.empcov_prior`."""
    covariance = x.flatten(1).double().T.cov(correction=0)
    epsilon = 1e-3 / PRECISION
    alpha = float(covariance.trace() * (1 / PRECISION - epsilon) / covariance.square().sum())
    return caveat.EmpCovPrior(LAYER, covariance, alpha, epsilon, PRECISION)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, default=60_000, help="to train on")
    parser.add_argument("--test", type=int, default=10_000, help="test rows of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a few iterations of everything")
    parser.add_argument("--csv", type=Path, default=Path(__file__).with_name("empcov_mnist.csv"))
    a = parser.parse_args()
    images = data.load("mnist", data_dir=a.data_dir)
    x, y = (tensor[: a.rows] for tensor in images.train.tensors)
    hmc = HMC(chains=2, length=3, warmup=20) if a.quick else HMC(chains=3, length=100, warmup=60)
    training = Training(epochs=2 if a.quick else 50, learning_rate=1e-3)
    gaussian = caveat.GaussianPrior(PRECISION)
    fits: dict[str, tuple[caveat.Prior, caveat.Method]] = {
        "map": (gaussian, MAP(training=training)),
        "map, EmpCov": (empcov(x), MAP(training=training)),
        "ensemble of 5": (gaussian, DeepEnsemble(5, training)),
        "hmc": (gaussian, hmc),
        "hmc, EmpCov": (empcov(x), hmc),
    }
    scored, rows = tests(images, a.test), []
    for name, (prior, method) in fits.items():
        torch.manual_seed(a.seed)
        module = models.mlp(784, 10, (256, 256, 256), nn.SiLU)
        task = caveat.Task(module, (x, y), caveat.Categorical(), prior)
        posterior = caveat.fit(task, method, seed=a.seed, device=a.device)
        scores = caveat.evaluate(posterior, scored, seed=a.seed, progress=False)
        for test in scored:
            rows.append([name, test, *(f"{scores[test][metric].mean:.5g}" for metric in ("accuracy", "nll", "ece"))])
            print(*rows[-1], flush=True)
        with a.csv.open("w", newline="") as file:  # after each fit: the next may take hours
            csv.writer(file).writerows([("method", "rows", "accuracy", "nll", "ece"), *rows])


if __name__ == "__main__":
    main()
