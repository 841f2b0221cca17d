"""Do 90% intervals and sets hold 90% of the targets, before and after `posterior.calibrate`?

    python benchmarks/coverage.py                                # all sets, five methods; goes on where it stopped
    python benchmarks/coverage.py --sets boston cifar10 --fits 1 --csv mine.csv
    python benchmarks/coverage.py --table coverage.csv           # only the table

The nine UCI sets and diabetes: at most 2,000 rows, 60% of them (an eighth for validation) are fitted to by a network
with 50 hidden units, and the rest is held out. CIFAR-10: 3,000 training images, a small convolutional network, 2,000 of
the test images. The held-out rows are parted at random into a half to calibrate with and a half to test on, 40 times
for each fit; of three fits (one of CIFAR-10), each with rows, first weights and a seed of its own. A line of the csv
is one fit: coverage and mean width (or size of sets) over its partitions, the width in units of the training targets'
standard deviation.
"""

import argparse
import csv
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

import caveat
from caveat import models
from caveat.data import load
from caveat.data.uci import TABLES
from caveat.predictive import Calibration, CategoricalPredictive, Conformity
from caveat.randomness import seeded

SETS = (*TABLES, "diabetes", "cifar10")
LEVEL, PARTITIONS, FITS = 0.9, 40, 3
MOST_ROWS, FITTED = 2000, 0.6
COLUMNS = [
    "data",
    "fit",
    "method",
    "score",
    "held_out",
    "before",
    "width_before",
    "after",
    "width_after",
    "stdev_after",
]
Rows = tuple[Tensor, Tensor]
Row = dict[str, Any]


def main() -> None:
    """Fit what the csv lacks, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", default=SETS, choices=SETS)
    parser.add_argument("--methods", nargs="+", help="some of the five")
    parser.add_argument("--fits", type=int, default=FITS)
    parser.add_argument("--csv", type=Path, default=Path(__file__).with_name("coverage.csv"))
    parser.add_argument("--table", type=Path, help="print the table of this file and stop")
    arguments = parser.parse_args()
    if arguments.table is None:
        for name in arguments.sets:
            for fit in range(1 if name == "cifar10" else arguments.fits):
                add_missing(arguments.csv, name, fit, arguments.methods)
    print(table(read(arguments.table or arguments.csv)))


def add_missing(path: Path, name: str, fit: int, only: list[str] | None) -> None:
    """Append to the csv what it lacks of one fit."""
    done = {row["method"] for row in read(path) if (row["data"], row["fit"]) == (name, str(fit))}
    methods = image_methods() if name == "cifar10" else table_methods()
    done |= set(methods) - set(only or methods)
    if set(methods) <= done:
        return
    task, held_out, scores = image_problem(fit) if name == "cifar10" else table_problem(name, fit)
    start = caveat.fit(task, methods["map"], seed=fit, progress=False)
    unit = 1.0 if name == "cifar10" else float(task.train.targets().std())
    for label, method in methods.items():
        if label in done:
            continue
        begin = start if type(method).starts_from == "trained" else None
        posterior = start if label == "map" else caveat.fit(task, method, start=begin, seed=fit, progress=False)
        for score in scores:
            line = {"data": name, "fit": fit, "method": label, "score": score, "held_out": len(held_out[1])}
            write(path, line | measured(posterior, held_out, score, unit))


def table_problem(name: str, fit: int) -> tuple[caveat.Task, Rows, tuple[str, ...]]:
    """A table's task and held-out rows, all rows of it shuffled by the fit's number."""
    whole = load(name if name == "diabetes" else f"uci/{name}")
    x, y = (torch.cat(pair) for pair in zip(whole.train.tensors, whole.test.tensors, strict=True))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(fit))[:MOST_ROWS]
    x, y = x[order], y[order]
    cut = round(FITTED * len(x))
    with seeded(fit):
        module = models.mlp(x.shape[1], 1)
    task = caveat.Task(module, (x[:cut], y[:cut]), caveat.Gaussian(standardise=True), validation=0.125)
    return task, (x[cut:], y[cut:]), ("deviation", "quantile")


def table_methods() -> dict[str, Any]:
    """The five methods, with knobs that take seconds a fit."""
    training = caveat.Training(epochs=60, batch_size=32)
    return {
        "map": caveat.MAP(training=training),
        "deep_ensemble": caveat.DeepEnsemble(members=3, training=training),
        "last_layer_laplace": caveat.LastLayerLaplace(),
        "subnetwork_laplace": caveat.SubnetworkLaplace(weights=200),
        "swag": caveat.SWAG(),
    }


def image_problem(fit: int) -> tuple[caveat.Task, Rows, tuple[str, ...]]:
    """CIFAR-10's task and held-out images."""
    whole = load("cifar10")
    x, y = (tensor[:3000] for tensor in whole.train.tensors)
    with seeded(fit):
        module = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(4),
            nn.Flatten(),
            nn.Linear(512, 10),
        )
    task = caveat.Task(module, (x, y), caveat.Categorical(), validation=0.1)
    return task, (whole.test.tensors[0][:2000], whole.test.tensors[1][:2000]), ("aps", "raps", "probability")


