"""Uncertainty of a tomographic image: a small convolutional decoder fitted to the rays of one object.

    python experiments/sampled_laplace/tomography.py            # tomography.csv and .png: minutes on one core
    python experiments/sampled_laplace/tomography.py --summary  # only the table of the README

A deep image prior (Ulyanov et al. 2018), as in the tomography of Antorán et al. 2023, of 32 x 32 pixels: the image is
what a decoder makes of a fixed input, and a row of the data is one ray, y = a . image(w) + noise. The network's inputs
are the ray's weights a, so a pixel is the prediction for a unit vector. With 1,241 weights the exact posterior is at
hand: are the error bars of samples those of it, and are they where the errors are?
"""

import argparse
import csv
import math
import os
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import caveat
from caveat import MAP, Laplace, LastLayerLaplace, SampledLaplace, Training

SIDE, ANGLES, RAYS = 32, 12, 32
NOISE = 0.05  # of the mean ray
COLUMNS = [
    "posterior",
    "precision",
    "pixel sd",
    "pixel sd, of the exact",
    "NLL a pixel",
    "within 2 sd",
    "rank correlation",
]
COLUMNS += ["seconds"]


class Scan(nn.Module):
    """Rays [B, H W] through the image that a decoder makes of a fixed input."""

    fixed: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("fixed", torch.rand(1, 8, SIDE // 4, SIDE // 4))
        self.first, self.second, self.last = (
            nn.Conv2d(a, b, 3, padding=1, padding_mode="replicate") for a, b in ((8, 8), (8, 8), (8, 1))
        )
        self.up = nn.Upsample(scale_factor=2, mode="bilinear")

    def forward(self, rays: Tensor) -> Tensor:  # noqa: D102
        hidden = F.silu(self.first(self.up(self.fixed)))
        image = self.last(F.silu(self.second(self.up(hidden))))  # [1, 1, H, W], for every ray
        return (rays * image.flatten(1)).sum(1, keepdim=True)


def phantom() -> Tensor:
    """Ellipses of several densities, [H, W]."""
    y, x = torch.meshgrid(*(torch.linspace(-1, 1, SIDE),) * 2, indexing="ij")
    image = torch.zeros(SIDE, SIDE)
    shapes = (
        (0, 0, 0.8, 0.65, 0.5),
        (-0.25, 0.2, 0.3, 0.15, 0.4),
        (0.3, -0.15, 0.15, 0.3, -0.3),
        (0.3, 0.3, 0.12, 0.12, 0.5),
    )
    for across, down, wide, high, density in shapes:
        image += density * (((x - across) / wide) ** 2 + ((y - down) / high) ** 2 < 1)
    return image


def rays() -> Tensor:
    """Weights of the pixels in every ray, [angles x rays, H W]: parallel beams, linear between pixels."""
    found = []
    places = torch.linspace(-0.95, 0.95, RAYS)
    along = torch.linspace(-1.4, 1.4, 2 * SIDE)
    for angle in torch.arange(ANGLES) * math.pi / ANGLES:
        c, s = torch.cos(angle), torch.sin(angle)
        x = places[:, None] * c - along * s  # [rays, points]
        y = places[:, None] * s + along * c
        columns, rows = ((axis + 1) / 2 * (SIDE - 1) for axis in (x, y))
        weights = torch.zeros(RAYS, SIDE * SIDE)
        for i in (0, 1):
            for j in (0, 1):
                row, column = rows.floor() + i, columns.floor() + j
                share = (1 - (rows - row).abs()) * (1 - (columns - column).abs())
                inside = (row >= 0) & (row < SIDE) & (column >= 0) & (column < SIDE)
                index = (row.clamp(0, SIDE - 1) * SIDE + column.clamp(0, SIDE - 1)).long()
                weights.scatter_add_(1, index, share * inside)
        found.append(weights * 2.8 / (2 * SIDE))
    return torch.cat(found)


def measure(path: Path) -> None:
    """The fit, the posteriors around it, and the figure."""
    truth, a = phantom().flatten().double(), rays().double()  # rays are 1e8 times as informative as the prior
    clean = a @ truth
    noise = NOISE * float(clean.abs().mean())
    y = clean + noise * torch.randn(len(clean), generator=torch.Generator().manual_seed(0), dtype=a.dtype)
    torch.manual_seed(0)
    own = TensorDataset(a, y[:, None])
    task = caveat.Task(Scan().double(), own, caveat.Gaussian(noise=noise), caveat.GaussianPrior(1.0))
    training = Training(epochs=3000, batch_size=len(a), learning_rate=5e-3)
    start = caveat.fit(task, MAP(training=training), seed=0, progress=False)
    exact = caveat.fit(task, Laplace(structure="full", precision="evidence"), start=start, progress=False)
    alpha = float(exact.info.diagnostics["prior_precision"])
    error = float((start.predict(torch.eye(SIDE * SIDE, dtype=a.dtype)).mean.flatten() - truth).square().mean().sqrt())
    print(f"{task}; exact precision {alpha:.3g}, error of a pixel {error:.3g}", flush=True)
    methods: dict[str, caveat.Method] = {
        "sampled, the exact precision": SampledLaplace(precision=alpha),
        "sampled": SampledLaplace(),
        "diagonal": Laplace(structure="diagonal", precision="evidence"),
        "last layer": LastLayerLaplace(precision="evidence"),
    }
    posteriors = {"exact": exact}
    for name, method in methods.items():
        posteriors[name] = caveat.fit(task, method, start=start, seed=0, progress=False)
    pixels = torch.eye(SIDE * SIDE, dtype=a.dtype)
    mean = start.predict(pixels).mean.flatten()
    wrong = (mean - truth).abs()
    deviations = {name: posterior.predict(pixels).epistemic.flatten().sqrt() for name, posterior in posteriors.items()}
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for name, sd in deviations.items():
            ratio = (sd / deviations["exact"]).square().mean().sqrt()
            nll = (0.5 * (wrong / sd).square() + sd.log() + 0.5 * math.log(2 * math.pi)).mean()
            values = [
                posteriors[name].info.diagnostics["prior_precision"],
                sd.mean(),
                ratio,
                nll,
                (wrong < 2 * sd).double().mean(),
            ]
            values += [spearman(sd, wrong), posteriors[name].info.seconds]
            writer.writerow([name, *(f"{float(value):.4g}" for value in values)])
    draw(
        {"truth": truth, "reconstruction": mean, "absolute error": wrong}
        | {f"sd, {n}": s for n, s in deviations.items()},
        path,
    )


def spearman(a: Tensor, b: Tensor) -> float:
    """Correlation of the ranks."""
    ranks = torch.stack([v.argsort().argsort().double() for v in (a, b)])
    return float(ranks.corrcoef()[0, 1])


def draw(images: dict[str, Tensor], path: Path) -> None:
    """Every image, those of errors and deviations on one scale."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 4, figsize=(13, 6.6), layout="constrained")
    top = float(images["absolute error"].quantile(0.99))
    for axis, (name, image) in zip(axes.flat, images.items(), strict=True):
        own = (
            {"vmin": 0, "vmax": 1.0}
            if name in ("truth", "reconstruction")
            else {"vmin": 0, "vmax": top, "cmap": "magma"}
        )
        figure.colorbar(axis.imshow(image.reshape(SIDE, SIDE), **own), ax=axis, shrink=0.8)
        axis.set_title(name, fontsize=10)
        axis.set_axis_off()
    figure.savefig(path.with_suffix(".png"), dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--summary", action="store_true", help="run nothing")
    parser.add_argument("--csv", type=Path, default=Path(__file__).with_name("tomography.csv"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.summary:
        began = time.monotonic()
        measure(arguments.csv)
        print(f"{time.monotonic() - began:.0f} s", flush=True)
    with arguments.csv.open() as file:
        heads, *rows = csv.reader(file)
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
    print("\n".join("| " + " | ".join(row) + " |" for row in rows))


if __name__ == "__main__":
    main()
