"""Which settings of the foundation's methods measure best: the grid behind their defaults.

    python experiments/foundation/defaults.py            # digits, mnist1d, diabetes, breast_cancer on a CPU
    python experiments/foundation/defaults.py --data cifar10 --device cuda --seeds 2

Every method starts from (or repeats) the same MAP training. Scores are on test data: clean, and shifted where the
inputs are images (rotated digits; noisy CIFAR-10). One row a method, setting and seed goes to the csv; the printed
table has means.
"""

import argparse
import csv
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import caveat
from caveat import MAP, SWAG, DeepEnsemble, MCDropout, Training, data, models

SMALL = Training(epochs=100)
LARGE = Training(
    epochs=20,
    batch_size=512,
    optimizer="sgd",
    learning_rate=0.2,
    schedule="onecycle",
    precision="bfloat16",
    channels_last=True,
)


def problem(name: str, seed: int, data_dir: str | None) -> tuple[caveat.Task, dict[str, Any], Training]:
    """A task, its test data by name, and how its networks are trained."""
    torch.manual_seed(seed)
    rows = data.load(name, data_dir)
    x, y = rows.test.tensors
    if name == "cifar10":
        prior = caveat.GaussianPrior(25.0)  # weight decay 5e-4 with 50,000 rows
        task = caveat.Task(
            models.resnet18(),
            DataLoader(rows.train, 256),
            caveat.Categorical(),
            prior,
            validation=0.1,
            augment=data.crop_and_flip,
        )
        return task, {"clean": (x, y), "noisy": (noisy(x, seed), y)}, LARGE
    tests: dict[str, Any] = {"clean": (x, y)}
    likelihood: caveat.Likelihood = {
        "categorical": caveat.Categorical(),
        "bernoulli": caveat.Bernoulli(),
        "gaussian": caveat.Gaussian(standardise=True),
    }[rows.likelihood]
    if name == "digits":
        tests["shifted"] = (data.rotate(x, 30, fill=rows.preprocessing["black"]), y)
    network = models.mlp(x[0].numel(), rows.n_outputs, hidden=(64, 64), activation=nn.SiLU)
    return caveat.Task(network, DataLoader(rows.train, 64), likelihood, validation=0.1), tests, SMALL


def noisy(x: Tensor, seed: int) -> Tensor:
    """Gaussian noise of standard deviation .06 of the pixel range (inputs are standardised, .25 is their scale)."""
    return x + 0.06 / 0.25 * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))


def settings(training: Training) -> Iterator[tuple[str, str, Any]]:
    """(method, setting, instance) for everything compared."""
    small = training.optimizer == "adam"
    for rate in (0.02, 0.05, 0.1, 0.2) if small else (0.01, 0.02, 0.05, 0.1, 0.2):
        for epochs in (10, 30) if small else (10,):
            path = replace(
                training, epochs=epochs, optimizer="sgd", learning_rate=rate, schedule="constant", warmup=0.0
            )
            for rank in (0, 20):
                yield "swag", f"rate {rate} epochs {epochs} rank {rank}", SWAG(rank=rank, scale=1.0, training=path)
    for rate in (0.05, 0.1, 0.2) if small else ():
        path = replace(training, epochs=30, optimizer="sgd", learning_rate=rate, schedule="constant", warmup=0.0)
        yield "swag", f"clipped rate {rate} epochs 30 rank 20", SWAG(scale=1.0, training=replace(path, clip=1.0))
    for rate in (0.05, 0.1, 0.2, 0.3) if small else (0.05, 0.1, 0.2):
        for epochs in (0, training.epochs // 4, training.epochs):
            peak = training.learning_rate if small else training.learning_rate / 4
            again = replace(training, epochs=epochs, learning_rate=peak)
            yield "mc_dropout", f"rate {rate} epochs {epochs}", MCDropout(rate=rate, training=again)
    for members in (3, 5, 10) if small else (5,):
        yield "ensemble", f"members {members}", DeepEnsemble(members, training)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", default=["digits", "mnist1d", "diabetes", "breast_cancer"])
    parser.add_argument("--data-dir")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=[""], help="settings whose names hold one of these")
    parser.add_argument("--minutes", type=float, default=1e9, help="start nothing new after this long")
    parser.add_argument("--csv", type=Path, default=Path(__file__).with_name("defaults.csv"))
    arguments = parser.parse_args()
    clock = time.monotonic()
    with arguments.csv.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["data", "seed", "method", "setting", "on", "metric", "value", "stderr", "seconds"])
        for seed in range(arguments.seeds):
            for name in arguments.data:
                compare(name, seed, arguments, writer, clock)
                file.flush()
    summarise(arguments.csv)


def compare(name: str, seed: int, arguments: argparse.Namespace, writer: Any, clock: float) -> None:
    """Every setting on one data set with one seed."""
    task, tests, training = problem(name, seed, arguments.data_dir)
    tests = {key: TensorDataset(*value) for key, value in tests.items()}

    def record(method: str, setting: str, instance: Any, start: Any) -> caveat.Posterior:
        posterior = caveat.fit(task, instance, start=start, seed=seed, device=arguments.device, progress=False)
        scores = caveat.evaluate(posterior, tests, seed=seed, progress=False)
        for scored in scores.data:
            for metric, value in scored.metrics.items():
                writer.writerow(
                    [name, seed, method, setting, scored.name, metric, value.mean, value.stderr, posterior.info.seconds]
                )
        nll = scores["clean"]["nll"].mean
        print(f"{name} seed {seed} {method} {setting}: nll {nll:.4f}, {posterior.info.seconds:.1f} s", flush=True)
        return posterior

    point = record("map", "", MAP(training=training), None)
    record("map", "tempered", MAP(temperature=True, training=Training(epochs=0)), point)
    for method, setting, instance in settings(training):
        wanted = any(part in f"{method} {setting}" for part in arguments.only)
        if wanted and (time.monotonic() - clock) / 60 < arguments.minutes:
            record(method, setting, instance, point if instance.starts_from == "trained" else None)


def summarise(path: Path) -> None:
    """Mean over seeds, one line a method and setting."""
    with path.open() as file:
        rows = list(csv.DictReader(file))
    columns = sorted(
        {(r["data"], r["on"], r["metric"]) for r in rows if r["metric"] in ("nll", "ece", "accuracy", "rmse")}
    )
    print("method setting".ljust(44), *(f"{d}/{o}/{m}"[-18:].rjust(18) for d, o, m in columns))
    for key in dict.fromkeys((r["method"], r["setting"]) for r in rows):
        cells = []
        for d, o, m in columns:
            values = [
                float(r["value"])
                for r in rows
                if (r["method"], r["setting"]) == key and (r["data"], r["on"], r["metric"]) == (d, o, m)
            ]
            cells.append(f"{sum(values) / len(values):.4f}".rjust(18) if values else "-".rjust(18))
        print(" ".join(key).ljust(44), *cells)


if __name__ == "__main__":
    sys.exit(main())
