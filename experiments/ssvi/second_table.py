"""Eight ways to a sparse Bayesian network, side by side: the paper's second table.

    python experiments/ssvi/second_table.py                                    # digits, on the CPU
    python experiments/ssvi/second_table.py --problems mnist fashion_mnist --device cuda
    python experiments/ssvi/second_table.py --problems cifar10 --device cuda --folder runs/table --choose
    python experiments/ssvi/second_table.py --problems cifar10 --device cuda --folder runs/table     # ResNet-18
    python experiments/ssvi/second_table.py --summary

One row a problem, method and seed is added to second_table.csv; those that it has are not run again. With a folder a
killed fit goes on where it was. Several processes, each with its own `--methods`, may add to it at once; seconds are
then worth little. The settings below are fixed (how they were chosen: see the README), and the last epoch counts.
Bytes and seconds are of the network that is left: `bytes` is the whole state, `predict` a prediction of all test rows
with the method's own number of draws, `pass` one pass of them through `caveat.deploy(posterior)`, each the best of
three.

On CIFAR, `MeanFieldVI`, `SSVI` and `RigL` have the settings of `cifar.py`, its narrow prior for the first two included,
and all predict with five draws; every other method has the prior precision (`MaskedBNN` the scale, 1 / sqrt(precision))
of the lowest NLL on 5,000 held-out training rows after a quarter of the epochs, found by `--choose` and kept in
second_table_priors.csv. AEB keeps a tenth of the weights, as in the paper's table.
"""

import argparse
import csv
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded

import cifar
import problems
import torch
from tables import read, shown, table
from torch import nn
from torch.utils.data import TensorDataset

import caveat
from caveat import MAP, Training, data, models

COLUMNS = ["problem", "method", "seed", "accuracy", "nll", "ece", "marginal", "sparsity", "left", "bytes"]
COLUMNS += ["training_flops", "seconds", "predict", "pass", "warnings", "device", "command", "commit"]
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
    dense: tuple[float, float, float]  # of mean-field VI: learning rate, KL weight, precision of the prior
    ssvi: tuple[float, float, float]  # the same; RigL has its learning rate
    std_rate: float  # of logarithms of standard deviations: variational dropout
    unit_rate: float  # of units' noise: the methods that prune those
    before: int  # epochs of the point that pruning methods start from
    chain_rates: tuple[float, float] = (0.03, 0.1)  # of AEB and of MaskedBNN
    density: float = 0.05  # of the methods whose sparsity is set
    aeb_density: float = 0.05
    draws: int | None = None  # of a prediction; each method's own unless given
    allocation: Literal["uniform", "erk"] = "erk"  # of weights over layers
    initial_std: float = 0.01  # where sigma starts


LENET = ((0.01, 0.3, 30.0), (0.01, 0.3, 30.0))
RESNET: Any = {  # of cifar.py; the precisions of its prior follow from the KL weight and the decay
    "epochs": 200,
    "batch_size": 500,
    "learning_rate": 0.4,
    "interval": 25,
    "dense": (0.4, 0.001, math.nan),
    "ssvi": (0.4, 0.003, math.nan),
    "std_rate": 0.003,
    "unit_rate": 0.01,
    "before": 50,
    "chain_rates": (0.01, 0.003),  # those of held-out rows of Fashion-MNIST; with .1 masked networks diverge there
    "aeb_density": 0.1,
    "draws": 5,
    "allocation": "uniform",
    "initial_std": 0.003,
}
DECAY = 5e-4  # of cifar.py
SCALES = {
    "digits": Scale(100, 64, 0.003, 50, (0.01, 0.01, 3.0), (0.01, 0.003, 30.0), 0.01, 0.03, 20),
    "mnist": Scale(60, 512, 0.003, 50, *LENET, 0.003, 0.03, 10, (0.01, 0.003)),
    "fashion_mnist": Scale(60, 512, 0.003, 50, *LENET, 0.003, 0.03, 10, (0.01, 0.003)),
    "cifar10": Scale(**RESNET),
    "cifar100": Scale(**RESNET),
}
TINY = Scale(2, 32, 0.01, 2, *LENET, 0.03, 0.03, 1)


