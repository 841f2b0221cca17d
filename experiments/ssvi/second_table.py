"""Eight ways to a sparse Bayesian network, side by side: the paper's second table.

    python experiments/ssvi/second_table.py                                    # digits, on the CPU
    python experiments/ssvi/second_table.py --problems mnist fashion_mnist --device cuda
    python experiments/ssvi/second_table.py --problems cifar10 cifar100 --device cuda     # ResNet-18
    python experiments/ssvi/second_table.py --summary

One row a problem, method and seed is added to second_table.csv; those that it has are not run again. Nothing is chosen
on test rows: the settings below are fixed, and the last epoch counts. Bytes and seconds are of the network that is
left: `bytes` is the whole state, `predict` a prediction of all test rows with the method's own number of draws, `pass`
one pass of them through `caveat.deploy(posterior)`, each the best of three.
"""

import argparse
import csv
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded

import torch
from problems import PROBLEMS, QUICK_ROWS, Source, problem
from torch import nn
from torch.utils.data import TensorDataset

import caveat
from caveat import (
    AEB,
    MAP,
    SSVI,
    GroupVariationalDropout,
    MaskedBNN,
    MeanFieldVI,
    RigL,
    StructuredBayesianPruning,
    Training,
    VariationalDropout,
    data,
    models,
)

COLUMNS = ["problem", "method", "seed", "accuracy", "nll", "ece", "marginal", "sparsity", "left", "bytes"]
COLUMNS += ["training_flops", "seconds", "predict", "pass", "warnings", "device"]
FORMS = {  # of the summary: column, what to call it, its unit, its form
    "accuracy": ("accuracy, %", 100, ".2f"),
    "nll": ("NLL", 1, ".3f"),
    "ece": ("top-label ECE", 1, ".4f"),
    "marginal": ("marginal calibration error", 1, ".4f"),
    "sparsity": ("sparsity, %", 100, ".2f"),
    "bytes": ("stored KiB", 1 / 1024, ",.1f"),
    "training_flops": ("training TFLOP", 1e-12, ".3g"),
    "seconds": ("training s", 1, ".3g"),
    "predict": ("prediction s", 1, ".3g"),
    "pass": ("one pass s", 1, ".3g"),
}


@dataclass(frozen=True)
class Scale:
    """How long a problem is trained."""

    epochs: int
    batch_size: int
    learning_rate: float  # of Adam; SGD on CIFAR
    interval: int  # steps between exchanges of weights
    kl_weight: float  # of the Gaussian prior's divergence: SSVI and mean-field VI
    precision: float  # of that prior
    noise_rate: float  # of logarithms of deviations, and of units' noise
    before: int  # epochs of the point that pruning methods start from
    density: float = 0.05  # of the methods whose sparsity is set


SCALES = {
    "digits": Scale(100, 64, 0.003, 50, 0.03, 3.0, 0.03, 20),
    "mnist": Scale(100, 256, 0.001, 100, 0.1, 3.0, 0.01, 10),
    "fashion_mnist": Scale(100, 256, 0.001, 100, 0.1, 3.0, 0.01, 10),
    "cifar10": Scale(200, 512, 0.2, 100, 0.01, 400.0, 0.01, 50),
    "cifar100": Scale(200, 512, 0.2, 100, 0.01, 400.0, 0.01, 50),
}
TINY = Scale(2, 32, 0.01, 2, 0.1, 1.0, 0.03, 1)