def image_methods() -> dict[str, Any]:
    """The same methods, trained for four epochs."""
    training = caveat.Training(epochs=4, batch_size=64, learning_rate=3e-3)
    noisy = caveat.Training(
        epochs=3, optimizer="sgd", learning_rate=0.02, schedule="constant", warmup=0.0, clip=1.0, batch_size=64
    )
    return table_methods() | {
        "map": caveat.MAP(training=training),
        "deep_ensemble": caveat.DeepEnsemble(members=3, training=training),
        "swag": caveat.SWAG(training=noisy, rank=2, scale=1.0, default_draws=10),
        "last_layer_laplace": caveat.LastLayerLaplace(structure="kronecker", default_draws=30),
        "subnetwork_laplace": caveat.SubnetworkLaplace(weights=100, default_draws=30),
    }


def measured(posterior: caveat.Posterior, rows: Rows, score: Any, unit: float) -> Row:
    """Coverage and width before and after calibration, over partitions of the held-out rows."""
    x, y = rows
    whole: Any = posterior.predict(x)
    before, width_before = held(whole, y)
    conformity = Conformity.chosen(whole.kind, score, None)
    shares, widths = [], []
    for partition in range(PARTITIONS if len(x) < 2000 else PARTITIONS // 4):
        rng = torch.Generator().manual_seed(partition)
        order = torch.randperm(len(x), generator=rng)
        half, rest = order[: len(x) // 2], order[len(x) // 2 :]
        scores = part(whole, half).calibration_scores(y[half], conformity, rng)
        calibrated = replace(part(whole, rest), calibration=Calibration.of(conformity, [scores]))
        share, width = held(calibrated, y[rest])
        shares.append(share)
        widths.append(width)
    numbers = {"before": before, "width_before": width_before / unit, "after": mean(shares)}
    numbers |= {"width_after": mean(widths) / unit, "stdev_after": float(torch.tensor(shares).std())}
    return {key: f"{value:.4f}" for key, value in numbers.items()}


def part(prediction: Any, rows: Tensor) -> Any:
    """The prediction of some of its rows: what `calibrate` and `predict` would make, without making it again."""
    if isinstance(prediction, CategoricalPredictive):
        return replace(prediction, log_samples=prediction.log_samples[:, rows])
    means, variances = prediction.means[:, rows], prediction.variances[:, rows]
    return replace(prediction, means=means, variances=variances, noise=prediction.noise[rows])


def held(prediction: Any, y: Tensor) -> tuple[float, float]:
    """The share of targets in their 90% interval or set, and the mean width or size of these."""
    if prediction.kind == "regression":
        lower, upper = prediction.interval(LEVEL)
        return float(((lower <= y) & (y <= upper)).double().mean()), float((upper - lower).mean())
    sets = prediction.label_set(LEVEL)
    return float(sets.gather(1, y.unsqueeze(1)).double().mean()), float(sets.sum(1).double().mean())


def read(path: Path) -> list[dict[str, str]]:
    """The lines of a csv; none where there is no file yet."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, row: Row) -> None:
    """Append a line to a csv."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)


def table(rows: list[dict[str, str]]) -> str:
    """Coverage before and after of each set and method, averaged over fits, as markdown; one table a score."""
    return "\n\n".join(_table_of(rows, score) for score in dict.fromkeys(row["score"] for row in rows))


def _table_of(rows: list[dict[str, str]], score: str) -> str:
    rows = [row for row in rows if row["score"] == score]
    names, methods = (list(dict.fromkeys(row[key] for row in rows)) for key in ("data", "method"))
    lines = [f"| {score}, before -> after | {' | '.join(methods)} |", "|---" * (len(methods) + 1) + "|"]
    for name in names:
        cells = []
        for method in methods:
            chosen = [row for row in rows if (row["data"], row["method"]) == (name, method)]
            before, after = (mean(float(row[key]) for row in chosen) for key in ("before", "after"))
            cells.append(f"{before:.3f} -> {after:.3f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