def methods(scale: Scale, training: Training) -> dict[str, tuple[caveat.Method, caveat.Method | None]]:
    """All eight, each with what it starts from."""
    point = MAP(training=replace(training, epochs=scale.before))
    dense, few = (replace(training, learning_rate=rate) for rate, _, _ in (scale.dense, scale.ssvi))
    sparse: dict[str, Any] = {"density": scale.density, "allocation": scale.allocation, "interval": scale.interval}
    spread: dict[str, Any] = {"initial_std": scale.initial_std}
    chain: dict[str, Any] = {
        "burn_in": max(1, scale.epochs - 20),
        "length": min(10, scale.epochs),
        "thin": 2 if scale.epochs > 20 else 1,
        "batch_size": scale.batch_size,
    }
    weights = caveat.VariationalDropout(std_learning_rate=scale.std_rate, kl_warmup=0.1, training=training)
    groups = caveat.GroupVariationalDropout(std_learning_rate=scale.unit_rate, training=training)
    units = caveat.StructuredBayesianPruning(noise_learning_rate=scale.unit_rate, training=training)
    return {
        "MeanFieldVI": (caveat.MeanFieldVI(kl_weight=scale.dense[1], **spread, training=dense), None),
        "SSVI": (caveat.SSVI(**sparse, **spread, kl_weight=scale.ssvi[1], training=few), None),
        "RigL": (caveat.RigL(**sparse, training=few), None),
        "VariationalDropout": (weights, point),
        "GroupVariationalDropout": (groups, point),
        "StructuredBayesianPruning": (units, point),
        "AEB": (caveat.AEB(density=scale.aeb_density, learning_rate=scale.chain_rates[0], **chain), point),
        "MaskedBNN": (caveat.MaskedBNN(sparsity=0.05, learning_rate=scale.chain_rates[1], **chain), point),
    }


METHODS = [*methods(TINY, Training())]
TUNED = [name for name in METHODS if name not in ("MeanFieldVI", "SSVI")]  # whose prior is to be chosen
PRECISIONS = (1.0, 25.0, 400.0)
CAUCHY = 0.5  # the scale of MaskedBNN's prior on the small problems
PRIOR_COLUMNS = ("problem", "method", "precision", "epochs", "rows", "nll", "accuracy", "device")


@dataclass(frozen=True)
class Cell:
    """One fit of the table."""

    problem: str
    method: str
    seed: int
    precision: float = 1.0  # of the prior, for the methods that have no settings of their own

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.problem}-{self.method}-{self.seed}-{self.precision:g}"


def training_of(name: str, scale: Scale, device: str) -> Training:
    """Adam, or for ResNet-18 SGD in the GPU's own way."""
    plain = Training(epochs=scale.epochs, batch_size=scale.batch_size, learning_rate=scale.learning_rate)
    if not name.startswith("cifar"):
        return plain
    gpu = device == "cuda"
    precision: Literal["float32", "bfloat16"] = "bfloat16" if gpu else "float32"
    return replace(plain, optimizer="sgd", warmup=0.025, precision=precision, channels_last=gpu, compile=gpu)


QUICK_ROWS = 200
SPLIT = {"digits": problems.digits, "mnist": problems.mnist, "fashion_mnist": problems.fashion_mnist}


def rows_of(name: str, seed: int, data_dir: Path | None, quick: bool) -> tuple[TensorDataset, TensorDataset]:
    """Training and test rows."""
    loaded = SPLIT[name](data_dir, seed) if name in SPLIT else data.load(name, data_dir)
    few = QUICK_ROWS if quick else None
    return tuple(TensorDataset(*(t[:few] for t in part.tensors)) for part in (loaded.train, loaded.test))


def network_of(name: str, seed: int, classes: int) -> nn.Module:
    """At initial weights of the seed."""
    torch.manual_seed(seed)
    if name == "digits":
        return models.mlp(64, 10, (100,))
    return models.resnet18(3, classes) if name.startswith("cifar") else models.lenet_caffe()