def methods(scale: Scale, training: Training) -> dict[str, tuple[caveat.Method, caveat.Method | None]]:
    """All eight, each with what it starts from."""
    point = MAP(training=_shorter(training, scale.before))
    gaussian: dict[str, Any] = {"kl_weight": scale.kl_weight, "training": training}
    chain: dict[str, Any] = {
        "burn_in": max(1, scale.epochs - 20),
        "length": min(10, scale.epochs),
        "thin": 2 if scale.epochs > 20 else 1,
        "batch_size": scale.batch_size,
    }
    return {
        "MeanFieldVI": (MeanFieldVI(**gaussian), None),
        "SSVI": (SSVI(density=scale.density, allocation="erk", interval=scale.interval, **gaussian), None),
        "RigL": (RigL(density=scale.density, allocation="erk", interval=scale.interval, training=training), None),
        "VariationalDropout": (VariationalDropout(std_learning_rate=scale.noise_rate, training=training), point),
        "GroupVariationalDropout": (
            GroupVariationalDropout(std_learning_rate=scale.noise_rate, training=training),
            point,
        ),
        "StructuredBayesianPruning": (
            StructuredBayesianPruning(noise_learning_rate=scale.noise_rate, training=training),
            point,
        ),
        "AEB": (AEB(density=scale.density, **chain), point),
        "MaskedBNN": (MaskedBNN(**chain), point),
    }


def _shorter(training: Training, epochs: int) -> Training:
    return Training(**(vars(training) | {"epochs": epochs}))


def training_of(name: str, scale: Scale, device: str) -> Training:
    """Adam, or for ResNet-18 SGD in the GPU's own way."""
    if not name.startswith("cifar"):
        return Training(epochs=scale.epochs, batch_size=scale.batch_size, learning_rate=scale.learning_rate)
    return Training(
        epochs=scale.epochs,
        batch_size=scale.batch_size,
        optimizer="sgd",
        learning_rate=scale.learning_rate,
        warmup=0.025,
        precision="bfloat16" if device == "cuda" else "float32",
        channels_last=device == "cuda",
    )


def rows_of(name: str, seed: int, source: Source, quick: bool) -> tuple[TensorDataset, TensorDataset]:
    """Training and test rows."""
    if name in PROBLEMS:
        found = problem(name, seed, source, quick)
        return found.train, found.test
    loaded = data.load(name, source.folder)
    if quick:
        return tuple(TensorDataset(*(t[:QUICK_ROWS] for t in part.tensors)) for part in (loaded.train, loaded.test))
    return loaded.train, loaded.test


def network_of(name: str, seed: int, classes: int) -> nn.Module:
    """At initial weights of the seed."""
    torch.manual_seed(seed)
    if name == "digits":
        return models.mlp(64, 10, (100,))
    return models.resnet18(3, classes) if name.startswith("cifar") else models.lenet_caffe()


def prior_of(method: str, scale: Scale) -> caveat.Prior:
    """Gaussian; for MaskedBNN, as in its paper, Cauchy."""
    if method == "MaskedBNN":
        return caveat.StudentTPrior(scale=0.5, degrees=1.0)
    return caveat.GaussianPrior(scale.precision if method in ("MeanFieldVI", "SSVI") else 1.0)


def run_cell(name: str, method: str, seed: int, source: Source, device: str, quick: bool) -> dict[str, Any]:
    """Fit and score: one row of the csv."""
    scale = TINY if quick else SCALES[name]
    train, test = rows_of(name, seed, source, quick)
    module = network_of(name, seed, int(train.tensors[1].max()) + 1)
    augment = data.crop_and_flip if name.startswith("cifar") else None
    task = caveat.Task(module, train, caveat.Categorical(), prior_of(method, scale), augment=augment)
    chosen, start = methods(scale, training_of(name, scale, device))[method]
    posterior = caveat.fit(task, chosen, start=start, seed=seed, device=device, progress=False)
    scores = caveat.evaluate(posterior, {"test": test}, seed=seed, progress=False)["test"]
    info = posterior.info
    row: dict[str, Any] = {"problem": name, "method": method, "seed": seed, "device": device}
    row |= {"accuracy": scores["accuracy"].mean, "nll": scores["nll"].mean, "ece": scores["ece"].mean}
    row |= {"marginal": scores["marginal_calibration_error"].mean, "sparsity": 1 - info.diagnostics["density"]}
    row |= {"left": left(posterior), "bytes": info.stored_bytes, "training_flops": info.flops, "seconds": info.seconds}
    row |= inference(posterior, test.tensors[0], device) | {"warnings": "; ".join(info.warnings)}
    return {key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()}


