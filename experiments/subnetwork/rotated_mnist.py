"""Rotated MNIST: is a subnetwork of LeNet-5 surer when right and less sure when wrong than the rest?

    python experiments/subnetwork/rotated_mnist.py            # rotated_mnist.csv and .png, goes on where it stopped
    python experiments/subnetwork/rotated_mnist.py --summary  # only the figure and the table of the README

The question of Daxberger et al. 2021 at the scale of a laptop: LeNet-5 (61,706 weights), 10,000 training images of
which 1,500 are held out for validation, 1,000 test images rotated by 0 to 180 degrees. Everything but the ensemble
starts from the same MAP. Prior precisions and the temperature are tuned on the upright validation images; rows marked
"given" keep the precision that the MAP was trained with.
"""

import argparse
import csv
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

import matplotlib as mpl
import torch
from torch.utils.data import TensorDataset
from tqdm import tqdm

import caveat
from caveat import (
    MAP,
    SWAG,
    DeepEnsemble,
    Laplace,
    LastLayerLaplace,
    MCDropout,
    SubnetworkLaplace,
    Training,
    data,
    models,
)

mpl.use("Agg")
from matplotlib import pyplot as plt

ANGLES = tuple(range(0, 181, 15))
TRAINING = Training(epochs=20, batch_size=128, learning_rate=2e-3)
TRAIN_ROWS, VALIDATION_ROWS, TEST_ROWS = 8500, 1500, 1000
METRICS = ("nll", "accuracy", "ece")
SHOWN = {  # lines of the figure, with their colours
    "MAP": "#000000",
    "MAP tempered": "#888888",
    "diagonal": "#c1440e",
    "kronecker": "#e39b3a",
    "last layer": "#7a5195",
    "energy 2000": "#14406b",
    "variance 2000": "#4a90d9",
    "random 2000": "#6bbf9f",
    "SWAG": "#b0a160",
    "MC dropout": "#d46a9f",
    "ensemble of 5": "#2e8b57",
}


def methods() -> Iterator[tuple[str, caveat.Method]]:
    """(name, method) for everything compared to the MAP."""
    yield "MAP tempered", MAP(temperature=True, training=Training(epochs=0))
    yield "diagonal", Laplace(structure="diagonal")
    yield "kronecker", Laplace(structure="kronecker")
    yield "last layer", LastLayerLaplace()
    for count in (1000, 2000):
        for score in ("energy", "variance", "random"):
            yield f"{score} {count}", SubnetworkLaplace(count, score)
    for score in ("energy", "variance", "random"):
        yield f"{score} 2000, given", SubnetworkLaplace(2000, score, precision="given")
    yield "diagonal, given", Laplace(structure="diagonal", precision="given")
    path = Training(10, optimizer="sgd", learning_rate=0.1, schedule="constant", warmup=0.0, clip=1.0, batch_size=128)
    yield "SWAG", SWAG(rank=10, scale=1.0, training=path)
    yield "MC dropout", MCDropout(rate=0.1, training=replace(TRAINING, epochs=10))
    yield "ensemble of 5", DeepEnsemble(5, TRAINING)


def problem(seed: int) -> tuple[caveat.Task, dict[float, TensorDataset]]:
    """The task, and the test images by angle; the seed draws images and initial weights."""
    found = data.load("mnist")
    rng = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(found.train), generator=rng)
    train, validation = (
        TensorDataset(*(tensor[rows] for tensor in found.train.tensors))
        for rows in (order[:TRAIN_ROWS], order[TRAIN_ROWS : TRAIN_ROWS + VALIDATION_ROWS])
    )
    rows = torch.randperm(len(found.test), generator=rng)[:TEST_ROWS]
    x, y = (tensor[rows] for tensor in found.test.tensors)
    rotated = {angle: TensorDataset(data.rotate(x, angle, found.preprocessing["black"]), y) for angle in ANGLES}
    torch.manual_seed(seed)
    task = caveat.Task(models.lenet5(), train, caveat.Categorical(), caveat.GaussianPrior(1.0), validation=validation)
    return task, rotated


