"""Sampled linearised Laplace over all 11.2 million weights of ResNet-18 on CIFAR-10 or CIFAR-100, on one GPU.

    python experiments/sampled_laplace/cifar.py --data cifar10 --data-dir DATA --folder runs/cifar10 --device cuda

Trains the network, or takes it from the folder; then the fit, which goes on where a killed one stopped; then test rows,
clean and corrupted, the network's own predictions beside those of the samples, each with and without a temperature.
Every stage is timed. A line of the csv is (data, stage or method, quantity, value, seed, command, commit).
`--width 4 --rows 512 --epochs 1 --samples 4 --test-rows 250 --corrupted-rows 250` is a dry run for a CPU.
"""

import argparse
import csv
import dataclasses
import json
import math
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import caveat
from caveat import MAP, SampledLaplace, Training, data, models
from caveat.engine.linear_model import ConjugateGradients, Solver, StochasticDescent, Tuning
from caveat.evaluate.metrics import joint_nll, top_label_ece

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from pieces import commit

CORRUPTIONS = ("gaussian_noise", "defocus_blur", "fog", "jpeg_compression")  # one of each group


def trained(task: caveat.Task, given: argparse.Namespace) -> caveat.Posterior:
    """The network, trained once and kept."""
    kept = given.folder / f"map-{given.validation:g}"
    if kept.exists():
        return caveat.load(kept, task.network.module, device=given.device)
    training = Training(
        epochs=given.epochs,
        batch_size=min(500, given.rows),
        optimizer="sgd",
        learning_rate=0.4,
        warmup=0.025,
        precision="bfloat16" if given.device == "cuda" else "float32",
        channels_last=True,
        compile=given.device == "cuda",
    )
    return caveat.fit(task, MAP(training=training), seed=given.seed, device=given.device, folder=kept)


def scores(posterior: caveat.Posterior, x: torch.Tensor, y: torch.Tensor, rows: int) -> dict[str, float]:
    """Likelihood, accuracy and calibration of test rows, and the likelihood of ten labels drawn from two rows."""
    started = time.perf_counter()
    pieces = [posterior.predict(part).log_samples.cpu() for part in x.split(rows)]  # type: ignore[attr-defined]
    seconds = time.perf_counter() - started
    log_samples = torch.cat(pieces, 1).double()  # [S, N, C]
    count = math.log(len(log_samples))
    log_probs = log_samples.logsumexp(0) - count
    right = log_samples.gather(-1, y.expand(len(log_samples), -1).unsqueeze(-1)).squeeze(-1)
    return {
        "nll": -float(log_probs.gather(-1, y.unsqueeze(-1)).mean()),
        "accuracy": float((log_probs.argmax(-1) == y).double().mean()),
        "ece": top_label_ece(log_probs.exp(), y),
        "joint nll a label": joint_nll(right.T, pairs=5000),
        "seconds of prediction": seconds,
    }