def left(posterior: caveat.Posterior) -> str:
    """Units where a method prunes them, else weights of each layer."""
    found = posterior.info.diagnostics
    for key in ("units", "nodes"):
        if key in found:
            return ", ".join(f"{name}: {words}" for name, words in found[key].items())
    rows = [row for row in found["account"]["layers"] if row["weights"]]
    return ", ".join(f"{row['layer']}: {row['active']} of {row['weights']}" for row in rows)


def inference(posterior: caveat.Posterior, x: torch.Tensor, device: str) -> dict[str, float]:
    """Seconds of a prediction and, where a method has a network to deploy, of one pass."""
    found = {"predict": _best_of_three(lambda: posterior.predict(x), device)}
    if "active" in posterior.state:
        module, inputs = caveat.deploy(posterior).to(device), x.to(device)

        def one_pass() -> None:
            with torch.no_grad():
                for piece in inputs.split(512):
                    module(piece)

        found["pass"] = _best_of_three(one_pass, device)
    return found


def _best_of_three(work: Callable[[], Any], device: str) -> float:
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times)


def read(path: Path) -> list[dict[str, str]]:
    """What has been measured."""
    if not path.exists():
        return []
    with path.open() as file:
        return list(csv.DictReader(file))


def write(path: Path, row: dict[str, Any]) -> None:
    """Append a row."""
    fresh = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        if fresh:
            writer.writeheader()
        writer.writerow(row)


def summarise(rows: Sequence[dict[str, str]]) -> None:
    """A table a problem: means over seeds, with one standard error for the scores."""
    for name in dict.fromkeys(row["problem"] for row in rows):
        print(
            f"\n{name}\n\n| | "
            + " | ".join(head for head, _, _ in FORMS.values())
            + " |\n|"
            + "---|" * (len(FORMS) + 1)
        )
        for method in methods(TINY, Training()):
            own = [row for row in rows if row["problem"] == name and row["method"] == method]
            if own:
                print(f"| {method} | " + " | ".join(_shown(own, column) for column in FORMS) + " |")


def _shown(rows: Sequence[dict[str, str]], column: str) -> str:
    _, times, form = FORMS[column]
    values = [times * float(row[column]) for row in rows if row[column]]
    if not values:
        return ""
    error = stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    scored = column in ("accuracy", "nll", "ece", "marginal") and error
    return f"{mean(values):{form}}" + (f" ±{error:{form}}" if scored else "")


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", nargs="+", choices=[*SCALES], default=["digits"])
    parser.add_argument(
        "--methods", nargs="+", choices=[*methods(TINY, Training())], default=[*methods(TINY, Training())]
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cpu", help="digits is always on the CPU")
    parser.add_argument("--quick", action="store_true", help="tiny settings, to see that everything runs")
    parser.add_argument("--summary", action="store_true", help="only the tables")
    parser.add_argument("--data", type=Path, metavar="NPZ", help="take the rows from a file made by run.py --export")
    parser.add_argument("--data-dir", type=Path, help="where data sets are looked for first")
    parser.add_argument("--csv", type=Path, default=Path(__file__).with_name("second_table.csv"))
    arguments = parser.parse_args(words)
    failed = 0
    source = Source(arguments.data, arguments.data_dir)
    wanted = [(n, m, s) for n in arguments.problems for s in range(arguments.seeds) for m in arguments.methods]
    for name, method, seed in [] if arguments.summary else wanted:
        if any((r["problem"], r["method"], r["seed"]) == (name, method, str(seed)) for r in read(arguments.csv)):
            continue
        device = "cpu" if name == "digits" else arguments.device
        try:
            row = run_cell(name, method, seed, source, device, arguments.quick)
        except FloatingPointError as error:  # a training that diverged; the others go on
            print(f"{name} {method} {seed} failed: {error}", file=sys.stderr, flush=True)
            failed += 1
            continue
        write(arguments.csv, row)
        print(
            {key: row.get(key) for key in ("problem", "method", "seed", "accuracy", "nll", "sparsity", "left")},
            flush=True,
        )
    summarise(read(arguments.csv))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
