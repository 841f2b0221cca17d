"""One input: functions from the prior and from the posterior, before and after the updates of the precision.

    python experiments/sampled_laplace/toy.py            # toy.csv and toy.png: a minute on one core
    python experiments/sampled_laplace/toy.py --summary  # only the table of the README

The first figure of Antorán et al. 2023: with a precision far too small the linearised model's prior functions are much
wider than the targets, and so are the error bars between the rows; after the updates (MacKay) prior functions are about
as wide as the targets. Two clusters of rows, a network 1-50-50-1, samples by optimisation beside the exact posterior.
"""

import argparse
import csv
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded

import torch
from torch import Tensor
from torch.func import functional_call, jacrev
from torch.utils.data import TensorDataset

import caveat
from caveat import MAP, Laplace, SampledLaplace, Training, models

NOISE, FIRST = 0.1, 0.01
CLUSTERS = ((-2.0, -1.0), (1.0, 2.0))
COLUMNS = ["precision", "posterior", "prior sd at the rows", "sd at the rows", "sd in the gap", "rmse in the gap"]


def function(x: Tensor) -> Tensor:
    """What the rows are about."""
    return 0.8 * torch.sin(2 * x) + 0.3 * x


def rows() -> tuple[Tensor, Tensor]:
    """Noisy values at 70 uniform places of each cluster, [N, 1] each."""
    rng = torch.Generator().manual_seed(0)
    x = torch.cat([low + (high - low) * torch.rand(70, 1, generator=rng) for low, high in CLUSTERS])
    return x, function(x) + NOISE * torch.randn(x.shape, generator=rng)


def features(posterior: caveat.Posterior, x: Tensor) -> Tensor:
    """The Jacobian of the outputs in the weights, [N, d]."""
    module, params = posterior.network.module, posterior.state["params"]
    found = jacrev(lambda weights: functional_call(module, weights, (x,)).squeeze(-1))(params)
    return torch.cat([part.flatten(1) for part in found.values()], 1)


def measure(path: Path) -> None:
    """Both precisions, by samples and exactly; and the figure."""
    torch.manual_seed(0)
    x, y = rows()
    task = caveat.Task(
        models.mlp(1, 1, (50, 50)), TensorDataset(x, y), caveat.Gaussian(noise=NOISE), caveat.GaussianPrior(1.0)
    )
    start = caveat.fit(task, MAP(training=Training(epochs=500, learning_rate=1e-2)), seed=0, progress=False)
    wide = {"samples": SampledLaplace(precision=FIRST), "exact": Laplace(structure="full", precision=FIRST)}
    found = caveat.fit(task, SampledLaplace(first_precision=FIRST), start=start, seed=0, progress=False)
    alpha = float(found.info.diagnostics["prior_precision"])
    gap, axis = (torch.linspace(*ends, 101).unsqueeze(1) for ends in ((-1.0, 1.0), (-3.0, 3.0)))
    posteriors = {(FIRST, n): caveat.fit(task, m, start=start, seed=0, progress=False) for n, m in wide.items()}
    posteriors[alpha, "samples"] = found
    exact = Laplace(structure="full", precision=alpha)
    posteriors[alpha, "exact"] = caveat.fit(task, exact, start=start, seed=0, progress=False)
    by_evidence = caveat.fit(task, Laplace(structure="full", precision="evidence"), start=start, progress=False)
    own = float(by_evidence.info.diagnostics["prior_precision"])
    posteriors[own, "exact, by its own evidence"] = by_evidence
    prior = features(start, x).square().sum(1).mean().sqrt()
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerow(["", "targets", f"{float(y.std()):.4g}", "", "", ""])
        for (precision, name), posterior in posteriors.items():
            values = [prior / precision**0.5, deviation(posterior, x).mean(), deviation(posterior, gap).mean()]
            values.append((posterior.predict(gap).mean - function(gap)).square().mean().sqrt())
            writer.writerow([f"{precision:.4g}", name, *(f"{float(value):.4g}" for value in values)])
    draw(posteriors, start, axis, (x, y), path.with_suffix(".png"))


def deviation(posterior: caveat.Posterior, x: Tensor) -> Tensor:
    """The standard deviation of the function, [N]."""
    return posterior.predict(x).epistemic.flatten().sqrt()


def draw(
    posteriors: dict[tuple[float, str], caveat.Posterior],
    start: caveat.Posterior,
    axis: Tensor,
    data: tuple[Tensor, Tensor],
    path: Path,
) -> None:
    """Functions of the prior, then of the posterior with two standard deviations, a row a precision."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    jacobian, mean = features(start, axis), start.predict(axis).mean.flatten()
    noise = torch.randn(jacobian.shape[1], 8, generator=torch.Generator().manual_seed(0))
    precisions = list(dict.fromkeys(precision for precision, name in posteriors if name == "samples"))
    figure, axes = plt.subplots(2, 2, figsize=(10, 7), layout="constrained", sharex=True)
    for row, precision in zip(axes, precisions, strict=True):
        row[0].plot(axis, jacobian @ noise / precision**0.5, color="#14406b", linewidth=0.8)
        row[0].set_title(f"functions of the prior, precision {precision:.3g}", fontsize=10)
        for name, colour in (("samples", "#c1440e"), ("exact", "#000000")):
            sd = deviation(posteriors[precision, name], axis)
            for sign in (-2, 2):
                row[1].plot(axis, mean + sign * sd, color=colour, label=name if sign > 0 else None)
        row[1].plot(*data, ".", color="#888888", ms=3)
        row[1].set_title("two standard deviations of the posterior", fontsize=10)
        row[1].legend(frameon=False)
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--summary", action="store_true", help="run nothing")
    parser.add_argument("--csv", type=Path, default=Path(__file__).with_name("toy.csv"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.summary:
        measure(arguments.csv)
    with arguments.csv.open() as file:
        heads, *found = csv.reader(file)
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
    print("\n".join("| " + " | ".join(row) + " |" for row in found))


if __name__ == "__main__":
    main()