def prior_of(cell: Cell, scale: Scale, module: nn.Module, rows: int) -> caveat.Prior:
    """Gaussian; for MaskedBNN, as in its paper, Cauchy."""
    if cell.method == "MaskedBNN":
        scale_of_prior = cell.precision**-0.5 if cell.problem.startswith("cifar") else CAUCHY
        return caveat.StudentTPrior(scale=scale_of_prior, degrees=1.0)
    of_vi = {"MeanFieldVI": scale.dense, "SSVI": scale.ssvi}.get(cell.method)
    if of_vi is None:
        return caveat.GaussianPrior(cell.precision)
    if math.isnan(of_vi[2]):
        return cifar.prior(module, (of_vi[1] / (rows * DECAY)) ** 0.5, DECAY, rows)
    return caveat.GaussianPrior(of_vi[2])


def fit_cell(
    cell: Cell, scale: Scale, train: TensorDataset, device: str, folder: Path | None = None
) -> caveat.Posterior:
    """The posterior of a cell; with a folder, one that was stopped goes on."""
    module = network_of(cell.problem, cell.seed, int(train.tensors[1].max()) + 1)
    augment = data.crop_and_flip if cell.problem.startswith("cifar") else None
    prior = prior_of(cell, scale, module, len(train))
    task = caveat.Task(module, train, caveat.Categorical(), prior, augment=augment)
    chosen, start = methods(scale, training_of(cell.problem, scale, device))[cell.method]
    place = None if folder is None else folder / cell.name
    if place is not None and place.exists():
        return caveat.load(place, module, device=device)
    return caveat.fit(task, chosen, start=start, seed=cell.seed, device=device, folder=place, progress=False)


def run_cell(cell: Cell, data_dir: Path | None, device: str, quick: bool, folder: Path | None) -> dict[str, Any]:
    """Fit and score: one row of the csv."""
    name, method, seed = cell.problem, cell.method, cell.seed
    train, test = rows_of(name, seed, data_dir, quick)
    scale = TINY if quick else SCALES[name]
    posterior = fit_cell(cell, scale, train, device, folder)
    draws = None if posterior.method.default_draws == 1 else scale.draws
    scores = caveat.evaluate(posterior, {"test": test}, draws=draws, seed=seed, progress=False)["test"]
    info = posterior.info
    row: dict[str, Any] = {"problem": name, "method": method, "seed": seed, "device": device}
    row |= {"command": f"second_table.py --problems {name} --methods {method} --seed {seed} --device {device}"}
    row |= {"commit": cifar.commit()}
    row |= {"accuracy": scores["accuracy"].mean, "nll": scores["nll"].mean, "ece": scores["ece"].mean}
    row |= {"marginal": scores["marginal_calibration_error"].mean, "sparsity": 1 - info.diagnostics["density"]}
    row |= {"left": left(posterior), "bytes": info.stored_bytes, "training_flops": info.flops, "seconds": info.seconds}
    row |= inference(posterior, test.tensors[0], device) | {"warnings": "; ".join(info.warnings)}
    return {key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()}


