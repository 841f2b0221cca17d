"""What does selection add? ResNet-18 on CIFAR-10, every selector with its prior precision tuned on validation rows.

    python experiments/subnetwork/cifar10.py --seed 0 --device cuda --csv experiments/subnetwork/cifar10.csv

One trained network a seed (45,000 rows; 5,000 held out for the precision and the temperature). On it: MAP, MAP with
temperature, Laplace over all weights (diagonal, Kronecker) and over the last layer, and subnetworks of 400 to 42,438
weights by every score. Each is scored on clean test rows, on three corruptions at three strengths, on how well it tells
CIFAR-100 images from CIFAR-10 ones, and on joint predictions (ten draws from each of many pairs of test rows).
"""

import argparse
import csv
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

import caveat
from caveat import MAP, Laplace, LastLayerLaplace, SubnetworkLaplace, Training, data, models
from caveat.evaluate.metrics import joint_nll, ood_scores, top_label_ece

SCORES = ("random", "energy", "gradient", "obd", "magnitude", "variance", "swag")
SIZES = (400, 4_000, 42_438)
BATCH = 1000


def trained(task: caveat.Task, seed: int, epochs: int, device: str, folder: Path | None) -> caveat.Posterior:
    """The network that all start from; kept in a folder, so that a second run does not train again."""
    training = Training(
        epochs=epochs,
        batch_size=512,
        optimizer="sgd",
        learning_rate=0.2,
        schedule="onecycle",
        precision="bfloat16" if device == "cuda" else "float32",
        channels_last=True,
    )
    if folder is not None and folder.exists():
        return caveat.load(folder, task.network.module, device=device)
    return caveat.fit(task, MAP(training=training), seed=seed, device=device, folder=folder, progress=False)


def methods(sizes: tuple[int, ...]) -> Iterator[tuple[str, str, int, Any]]:
    """(method, score, weights, instance), the cheap ones first."""
    fast: Any = {"arithmetic": "bfloat16", "precision": "validation"}
    yield "map", "", 0, MAP(training=Training(epochs=0))
    yield "map tempered", "", 0, MAP(temperature=True, training=Training(epochs=0))
    yield "last layer", "", 5130, LastLayerLaplace(**fast)
    for weights in sizes:
        for score in SCORES:
            yield "subnetwork", score, weights, SubnetworkLaplace(weights, score, **fast)
        if weights == sizes[0]:
            yield "laplace diagonal", "", -1, Laplace("diagonal", default_draws=30, fisher="mc", **fast)
            yield "laplace kronecker", "", -1, Laplace("kronecker", default_draws=30, fisher="mc", **fast)
            yield "subnetwork", "variance, dead kept", weights, SubnetworkLaplace(weights, "variance", True, **fast)


