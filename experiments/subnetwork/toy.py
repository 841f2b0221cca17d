"""Does a covariance over 26 weights see more between two clusters than a diagonal over all 2,600?

    python experiments/subnetwork/toy.py     # toy.csv, toy.png and the table of the README; two minutes on one core

The toy of Daxberger et al. 2021: one input, two clusters of rows with a gap between them, a ReLU network 1-50-50-1
whose 2,600 weights (biases stay at the MAP) get Gaussians of several kinds around the same MAP. Predictions are
linearised and the noise is known, so the standard deviation of the function is exact for each posterior. Three ways to
set the prior precision: given, the one that the MAP was trained with, the same for all; validation, for each posterior
the multiple of it with the best likelihood of further rows from the two clusters; matched, for the diagonal only, the
one at which it is as sure at the training rows as the full covariance is with the given one.
"""

import argparse
import csv
import sys
from collections.abc import Iterator
from pathlib import Path

import matplotlib as mpl
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

import caveat
from caveat import MAP, Laplace, SubnetworkLaplace, Training, models

mpl.use("Agg")
from matplotlib import pyplot as plt

NOISE = 0.1  # standard deviation of the targets
CLUSTERS = ((-2.0, -1.1), (0.9, 1.8))  # where the rows are
TRAINING = Training(epochs=3000, batch_size=140, learning_rate=1e-2)
PRIORS = (0.1, 1.0, 10.0)  # prior precisions; the figure shows the second
COUNTS = (1300, 78, 26)  # 50%, 3% and 1% of the weights
COLUMNS = ["prior", "seed", "precision", "posterior", "weights", "used", "sd_gap", "sd_data"]


def function(x: Tensor) -> Tensor:
    """What the rows are noisy values of."""
    return 0.8 * torch.sin(2 * x) + 0.3 * x


def rows(seed: int, per_cluster: int = 70) -> tuple[Tensor, Tensor]:
    """Noisy values at uniform places in the two clusters, [N, 1] each."""
    rng = torch.Generator().manual_seed(seed)
    places = [low + (high - low) * torch.rand(per_cluster, 1, generator=rng) for low, high in CLUSTERS]
    x = torch.cat(places)
    return x, function(x) + NOISE * torch.randn(x.shape, generator=rng)


def posteriors(how: str) -> Iterator[tuple[str, caveat.Method]]:
    """(name, method) for everything compared; `how` sets the prior precision."""
    yield "full 2600", Laplace(structure="full", precision=how, prediction="closed")
    yield "diagonal 2600", Laplace(structure="diagonal", precision=how, prediction="closed")
    for score, keep_dead in (("energy", False), ("variance", False), ("variance", True), ("random", False)):
        for count in COUNTS:
            name = f"{score}{', dead kept' if keep_dead else ''} {count}"
            yield name, SubnetworkLaplace(count, score, keep_dead, precision=how, prediction="closed")


def fitted(prior: float, seed: int, network: torch.nn.Module) -> Iterator[tuple[str, str, caveat.Posterior]]:
    """(how its precision was set, name, posterior) for every posterior around the trained network."""
    task = caveat.Task(
        network,
        TensorDataset(*rows(seed)),
        caveat.Gaussian(noise=NOISE),
        caveat.GaussianPrior(prior),
        validation=TensorDataset(*rows(1000 + seed)),
        parameters="*.weight",
    )
    for how in ("given", "validation"):
        for name, method in posteriors(how):
            posterior = caveat.fit(task, method, seed=seed, progress=False)
            if (how, name) == ("given", "full 2600"):
                yield "matched", "diagonal 2600", matched(task, function_sd(posterior, rows(seed)[0]).mean())
            yield how, name, posterior


def matched(task: caveat.Task, target: Tensor) -> caveat.Posterior:
    """The diagonal posterior whose function has a mean standard deviation of `target` at the training rows."""
    x = next(task.train.ordered())[0]
    low, high = -5.0, 8.0  # log10 of the precision; a higher one means a lower standard deviation
    for _ in range(30):
        middle = (low + high) / 2
        method = Laplace(structure="diagonal", precision=10**middle, prediction="closed")
        posterior = caveat.fit(task, method, progress=False)
        low, high = (middle, high) if function_sd(posterior, x).mean() > target else (low, middle)
    return posterior


def trained(prior: float, seed: int) -> torch.nn.Module:
    """The MAP of all weights and biases."""
    torch.manual_seed(seed)
    network = models.mlp(1, 1, hidden=(50, 50))
    task = caveat.Task(network, TensorDataset(*rows(seed)), caveat.Gaussian(noise=NOISE), caveat.GaussianPrior(prior))
    network.load_state_dict(caveat.fit(task, MAP(training=TRAINING), seed=seed, progress=False).state["params"])
    return network