def measure(path: Path, seeds: int) -> None:
    """Every seed and method that the csv does not have yet."""
    done = {(row["seed"], row["method"]) for row in read(path)}
    names = ["MAP", *(name for name, _ in methods())]
    with path.open("a", newline="") as file, tqdm(total=seeds * len(names), initial=len(done), unit="fit") as bar:
        writer = csv.writer(file)
        if not done:
            writer.writerow(["seed", "method", "angle", *METRICS, "precision", "seconds"])

        def record(seed: int, name: str, posterior: caveat.Posterior, rotated: dict[float, TensorDataset]) -> None:
            scores = caveat.evaluate(posterior, {"rotated": rotated}, seed=seed, progress=False)
            precision = posterior.info.diagnostics.get("prior_precision", "")
            for scored in scores.data:
                values = [f"{scored[metric].mean:.6g}" for metric in METRICS]
                writer.writerow([seed, name, scored.severity, *values, precision, f"{posterior.info.seconds:.3g}"])
            file.flush()
            bar.update()
            nll = {scored.severity: scored["nll"].mean for scored in scores.data}
            bar.write(f"seed {seed} {name}: NLL {nll[0]:.3f}, at 60 degrees {nll[60]:.3f}, precision {precision}")

        for seed in range(seeds):
            missing = [name for name in names if (str(seed), name) not in done]
            if not missing:
                continue
            task, rotated = problem(seed)
            point = caveat.fit(task, MAP(training=TRAINING), seed=seed, progress=False)
            if "MAP" in missing:
                record(seed, "MAP", point, rotated)
            for name, method in methods():
                if name in missing:
                    bar.set_description(name)
                    start = None if method.starts_from == "fresh" else point
                    posterior = caveat.fit(task, method, start=start, seed=seed, progress=False)
                    record(seed, name, posterior, rotated)


def read(path: Path) -> list[dict[str, str]]:
    """What has been measured."""
    if not path.exists():
        return []
    with path.open() as file:
        return list(csv.DictReader(file))


def curve(found: list[dict[str, str]], method: str, metric: str) -> list[list[float]]:
    """A metric's values over seeds, for each angle."""
    own = [row for row in found if row["method"] == method]
    return [[float(row[metric]) for row in own if float(row["angle"]) == angle] for angle in ANGLES]


def draw(found: list[dict[str, str]], path: Path) -> None:
    """NLL and calibration error against the angle, means over seeds."""
    figure, axes = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    for axis, metric, title in zip(axes, ("nll", "ece"), ("Negative log likelihood", "Calibration error"), strict=True):
        for method, colour in SHOWN.items():
            values = [mean(at) for at in curve(found, method, metric)]
            dashed = method in ("MAP", "MAP tempered")
            axis.plot(ANGLES, values, color=colour, linestyle="--" if dashed else "-", label=method, linewidth=1.5)
        axis.set(title=title, xlabel="degrees", xticks=ANGLES[::2])
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    figure.savefig(path, dpi=110)


def summarise(found: list[dict[str, str]]) -> None:
    """NLL at some angles, and NLL, accuracy and ECE over all rotated images; standard errors over seeds."""
    angles = (0, 30, 60, 90, 180)
    heads = [f"NLL {angle}°" for angle in angles] + [
        "NLL 15° to 180°",
        "accuracy 15° to 180°",
        "ECE 0°",
        "ECE 15° to 180°",
    ]
    print("| | " + " | ".join(heads) + " |\n|---|" + "---|" * len(heads))
    for method in dict.fromkeys(row["method"] for row in found):
        nll, accuracy, ece = (curve(found, method, metric) for metric in METRICS)
        cells = [nll[ANGLES.index(angle)] for angle in angles]
        over_angles = [[mean(at) for at in zip(*values[1:], strict=True)] for values in (nll, accuracy, ece)]
        cells += [over_angles[0], over_angles[1], ece[0], over_angles[2]]
        print(f"| {method} | " + " | ".join(map(with_error, cells)) + " |")


def with_error(values: list[float]) -> str:
    """Mean over seeds, and its standard error."""
    error = f" ±{stdev(values) / len(values) ** 0.5:.2g}" if len(values) > 1 else ""
    return f"{mean(values):.3f}{error}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--summary", action="store_true", help="fit nothing")
    parser.add_argument("--csv", type=Path, default=Path(__file__).with_name("rotated_mnist.csv"))
    arguments = parser.parse_args()
    if not arguments.summary:
        measure(arguments.csv, arguments.seeds)
    found = read(arguments.csv)
    draw(found, arguments.csv.with_suffix(".png"))
    summarise(found)


if __name__ == "__main__":
    sys.exit(main())