def corrupted(x: Tensor, mean: Tensor, std: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Noise, blur and less contrast at three strengths, on pixels from 0 to 1."""
    pixels = x * std + mean
    rng = torch.Generator().manual_seed(0)
    noise = torch.randn(x.shape, generator=rng)
    for strength, (sd, width, contrast) in enumerate(((0.03, 0.6, 0.5), (0.06, 1.0, 0.3), (0.1, 1.5, 0.15)), start=1):
        place = torch.arange(-4, 5).float()
        line = (-0.5 * (place / width) ** 2).exp()
        kernel = (torch.outer(line, line) / line.sum() ** 2).expand(3, 1, 9, 9)
        blurred = F.conv2d(F.pad(pixels, [4] * 4, mode="reflect"), kernel, groups=3)
        flat = pixels.mean((1, 2, 3), keepdim=True)
        for name, image in (
            ("noise", pixels + sd * noise),
            ("blur", blurred),
            ("contrast", flat + contrast * (pixels - flat)),
        ):
            yield f"{name} {strength}", (image.clamp(0, 1) - mean) / std


def predicted(posterior: caveat.Posterior, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log probabilities of every draw [S, N, C], entropy and epistemic part [N], on the CPU."""
    pieces = [posterior.predict(part) for part in x.split(BATCH)]
    log_samples = torch.cat([p.log_samples.cpu() for p in pieces], 1)  # type: ignore[attr-defined]
    return log_samples, torch.cat([p.entropy.cpu() for p in pieces]), torch.cat([p.epistemic.cpu() for p in pieces])  # type: ignore[attr-defined]


def scores(posterior: caveat.Posterior, tests: dict[str, tuple[Tensor, Tensor]], ood: Tensor) -> Iterator[Any]:
    """(on, metric, value) for everything asked."""
    inside_entropy = inside_epistemic = torch.zeros(0)
    for name, (x, y) in tests.items():
        log_samples, entropy, epistemic = predicted(posterior, x)
        log_probs = log_samples.logsumexp(0) - torch.tensor(float(len(log_samples))).log()
        probs = log_probs.exp()
        nll = -log_probs.gather(-1, y.unsqueeze(-1)).squeeze(-1)
        yield name, "nll", float(nll.mean())
        yield name, "accuracy", float((probs.argmax(-1) == y).float().mean())
        yield name, "ece", top_label_ece(probs, y)
        if name == "clean":
            by_draw = log_samples.gather(-1, y.expand(len(log_samples), -1).unsqueeze(-1)).squeeze(-1)  # [S, N]
            yield name, "joint_nll", joint_nll(by_draw.T)
            inside_entropy, inside_epistemic = entropy[: len(ood)], epistemic[: len(ood)]
    _, entropy, epistemic = predicted(posterior, ood)
    yield "cifar100", "auroc", ood_scores(inside_entropy, entropy)["auroc"]
    if float(epistemic.max()) > 1e-9:
        yield "cifar100", "auroc_epistemic", ood_scores(inside_epistemic, epistemic)["auroc"]


def summarise(path: Path) -> None:
    """A line a seed, method and size: precision, then clean, corrupted, joint and out of distribution."""
    with path.open() as file:
        rows = list(csv.DictReader(file))
    columns = ("clean nll", "clean ece", "clean joint_nll", "shifted nll", "shifted ece", "cifar100 auroc")
    print("| seed | method | weights | precision or temperature |", " | ".join(columns), "|")
    print("|---" * (4 + len(columns)) + "|")
    for key in dict.fromkeys((r["seed"], r["method"], r["score"], r["weights"], r["precision"]) for r in rows):
        own = [r for r in rows if (r["seed"], r["method"], r["score"], r["weights"], r["precision"]) == key]
        cells = []
        for on, metric in (column.split() for column in columns):
            ood_on = ("clean", "cifar100")
            values = [
                float(r["value"])
                for r in own
                if r["metric"] == metric and (r["on"] == on or (on == "shifted" and r["on"] not in ood_on))
            ]
            cells.append(f"{sum(values) / len(values):.4f}")
        seed, method, score, weights, precision = key
        amount = f"{int(weights):,}" if int(weights) > 0 else "all"
        print("|", " | ".join([seed, f"{method} {score}", amount, f"{float(precision or 1):.2g}", *cells]), "|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rows", type=int, default=10**9, help="at most so many training rows")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--shifted-rows", type=int, default=2000)
    parser.add_argument("--map", type=Path, help="folder that keeps the trained network")
    parser.add_argument("--only", nargs="+", default=[""], help="methods whose names hold one of these")
    parser.add_argument("--minutes", type=float, default=1e9, help="start nothing new after this long")
    parser.add_argument("--csv", type=Path, default=Path(__file__).with_name("cifar10.csv"))
    parser.add_argument("--summary", action="store_true", help="only print the table of the csv")
    arguments = parser.parse_args()
    if arguments.summary:
        summarise(arguments.csv)
        return
    clock = time.monotonic()
    rows = data.load("cifar10", arguments.data_dir)
    x, y = (t[: arguments.rows] for t in rows.train.tensors)
    torch.manual_seed(arguments.seed)
    task = caveat.Task(
        models.resnet18(width=arguments.width),
        DataLoader(torch.utils.data.TensorDataset(x, y), 256),
        caveat.Categorical(),
        caveat.GaussianPrior(25.0),  # weight decay 5e-4 with 50,000 rows
        validation=0.1,
        augment=data.crop_and_flip,
    )
    start = trained(task, arguments.seed, arguments.epochs, arguments.device, arguments.map)
    print(f"seed {arguments.seed}: trained, {time.monotonic() - clock:.0f} s", flush=True)
    mean, std = (torch.tensor(rows.preprocessing[key]).reshape(1, -1, 1, 1) for key in ("mean", "std"))
    x, y = rows.test.tensors
    tests = {"clean": (x, y)}
    few = slice(0, arguments.shifted_rows)
    tests |= {name: (image, y[few]) for name, image in corrupted(x[few], mean, std)}
    if arguments.shifted_rows < len(x):
        tests["clean"] = (x[: 5 * arguments.shifted_rows], y[: 5 * arguments.shifted_rows])
    ood = data.out_of_distribution("cifar100", rows, arguments.data_dir).tensors[0][few]
    new = not arguments.csv.exists()
    with arguments.csv.open("a", newline="") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(["seed", "method", "score", "weights", "precision", "on", "metric", "value", "seconds"])
        for name, score, weights, method in methods(tuple(arguments.sizes)):
            wanted = any(part in f"{name} {score} {weights}" for part in arguments.only)
            if not wanted or (time.monotonic() - clock) / 60 > arguments.minutes:
                continue
            began = time.monotonic()
            try:
                posterior = caveat.fit(
                    task, method, start=start, seed=arguments.seed, device=arguments.device, progress=False
                )
            except (ValueError, torch.OutOfMemoryError) as error:
                print(f"{name} {score} {weights}: {error}", flush=True)
                continue
            diagnostics = posterior.info.diagnostics
            precision = diagnostics.get("prior_precision", diagnostics.get("temperature", ""))
            found = list(scores(posterior, tests, ood))
            for on, metric, value in found:
                line = [arguments.seed, name, score, weights, precision, on, metric, f"{value:.6g}"]
                writer.writerow([*line, f"{posterior.info.seconds:.2f}"])
            file.flush()
            shown = {(on, metric): value for on, metric, value in found}
            shifted = [v for (on, metric), v in shown.items() if metric == "nll" and on != "clean"]
            print(
                f"{name:18} {score:10} {weights:6} precision {precision!s:>22} clean nll {shown['clean', 'nll']:.4f} "
                f"ece {shown['clean', 'ece']:.4f} joint {shown['clean', 'joint_nll']:.4f} shifted nll "
                f"{sum(shifted) / len(shifted):.4f} auroc {shown['cifar100', 'auroc']:.4f}; fit "
                f"{posterior.info.seconds:.1f} s, scored {time.monotonic() - began - posterior.info.seconds:.1f} s, "
                f"skipped {diagnostics.get('rows_skipped')} {posterior.info.warnings}",
                flush=True,
            )
            del posterior


if __name__ == "__main__":
    sys.exit(main())
