"""What the weights look like: the posterior on planes through its draws, and the first layer where inputs do not vary.

    python experiments/hmc/weights.py            # weights.csv and weights.png: minutes on one core
    python experiments/hmc/weights.py --summary  # only the table of the README

Two questions, for the references of `posteriors.toml`:

    plane        log posterior half-way between two draws, less the mean of the draws': of one chain, of different ones.
                 Between two independent draws from a Gaussian over d weights it is d / 4, so a lower one is a wall
    first layer  the root mean square of w v / prior width, w the weights into a hidden unit and v an eigenvector of the
                 inputs' covariance: near 1 where the data say nothing. For HMC, MAP, and HMC under the EmpCov prior
"""

import csv
import os
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded

import torch
from chains import reference
from problems import PRECISIONS, empcov, problem, task
from tables import measured, table
from torch import Tensor
from torch.nn import functional as F

import caveat
from caveat import HMC, MAP, Training
from caveat.data import DataSet
from caveat.evaluate.diagnosis import Surface, posterior_surface

NAMES = ("digits", "mnist")
LAYER = "1.weight"
FEW = HMC(chains=2, length=20, warmup=30)
DEAD = 1e-6  # of the mean variance: an eigenvector without
Found = Iterator[tuple[str, str, str, float]]  # question, setting, quantity, value


def surfaces(rows: DataSet, posterior: caveat.Posterior) -> dict[str, Surface]:
    """The planes through three draws of a chain, and through draws of three chains."""
    last = posterior.state["stats"]["lp"].shape[1] - 1
    chosen = {
        "draws of one chain": [(0, last), (0, last // 2), (0, last // 4)],
        "draws of different chains": [(0, last), (1, last), (2, last)],
    }
    return {name: posterior_surface(posterior, rows.train, draws=draws) for name, draws in chosen.items()}


def height(surface: Surface, place: Tensor) -> float:
    """The log density at a place (along, across) of the plane, between the points of its grid."""
    axes = (surface.along, surface.across)
    scaled = [2 * (p - axis[0]) / (axis[-1] - axis[0]) - 1 for p, axis in zip(place, axes, strict=True)]
    grid = torch.stack(scaled).reshape(1, 1, 1, 2)
    return float(F.grid_sample(surface.log_density[None, None], grid, mode="bicubic", align_corners=True))


def plane(surface: Surface) -> float:
    """Half-way between two draws, less the mean of the two; of the three pairs the lowest."""
    pairs = combinations(surface.positions, 2)
    return min(height(surface, (a + b) / 2) - (height(surface, a) + height(surface, b)) / 2 for a, b in pairs)


def first_layer(rows: DataSet, posteriors: dict[str, caveat.Posterior]) -> Found:
    """Weights along the directions in which inputs vary most, and along those in which they do not."""
    x = rows.train.tensors[0].flatten(1).double()
    variances, vectors = torch.linalg.eigh(x.T.cov(correction=0))
    dead = variances < DEAD * variances.mean()
    groups = {"the first ten": slice(-10, None), "the last ten that vary": torch.nonzero(~dead).squeeze(1)[:10]}
    groups |= {"those without variance": dead} if bool(dead.any()) else {}
    yield "first layer", "inputs", "directions without variance", float(dead.sum())
    for name, posterior in posteriors.items():
        weights = posterior.state["params"][LAYER].double().cpu().reshape(-1, x.shape[1])  # [draws x units, D]
        size = (weights @ vectors).square().mean(0) * PRECISIONS[rows.name]
        for group, which in groups.items():
            yield "first layer", name, group, float(size[which].mean().sqrt())


def fitted(rows: DataSet, references: Path) -> dict[str, caveat.Posterior]:
    """HMC, MAP, and HMC under EmpCov, of few draws: the sizes of weights need no more."""
    training = Training(epochs=300, learning_rate=1e-2)
    return {
        "HMC": reference(rows, references),
        "MAP": caveat.fit(task(rows), MAP(training=training), seed=0, progress=False),
        "EmpCov": caveat.fit(task(rows, empcov(rows, PRECISIONS[rows.name])), FEW, seed=0, progress=False),
    }


def measure(path: Path, references: Path) -> None:
    """Everything, and the figure."""
    numbers: list[tuple[str, str, str, str, float]] = []
    drawn: dict[str, tuple[dict[str, Surface], dict[str, caveat.Posterior]]] = {}
    for name in NAMES:
        rows = problem(name)
        posteriors = fitted(rows, references)
        planes = surfaces(rows, posteriors["HMC"])
        numbers += [(name, "plane", which, "half-way less the draws", plane(s)) for which, s in planes.items()]
        quarter = posteriors["HMC"].network.n_parameters / 4
        numbers.append((name, "plane", "independent draws of a Gaussian", "half-way less the draws", quarter))
        numbers += [(name, *number) for number in first_layer(rows, posteriors)]
        drawn[name] = planes, posteriors
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["problem", "question", "setting", "quantity", "value"])
        writer.writerows((*number[:4], f"{number[4]:.4g}") for number in numbers)
    draw(drawn, path.with_suffix(".png"))


def draw(found: dict[str, tuple[dict[str, Surface], dict[str, caveat.Posterior]]], path: Path) -> None:
    """The planes, and the weights into one unit as an image."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(len(found), 5, figsize=(15, 6.4), layout="constrained")
    for row, (name, (planes, posteriors)) in zip(axes, found.items(), strict=True):
        for axis, (title, surface) in zip(row, planes.items(), strict=False):
            top = surface.log_density.max()
            levels = torch.linspace(-6, 0, 13) * float(top - surface.log_density.median()) / 3
            axis.contourf(surface.along, surface.across, surface.log_density - top, levels.tolist(), extend="min")
            axis.plot(*surface.positions.T, "o", color="#c1440e")
            axis.set_title(f"{name}: {title}", fontsize=9)
        for axis, (title, posterior) in zip(row[2:], posteriors.items(), strict=True):
            weights = posterior.state["params"][LAYER].cpu()
            weights = weights.reshape(-1, weights.shape[-1])[-1]
            side = round(len(weights) ** 0.5)
            limit = 3 * PRECISIONS[name] ** -0.5
            axis.imshow(weights.reshape(side, side), cmap="RdBu", vmin=-limit, vmax=limit)
            axis.set_title(f"{name}: weights into a unit, {title}", fontsize=9)
            axis.set_axis_off()
    figure.savefig(path, dpi=90)


def main() -> None:
    path = measured(__file__, __doc__, measure)
    with path.open() as file:
        rows = [(r["problem"], [r["question"], r["setting"], r["quantity"], r["value"]]) for r in csv.DictReader(file)]
    table(["", "question", "setting", "quantity", "value"], rows)


if __name__ == "__main__":
    main()