def function_sd(posterior: caveat.Posterior, x: Tensor) -> Tensor:
    """The standard deviation of the function at x, without noise, [N]."""
    return posterior.moments(x)[1].flatten().sqrt()


def measure(path: Path, seeds: int) -> dict[str, caveat.Posterior]:
    """Write one row for each prior, seed and posterior; keep what the figure shows."""
    shown: dict[str, caveat.Posterior] = {}
    gap = torch.linspace(CLUSTERS[0][1], CLUSTERS[1][0], 101).unsqueeze(1)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for prior in PRIORS:
            for seed in range(seeds):
                network = trained(prior, seed)
                for how, name, posterior in fitted(prior, seed, network):
                    if prior == PRIORS[1] and seed == 0:
                        shown[f"{name}, {how}"] = posterior
                    diagnostics = posterior.info.diagnostics
                    chosen = diagnostics.get("subnetwork", {}).get("weights", 2600)
                    numbers = [float(function_sd(posterior, x).mean()) for x in (gap, rows(seed)[0])]
                    numbers.insert(0, diagnostics["prior_precision"])
                    writer.writerow([prior, seed, how, name, chosen, *(f"{value:.6g}" for value in numbers)])
                print(f"prior precision {prior}, seed {seed}: done", flush=True)
    return shown


def draw(shown: dict[str, caveat.Posterior], path: Path) -> None:
    """Means and bands of two standard deviations, one panel a posterior."""
    panels = [
        *("full 2600, given", "energy 1300, given", "energy 78, given", "energy 26, given"),
        *("diagonal 2600, given", "variance 1300, given", "variance 78, given", "variance 26, given"),
        "diagonal 2600, matched",
        *(f"variance, dead kept {count}, given" for count in COUNTS),
    ]
    grid = torch.linspace(-2.6, 2.4, 401).unsqueeze(1)
    figure, axes = plt.subplots(3, 4, figsize=(13, 7.5), sharex=True, sharey=True, layout="constrained")
    x, y = rows(0)
    for axis, name in zip(axes.flat, panels, strict=True):
        posterior = shown[name]
        mean, sd = posterior.moments(grid)[0].flatten(), function_sd(posterior, grid)
        place = grid.flatten()
        total = (sd.square() + NOISE**2).sqrt()
        axis.fill_between(place, mean - 2 * total, mean + 2 * total, color="#c9dcf2", linewidth=0, label="with noise")
        axis.fill_between(place, mean - 2 * sd, mean + 2 * sd, color="#7ba7d9", linewidth=0, label="of the function")
        axis.plot(place, function(place), color="#444444", linewidth=0.8, linestyle="--", label="truth")
        axis.plot(place, mean, color="#14406b", linewidth=1.2, label="mean")
        axis.plot(x.flatten(), y.flatten(), ".", color="#c1440e", markersize=2.5, label="rows")
        kind, _, how = name.rpartition(", ")
        axis.set_title(kind if how == "given" else f"{kind}, as sure at the rows as full 2600", fontsize=10)
        axis.set(xlim=(-2.6, 2.4), ylim=(-3.2, 3.2))
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    figure.suptitle(f"Mean and two standard deviations; prior precision {PRIORS[1]:g} unless matched", fontsize=11)
    figure.savefig(path, dpi=110)


def summarise(path: Path) -> None:
    """Medians over seeds of the function's standard deviation in the gap (least to most) and at the rows."""
    with path.open() as file:
        found = list(csv.DictReader(file))
    for how in ("given", "matched", "validation"):
        print(f"\nprecision: {how}\n| posterior | " + " | ".join(f"prior {p}: gap | rows" for p in PRIORS) + " |")
        print("|---|" + "---|---|" * len(PRIORS))
        for name in dict.fromkeys(row["posterior"] for row in found if row["precision"] == how):
            cells = []
            for prior in PRIORS:
                own = [r for r in found if (r["posterior"], r["precision"], r["prior"]) == (name, how, str(prior))]
                gap, data = (torch.tensor([float(r[key]) for r in own]) for key in ("sd_gap", "sd_data"))
                extent = f"{float(gap.min()):.3f} to {float(gap.max()):.3f}"
                cells.append(f"{float(gap.median()):.3f} ({extent}) | {float(data.median()):.3f}")
            print(f"| {name} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--csv", type=Path, default=Path(__file__).with_name("toy.csv"))
    arguments = parser.parse_args()
    draw(measure(arguments.csv, arguments.seeds), arguments.csv.with_suffix(".png"))
    summarise(arguments.csv)


if __name__ == "__main__":
    sys.exit(main())