def choose(cell: Cell, data_dir: Path | None, device: str, quick: bool, folder: Path | None) -> dict[str, Any]:
    """Fit on all but some training rows, for a quarter of the epochs, and score those: a line of the file of priors."""
    scale = TINY if quick else SCALES[cell.problem]
    scale = replace(scale, epochs=max(2, scale.epochs // 4), before=max(1, scale.before // 4))
    x, y = rows_of(cell.problem, cell.seed, data_dir, quick)[0].tensors
    held = min(5000, len(x) // 5)
    posterior = fit_cell(cell, scale, TensorDataset(x[:-held], y[:-held]), device, folder and folder / "choose")
    scores = caveat.evaluate(posterior, {"held out": TensorDataset(x[-held:], y[-held:])}, progress=False)["held out"]
    row = {"problem": cell.problem, "method": cell.method, "precision": f"{cell.precision:g}", "epochs": scale.epochs}
    row |= {name: f"{scores[name].mean:.5g}" for name in ("nll", "accuracy")}
    return row | {"rows": held, "device": device}


def chosen_precision(problem: str, method: str, priors: Sequence[dict[str, str]]) -> float:
    """The one of the lowest NLL on held-out rows; 1 for the small problems, whose rivals were run with it."""
    own = [row for row in priors if (row["problem"], row["method"]) == (problem, method)]
    if not own and problem.startswith("cifar") and method in TUNED:
        raise SystemExit(f"the prior of {method} on {problem} is not chosen: run with --choose first")
    if own and all(math.isinf(float(row["nll"])) for row in own):
        raise ValueError(f"{method} on {problem} diverged with every prior that was tried: take a smaller rate")
    return float(min(own, key=lambda row: float(row["nll"]))["precision"]) if own else 1.0


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
        with torch.no_grad():
            found["pass"] = _best_of_three(lambda: [module(piece) for piece in inputs.split(512)], device)
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


def write(path: Path, row: dict[str, Any], columns: Sequence[str]) -> None:
    """Append a row."""
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        if not file.tell():
            writer.writeheader()
        writer.writerow(row)


def summarise(rows: Sequence[dict[str, str]]) -> None:
    """A table a problem: means over seeds, with a standard error."""
    for name in dict.fromkeys(row["problem"] for row in rows):
        print(f"\n{name}\n")
        lines = []
        for method in METHODS:
            own = [row for row in rows if (row["problem"], row["method"]) == (name, method)]
            cells = [
                shown({i: float(row[column]) for i, row in enumerate(own) if row[column]}, form, times)
                for column, (_, times, form) in FORMS.items()
            ]
            lines.append((method, cells))
        table(["", *(head for head, _, _ in FORMS.values())], lines)


def choose_all(arguments: argparse.Namespace) -> int:
    """A line of the file of priors for every problem, method and precision that it does not have."""
    known = {(row["problem"], row["method"], float(row["precision"])) for row in read(arguments.priors)}
    cells = [Cell(n, m, 0, p) for n in arguments.problems for m in arguments.methods if m in TUNED for p in PRECISIONS]
    for cell in cells:
        if (cell.problem, cell.method, cell.precision) in known:
            continue
        device = "cpu" if cell.problem == "digits" else arguments.device
        try:
            row = choose(cell, arguments.data_dir, device, arguments.quick, arguments.folder)
        except (FloatingPointError, ValueError) as error:  # one that diverged is none to choose
            row = {"problem": cell.problem, "method": cell.method, "precision": f"{cell.precision:g}", "nll": "inf"}
            print(f"{cell.name} failed: {error}", file=sys.stderr, flush=True)
        write(arguments.priors, row, PRIOR_COLUMNS)
        print(*row.values(), flush=True)
    return 0


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", nargs="+", choices=[*SCALES], default=["digits"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--seeds", type=int, default=3, help="how many, from 0 on")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--device", default="cpu", help="digits is always on the CPU")
    parser.add_argument("--quick", action="store_true", help="tiny settings, to see that everything runs")
    parser.add_argument("--choose", action="store_true", help="score prior precisions on held-out training rows")
    parser.add_argument("--summary", action="store_true", help="only the tables")
    parser.add_argument("--folder", type=Path, help="keeps posteriors, and the place of an unfinished fit")
    parser.add_argument("--data-dir", type=Path, help="where data sets are looked for first")
    parser.add_argument("--csv", type=Path, default=Path(__file__).with_name("second_table.csv"))
    parser.add_argument("--priors", type=Path, default=Path(__file__).with_name("second_table_priors.csv"))
    arguments = parser.parse_args(words)
    if arguments.choose:
        return choose_all(arguments)
    seeds = range(arguments.seeds) if arguments.seed is None else [arguments.seed]
    wanted = [(n, m, s) for n in arguments.problems for s in seeds for m in arguments.methods]
    failed = 0
    for name, method, seed in [] if arguments.summary else wanted:
        if any((r["problem"], r["method"], r["seed"]) == (name, method, str(seed)) for r in read(arguments.csv)):
            continue
        device = "cpu" if name == "digits" else arguments.device
        try:
            cell = Cell(name, method, seed, chosen_precision(name, method, read(arguments.priors)))
            row = run_cell(cell, arguments.data_dir, device, arguments.quick, arguments.folder)
        except (FloatingPointError, ValueError) as error:  # one that diverged; the others go on
            print(f"{name} {method} {seed} failed: {error}", file=sys.stderr, flush=True)
            failed += 1
            continue
        write(arguments.csv, row, COLUMNS)
        print(*(row[key] for key in COLUMNS[:9]), flush=True)
    summarise(read(arguments.csv))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
