"""Which weights do samples of the whole posterior choose, and is a subnetwork of them better?

    CAVEAT_DATA=DATA python experiments/sampled_laplace/subnetworks.py    # subnetworks.csv: minutes on one core
    python experiments/sampled_laplace/subnetworks.py --summary           # only the tables

Scores of `SubnetworkLaplace` from a diagonal approximation (variance, energy), from 64 samples of the posterior over
all weights (sampled, sampled_energy), and from that posterior's exact covariance, which these networks are small enough
for (exact, exact_energy): a CNN of 3,818 weights on digits, clean and rotated, and an MLP of 3,201 on gap splits of
wine. The overlap is the Jaccard index with the subnetwork of the exact marginal variances or, for scores that weigh
them by the outputs' derivatives, of exact_energy. `reported` is the distance to the whole posterior that the method
gives, under which weights are independent; `true` is the 2-Wasserstein distance itself. Both are under the task's own
prior. Predictions are under the precision that validation rows, or the evidence, then choose.
"""

import argparse
import csv
import itertools
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import caveat
from caveat import MAP, SubnetworkLaplace, Training, data, models
from caveat.engine.flat_weights import flat, flat_places
from caveat.engine.laplace import Sweep, flat_prior
from caveat.engine.laplace.selection import gaussian_wasserstein
from caveat.engine.linearised import marginal_variances
from caveat.engine.run import Run

SCORES = ("variance", "sampled", "exact", "energy", "sampled_energy", "exact_energy", "random")
COUNTS, WAYS = (100, 400), ("validation", "evidence")
COLUMNS = (
    "data",
    "seed",
    "score",
    "weights",
    "precision",
    "value",
    "overlap",
    "reported",
    "true",
    "seconds",
    "on",
    "nll",
)
COLUMNS += ("ece",)
Row = dict[str, str]


def digits(seed: int) -> tuple[caveat.Task, dict[str, TensorDataset]]:
    """A small CNN, and test images by angle."""
    rows = data.load("digits")
    x, y = rows.test.tensors
    torch.manual_seed(seed)
    convolutions = [nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU()]
    module = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(256, 10))
    task = caveat.Task(module, rows.train, caveat.Categorical(), caveat.GaussianPrior(1.0), validation=0.1)
    rotated = {f"rotated {a}": TensorDataset(data.rotate(x, a, rows.preprocessing["black"]), y) for a in (30, 60)}
    return task, {"clean": TensorDataset(x, y)} | rotated


def wine(seed: int) -> tuple[caveat.Task, dict[str, TensorDataset]]:
    """An MLP, and rows from the middle of one feature, which it has not seen."""
    rows = data.load("uci/wine", gap=True, split=seed)
    torch.manual_seed(seed)
    module = models.mlp(rows.train.tensors[0].shape[1], 1, hidden=(50, 50))
    likelihood = caveat.Gaussian(standardise=True)
    task = caveat.Task(module, rows.train, likelihood, caveat.GaussianPrior(1.0), validation=0.15)
    return task, {"gap": rows.test}


@dataclass(frozen=True)
class Whole:
    """The posterior over all weights under the task's prior."""

    precision: Tensor  # [d, d], float64
    covariance: Tensor
    sampled: Tensor  # marginal variances by samples, [d]
    energy: Tensor  # sum over rows of the squared derivatives of all outputs, [d]
    alive: Tensor  # which weights have any curvature; only they are chosen

    @classmethod
    def of(cls, task: caveat.Task, point: caveat.Posterior, seed: int) -> "Whole":
        """At the MAP."""
        params, hyper, network = dict(point.state["params"]), point.state["hyper"], task.network
        prior, sweep = flat_prior(network, params), Sweep(network, params, hyper, task.train, Run())
        precision = sweep.full(None)[0].ggn.double()
        alive = precision.diagonal() > 1e-10 * precision.diagonal().mean()
        precision.diagonal().add_(prior.double())
        covariance = torch.cholesky_inverse(torch.linalg.cholesky(precision))
        sampled = marginal_variances(task, network, params, hyper, prior, Run(seed))
        energy = flat(network, sweep.scores(exact=True)[1])
        return cls(precision, covariance, sampled, energy.double(), alive)

    def score(self, name: str) -> str | Tensor:
        """What `SubnetworkLaplace` takes: its own name, or one number a weight, as samples need not be drawn again."""
        if not name.startswith(("exact", "sampled")):
            return name
        variances = self.covariance.diagonal() if name.startswith("exact") else self.sampled
        return variances * self.energy if name.endswith("energy") else variances

    def overlap(self, index: Tensor, name: str) -> float:
        """The Jaccard index of a score's choice with the exact one of the same size."""
        exact = self.score("exact_energy" if name.endswith("energy") else "exact")
        assert isinstance(exact, Tensor)
        best = exact.masked_fill(~self.alive, -torch.inf).topk(len(index)).indices
        both = len(set(best.tolist()) & set(index.tolist()))
        return both / (2 * len(index) - both)

    def distance(self, index: Tensor) -> float:
        """To the posterior of a subnetwork, under which all other weights stay where they are.

        W^2 = tr C - tr C_SS + W^2(N(0, C_SS), N(0, P_SS^-1)),   P = C^-1
        """
        own = self.covariance[index][:, index]
        alone = torch.cholesky_inverse(torch.linalg.cholesky(self.precision[index][:, index]))
        rest = self.covariance.diagonal().sum() - own.diagonal().sum()
        return math.sqrt(float(rest) + gaussian_wasserstein(own, alone) ** 2)


