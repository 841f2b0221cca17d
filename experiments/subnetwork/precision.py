"""Which prior precision: as given, scaled, from the evidence (one, or one a layer), or from validation rows?

    python experiments/subnetwork/precision.py

Small networks (two hidden layers of 64) on digits (and digits rotated by 30 degrees), mnist1d, diabetes and breast
cancer, three seeds. All fits see the same rows: a tenth is held out for "validation" and left unused by the others.
Test NLL, one row a method, way and seed in the csv; the printed table has means over seeds.
"""

import csv
import itertools
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import caveat
from caveat import MAP, Laplace, LastLayerLaplace, SubnetworkLaplace, Training, data, models

WAYS = ("given", "scaled", "evidence", "layers", "validation")
METHODS = {
    "subnetwork 0.05": lambda way: SubnetworkLaplace(0.05, precision=way),
    "last layer": lambda way: LastLayerLaplace(precision=way),
    "kronecker": lambda way: Laplace("kronecker", precision=way),
    "diagonal": lambda way: Laplace("diagonal", precision=way),
}


def problem(name: str, seed: int) -> tuple[caveat.Task, dict[str, Any]]:
    """A task and its test data by name."""
    torch.manual_seed(seed)
    rows = data.load(name)
    x, y = rows.test.tensors
    tests = {"clean": TensorDataset(x, y)}
    if name == "digits":
        tests["rotated"] = TensorDataset(data.rotate(x, 30, fill=rows.preprocessing["black"]), y)
    likelihood: Any = {
        "categorical": caveat.Categorical(),
        "bernoulli": caveat.Bernoulli(),
        "gaussian": caveat.Gaussian(standardise=True),
    }[rows.likelihood]
    network = models.mlp(x[0].numel(), rows.n_outputs, hidden=(64, 64), activation=nn.SiLU)
    return caveat.Task(network, DataLoader(rows.train, 64), likelihood, validation=0.1), tests


def main() -> None:
    """Fit, score, write, and print the means."""
    target = Path(__file__).with_name("precision.csv")
    found: list[tuple[str, int, str, str, str, float, str]] = []
    for name, seed in itertools.product(("digits", "mnist1d", "diabetes", "breast_cancer"), range(3)):
        task, tests = problem(name, seed)
        start = caveat.fit(task, MAP(training=Training(epochs=100)), seed=seed, progress=False)
        tempered = caveat.fit(task, MAP(temperature=True, training=Training(epochs=0)), start=start, progress=False)
        fits: list[tuple[str, str, caveat.Posterior]] = [("map", "", start), ("map", "tempered", tempered)]
        for method, way in itertools.product(METHODS, WAYS):
            posterior = caveat.fit(task, METHODS[method](way), start=start, seed=seed, progress=False)
            fits.append((method, way, posterior))
        for method, way, posterior in fits:
            scores = caveat.evaluate(posterior, tests, seed=seed, progress=False)
            precision = posterior.info.diagnostics.get("prior_precision", "")
            found += [(name, seed, method, way, s.name, s.metrics["nll"].mean, str(precision)) for s in scores.data]
        print(f"{name} seed {seed} done", file=sys.stderr, flush=True)
    with target.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["data", "seed", "method", "precision", "on", "nll", "value"])
        writer.writerows(found)
    columns = list(dict.fromkeys((row[0], row[4]) for row in found))
    print("| method | precision |", " | ".join(" ".join(column) for column in columns), "|")
    print("|---" * (2 + len(columns)) + "|")
    for key in dict.fromkeys((row[2], row[3]) for row in found):
        cells = [[row[5] for row in found if (row[2], row[3]) == key and (row[0], row[4]) == c] for c in columns]
        print("|", " | ".join([*key, *(f"{sum(cell) / len(cell):.4f}" for cell in cells)]), "|")


if __name__ == "__main__":
    sys.exit(main())
