"""SampledLaplace of few rows: by a matrix over rows and outputs, as it goes by itself, and by conjugate gradients.

    OMP_NUM_THREADS=1 python benchmarks/few_rows.py --csv benchmarks/few_rows.csv      # seven minutes on an idle core

The networks are not trained but made fairly sure of their own labels for random images, as in floor.py; eight samples,
the prior precision by evidence. Both fits of a round are made one after the other, and the least of --repeats rounds is
taken. The precision and the effective dimension that they find differ by the samples that each estimates them with.
"""

import argparse
import csv
from pathlib import Path

import torch
from floor import Machine
from torch import nn

import caveat
from caveat import SampledLaplace
from caveat.engine.linear_model import ConjugateGradients
from caveat.models import lenet5, resnet18

CASES = {"LeNet-5, 200 rows": 200, "ResNet-18 of width 8, 100 rows": 100}
WAYS = {
    "auto": SampledLaplace(samples=8),
    "conjugate gradients": SampledLaplace(samples=8, solver=ConjugateGradients()),
}


def network(name: str) -> nn.Module:
    """The network of a case."""
    torch.manual_seed(0)
    return (lenet5(3, image_size=32) if name.startswith("LeNet") else resnet18(width=8)).eval()


def main() -> None:
    """Print a line for each fit, and write them where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--csv", type=Path)
    a = parser.parse_args()
    machine, table = Machine(a.device), []
    for case, rows in CASES.items():
        task = machine.problem(network(case), rows)
        best: dict[str, tuple[float, caveat.Posterior]] = {}
        for _ in range(a.repeats):
            for way, method in WAYS.items():
                posterior, seconds = machine.fit(task, method)
                if way not in best or seconds < best[way][0]:
                    best[way] = seconds, posterior
        for way, (seconds, posterior) in best.items():
            found = posterior.info.diagnostics
            row = {
                "case": case,
                "weights": posterior.network.n_parameters,
                "way": way,
                "solver": found["solver"],
                "seconds": f"{seconds:.1f}",
                "precision": f"{found['prior_precision']:.3g}",
                "effective dimension": f"{found['effective_dimension']:.0f}",
            }
            table.append(row)
            print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    if a.csv is not None:
        with a.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, table[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(table)


if __name__ == "__main__":
    main()
