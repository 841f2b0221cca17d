"""How long a prediction takes, of one row and of 64, beside a plain pass of the bare module in the same run.

    python benchmarks/latency.py --out benchmarks/latency.csv

A network of 0.27 million weights for 32 x 32 images (ResNet-20 with filter response normalisation) and a few made-up
rows: what a fit is good for does not matter here, only what a prediction costs. Times are processor time of one thread,
since other work on the machine would count in wall time; the ratio is that of medians to the bare module's median. Of
fewer than 100 calls the 99th percentile is the slowest one. Lines are written as they come.
"""

import argparse
import csv
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import caveat
from caveat import models

TRAINING = caveat.Training(epochs=1, batch_size=10)
SPARSE = {"density": 0.1, "training": TRAINING}
CHAIN = {"burn_in": 1, "length": 10, "thin": 1, "learning_rate": 1e-4}
METHODS: dict[str, Any] = {
    "MAP": caveat.MAP(training=TRAINING),
    "LastLayerLaplace": caveat.LastLayerLaplace(precision=1.0),
    "SubnetworkLaplace": caveat.SubnetworkLaplace(weights=400, precision=1.0),
    "Laplace": caveat.Laplace(precision=1.0, default_draws=30),
    "SampledLaplace": caveat.SampledLaplace(samples=30, precision=1.0),
    "DeepEnsemble": caveat.DeepEnsemble(members=5, training=TRAINING),
    "Ensemble": caveat.Ensemble(caveat.LastLayerLaplace(precision=1.0, default_draws=20), members=5, training=TRAINING),
    "MCDropout": caveat.MCDropout(rate=0.1, default_draws=30, training=TRAINING),
    "SWAG": caveat.SWAG(rank=2, scale=1.0, default_draws=30, training=caveat.Training(epochs=4)),
    "IVON": caveat.IVON(default_draws=30, training=TRAINING),
    "MeanFieldVI": caveat.MeanFieldVI(default_draws=10, training=TRAINING),
    "SSVI": caveat.SSVI(default_draws=10, **SPARSE),
    "RigL": caveat.RigL(**SPARSE),
    "VariationalDropout": caveat.VariationalDropout(default_draws=10, training=TRAINING),
    "GroupVariationalDropout": caveat.GroupVariationalDropout(default_draws=10, training=TRAINING),
    "StructuredBayesianPruning": caveat.StructuredBayesianPruning(default_draws=10, training=TRAINING),
    "AEB": caveat.AEB(density=0.1, **CHAIN),
    "MaskedBNN": caveat.MaskedBNN(**CHAIN),
    "SGMCMC": caveat.SGMCMC(chains=2, burn_in=1, length=15, thin=1, learning_rate=1e-4),
    "HMC": caveat.HMC(chains=2, length=15, warmup=0, step_size=1e-3, trajectory=2e-3),
}
GOALS = {"MAP": 1.3, "LastLayerLaplace": 2.0, "SubnetworkLaplace": 8.0}
SHAPE, CLASSES = (3, 32, 32), 10


def times(call: Callable[[], object], count: int) -> tuple[float, float]:
    """The median and the 99th percentile in milliseconds, after calls that are not counted."""
    for _ in range(2):
        call()
    seconds = []
    for _ in range(count):
        began = time.process_time()
        call()
        seconds.append(time.process_time() - began)
    return 1e3 * median(seconds), 1e3 * sorted(seconds)[min(count - 1, int(0.99 * count))]


def measured(module: nn.Module, posterior: caveat.Posterior, rows: int, count: int) -> dict[str, float]:
    """The bare module and the prediction in turns of the same run."""
    x = torch.randn(rows, *SHAPE, generator=torch.Generator().manual_seed(rows))

    def bare() -> object:
        with torch.no_grad():
            return module(x)

    before = times(bare, count)[0]
    p50, p99 = times(lambda: posterior.predict(x).probs, count)
    after = times(bare, count)[0]
    plain = (before + after) / 2
    return {"bare_ms": plain, "p50_ms": p50, "p99_ms": p99, "ratio": p50 / plain}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--calls", type=int, default=100, help="of one row; of 64 rows a tenth, at least 3")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = models.for_data("resnet20_frn", SHAPE, CLASSES).eval()
    data = torch.randn(20, *SHAPE), torch.arange(20) % CLASSES
    task = caveat.Task(module, data, caveat.Categorical())
    lines = []
    for name in options.methods:
        method = METHODS[name]
        start = caveat.MAP(training=TRAINING) if method.starts_from == "trained" else None
        posterior = caveat.fit(task, method, start=start, progress=False)
        for rows, count in ((1, options.calls), (64, max(3, options.calls // 10))):
            cost = measured(module, posterior, rows, count)
            draws, goal = method.default_draws, GOALS.get(name, "") if rows == 1 else ""
            line = {"method": name, "draws": draws, "rows": rows, "goal": goal}
            lines.append(line | {key: f"{value:.3g}" for key, value in cost.items()} | {"calls": count})
            print(", ".join(f"{key} {value}" for key, value in lines[-1].items()), flush=True)
            if options.out is not None:
                write(options.out, lines)


def write(file: Path, lines: list[dict[str, Any]]) -> None:
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, lines[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


if __name__ == "__main__":
    main()