def chosen(posterior: caveat.Posterior) -> Tensor:
    """The weights of a subnetwork, as places among all."""
    every = flat_places(posterior.network)
    return torch.cat([every[name].start + own.long() for name, own in posterior.state["subnetwork"].items()])


def measure(name: str, seed: int) -> list[Row]:
    """All scores, sizes and ways for one network."""
    task, tests = PROBLEMS[name](seed)
    point = caveat.fit(task, MAP(training=Training(epochs=60, batch_size=64)), seed=seed, progress=False)
    whole = Whole.of(task, point, seed)
    found: list[Row] = []

    def record(posterior: caveat.Posterior, **known: object) -> None:
        for scored in caveat.evaluate(posterior, tests, seed=seed, progress=False).data:
            metrics = {key: f"{scored[key].mean:.6g}" for key in ("nll", "ece") if key in scored.metrics}
            value = posterior.info.diagnostics.get("prior_precision", "")
            row = {"data": name, "seed": seed, "on": scored.name, "value": value, **known, **metrics}
            found.append({key: str(row.get(key, "")) for key in COLUMNS})

    record(point, score="map")
    for count, score, way in itertools.product(COUNTS, SCORES, WAYS):
        method = SubnetworkLaplace(count, whole.score(score), precision=way)  # type: ignore[arg-type]
        posterior = caveat.fit(task, method, start=point, seed=seed, progress=False)
        index = chosen(posterior)
        record(
            posterior,
            score=score,
            weights=len(index),
            precision=way,
            overlap=f"{whole.overlap(index, score):.4f}",
            reported=f"{posterior.info.diagnostics['subnetwork']['wasserstein']:.6g}",
            true=f"{whole.distance(index):.6g}",
            seconds=f"{posterior.info.seconds:.3g}",
        )
    return found


PROBLEMS = {"digits": digits, "wine": wine}


def summarise(found: list[Row]) -> None:
    """Means and standard errors over seeds, by size and score."""
    for name in dict.fromkeys(row["data"] for row in found):
        own = [row for row in found if row["data"] == name]
        on = list(dict.fromkeys(row["on"] for row in own))
        parts = [(part, key) for part in on for key in ("nll", "ece") if any(row[key] for row in own)]
        heads = ["overlap", "reported", "true", *(f"{key.upper()} {part}" for part, key in parts)]
        for way in WAYS:
            print(f"\n{name}, precision by {way}\n\n| weights | score | " + " | ".join(heads) + " |")
            print("|---" * (2 + len(heads)) + "|")
            here = [row for row in own if row["precision"] in ("", way)]
            for weights, score in dict.fromkeys((row["weights"], row["score"]) for row in here):
                rows = [row for row in here if (row["weights"], row["score"]) == (weights, score)]
                cells = [_mean([row[key] for row in rows if row["on"] == on[0]]) for key in heads[:3]]
                cells += [_mean([row[key] for row in rows if row["on"] == part]) for part, key in parts]
                print(f"| {weights} | {score} | " + " | ".join(cells) + " |")


def _mean(values: list[str]) -> str:
    """Of numbers, with the standard error over seeds."""
    numbers = [float(value) for value in values if value]
    if not numbers:
        return ""
    error = f" ±{stdev(numbers) / len(numbers) ** 0.5:.2g}" if len(set(numbers)) > 1 else ""
    return f"{mean(numbers):.3f}{error}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data", choices=list(PROBLEMS), action="append", help="only this; may be repeated")
    parser.add_argument("--csv", type=Path, default=Path(__file__).with_name("subnetworks.csv"))
    parser.add_argument("--summary", action="store_true", help="fit nothing")
    given = parser.parse_args()
    found = read(given.csv)
    if not given.summary:
        for name, seed in itertools.product(given.data or PROBLEMS, range(given.seeds)):
            if any((row["data"], row["seed"]) == (name, str(seed)) for row in found):
                continue
            started = time.perf_counter()
            found += measure(name, seed)
            print(f"{name} seed {seed}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
            with given.csv.open("w", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS)
                writer.writeheader()
                writer.writerows(found)
    summarise(found)


def read(path: Path) -> list[Row]:
    """What has been measured."""
    if not path.exists():
        return []
    with path.open() as file:
        return list(csv.DictReader(file))


if __name__ == "__main__":
    sys.exit(main())