def corrupted(rows: data.DataSet, severity: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first test rows under four corruptions."""
    families = (data.shifted(rows, name, (severity,))[severity] for name in CORRUPTIONS)
    pairs = [pair for family in families for pair in family.__getitems__(list(range(count)))]
    return torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=("cifar10", "cifar100"), default="cifar10")
    parser.add_argument("--data-dir")
    parser.add_argument("--folder", type=Path, required=True, help="keeps the network, the fit and its place")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rows", type=int, default=10**9, help="at most so many training rows")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--tuning-samples", type=int, default=2, help="for the updates of the precision")
    parser.add_argument("--rank", type=int, default=256, help="of the sketch: more products once, fewer in every solve")
    parser.add_argument("--tolerance", type=float, default=1e-2)
    parser.add_argument("--descent", type=int, help="solve by descent on L' in batches of so many rows instead")
    parser.add_argument("--descent-passes", type=int, default=60, help="at most")
    parser.add_argument(
        "--negligible", type=float, default=1e-2, help="share of the information that rows may hold and be left out"
    )
    parser.add_argument("--block-rows", type=int)
    parser.add_argument("--precision", type=float, help="of the prior; found by the updates unless given")
    parser.add_argument(
        "--first-precision",
        type=float,
        default=1000.0,
        help="where the updates start: solves are short with a strong prior",
    )
    parser.add_argument(
        "--validation", type=float, default=0.02, help="share of rows to choose the temperature by, or 0"
    )
    parser.add_argument("--isotropic", action="store_true", help="no g-prior")
    parser.add_argument("--arithmetic", choices=("full", "float16"), default="float16")
    parser.add_argument("--test-rows", type=int, default=10**9, help="at most so many clean test rows")
    parser.add_argument("--corrupted-rows", type=int, default=1000, help="of each corruption and severity")
    parser.add_argument("--csv", type=Path, default=Path(__file__).with_name("cifar.csv"))
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    rows = data.load(given.data, given.data_dir)
    x, y = (t[: given.rows] for t in rows.train.tensors)
    torch.manual_seed(given.seed)
    task = caveat.Task(
        models.resnet18(out_features=100 if given.data == "cifar100" else 10, width=given.width),
        DataLoader(TensorDataset(x, y), 256),
        caveat.Categorical(),
        caveat.GaussianPrior(25.0),  # weight decay 5e-4 with 50,000 rows
        augment=data.crop_and_flip,
        validation=given.validation or None,
    )
    start = trained(task, given)
    solver: Solver = ConjugateGradients(rank=given.rank, at_once=given.at_once, tolerance=given.tolerance, refresh=10)
    if given.descent:
        solver = StochasticDescent(batch_rows=given.descent, tolerance=given.tolerance, passes=given.descent_passes)
    method = SampledLaplace(
        samples=given.samples,
        at_once=given.at_once,
        precision=given.precision or "evidence",
        first_precision=None if given.precision else given.first_precision,
        g_prior=not given.isotropic,
        negligible=given.negligible,
        temperature="validation" if given.validation else 1.0,
        tuning=Tuning(samples=given.tuning_samples, tolerance=2e-2),
        solver=solver,
        arithmetic=given.arithmetic,
        block_rows=given.block_rows,
    )
    name = f"sampled-{'isotropic' if given.isotropic else 'g'}-{given.samples}-{given.validation:g}"
    name += f"-descent-{given.descent}" if given.descent else ""
    kept = given.folder / name
    if kept.exists():
        posterior = caveat.load(kept, task.network.module, device=given.device)
    else:
        posterior = caveat.fit(task, method, start=start, seed=given.seed, device=given.device, folder=kept)
    info = posterior.info
    found = {
        "seconds": info.seconds,
        "passes over the rows (vectors)": float(info.gradient_evaluations),
        "peak GB": info.peak_bytes / 1e9,
        "stored GB": info.stored_bytes / 1e9,
    }
    found |= {
        key: info.diagnostics[key]
        for key in ("prior_precision", "effective_dimension", "residual", "passes", "rows", "temperature")
    }
    found["steps of the updates"] = float(len(info.diagnostics["history"]))
    lines = [(given.data, name, quantity, value) for quantity, value in found.items()]
    lines.append((given.data, "map", "seconds", start.info.seconds))
    x, y = rows.test.tensors
    tests = {"": (x[: given.test_rows], y[: given.test_rows])} | {
        f", severity {severity}": corrupted(rows, severity, given.corrupted_rows) for severity in (1, 3, 5)
    }
    one = {"posterior": {"temperature": torch.ones((), dtype=torch.float64)}}
    plain = dataclasses.replace(posterior, state=posterior.state | one)
    compared = {"map": start, name: posterior}
    if given.validation:
        tempered = MAP(temperature=True, training=Training(epochs=0))
        compared["map, temperature"] = caveat.fit(task, tempered, start=start, device=given.device)
        compared[f"{name}, temperature 1"] = plain
    for which, scored in compared.items():
        for where, test in tests.items():
            found = scores(scored, *test, 2500)
            lines += [(given.data, which, quantity + where, value) for quantity, value in found.items()]
    words: list[str] = [Path(__file__).name]
    for word in sys.argv[1:]:  # places on this machine are no part of what was run
        if "/" in word:
            words.pop()
        else:
            words.append(word)
    command = " ".join(words)
    about = (given.seed, command, commit())
    with given.csv.open("a", newline="") as file:
        csv.writer(file).writerows([(*line[:3], f"{line[3]:.6g}", *about) for line in lines])
    for line in lines:
        print(*line, flush=True)
    print(json.dumps({"warnings": info.warnings, "history": info.diagnostics["history"]}, indent=1))


if __name__ == "__main__":
    main()
