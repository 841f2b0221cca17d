"""SSVI at the paper's scale: ResNet-18 on CIFAR-10 or CIFAR-100, 200 epochs, on a GPU.

    python experiments/ssvi/cifar.py --device cuda --folder runs/95             # SSVI at 95%: 5 minutes on an H200
    python experiments/ssvi/cifar.py --device cuda --folder runs/dense --method dense
    python experiments/ssvi/cifar.py --device cuda --data cifar100 --density 0.1 --seed 1
    python experiments/ssvi/cifar.py --device cuda --data cifar100 --epochs 60 --removal magnitude --shifted-rows 0
    python experiments/ssvi/cifar.py --width 4 --rows 1000 --epochs 2 --shifted-rows 20    # on a CPU, to see it run

A line a run is added to cifar.csv, and to cifar_shift.csv one for every corruption and severity of the first test rows
and for every out-of-distribution set. With a folder a killed run goes on where it was; one that is finished is scored
again. Nothing is chosen on test rows: the last epoch counts. The prior's width is the one at which the KL term decays
means as usual weight decay does (beta / (N s^2) = 5e-4); biases and norm layers have that decay too. The learning rate
is the usual one, .1 for batches of 128, times the size of a batch; exchanges come after as many images as the paper's.
"""

import argparse
import csv
import os
import subprocess
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

import caveat
from caveat import SSVI, MeanFieldVI, RigL, Training, data, models
from caveat.evaluate.scoring import Scored

COLUMNS: tuple[str, ...] = ("data", "method", "density", "seed", "epochs", "accuracy", "nll", "ece", "marginal_ece")
COLUMNS += ("median_std_change", "median_std", "training_pflop", "stored_mb", "seconds", "peak_gb", "knobs", "draws")
COLUMNS += ("command", "commit")
SHIFT_COLUMNS: tuple[str, ...] = ("data", "method", "density", "seed", "on", "severity", "rows", "accuracy", "nll")
SHIFT_COLUMNS += ("ece", "marginal_ece", "auroc_entropy", "auroc_epistemic", "knobs")
KL_WEIGHTS = {"dense": 0.001, "ssvi": 0.003, "channel": 0.003, "rigl": 0.0}  # by Fashion-MNIST's validation rows
EXTRA = ("speckle_noise", "gaussian_blur", "spatter", "saturate")  # beside the usual fifteen corruptions
PATHS = ("data_dir", "folder", "csv", "commit")  # are no part of what was run


def arguments() -> argparse.ArgumentParser:
    """What can be chosen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=("cifar10", "cifar100", "fashion_mnist"), default="cifar10")
    parser.add_argument("--width", type=int, default=64, help="channels of the first stage")
    parser.add_argument("--method", choices=tuple(KL_WEIGHTS), default="ssvi")
    parser.add_argument("--density", type=float, default=0.05)
    parser.add_argument("--allocation", choices=("uniform", "erk"), default="uniform", help="of weights over layers")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=500, help="compiled, one that divides the rows is faster")
    parser.add_argument("--learning-rate", type=float, default=0.4)
    parser.add_argument("--kl-weight", type=float, help="by the method unless given")
    parser.add_argument("--kl-warmup", type=float, default=0.5, help="share of training over which the KL weight rises")
    parser.add_argument("--initial-std", type=float, default=0.003)
    parser.add_argument("--decay", type=float, default=5e-4)
    parser.add_argument("--interval", type=int, default=25, help="steps between exchanges of weights")
    parser.add_argument("--removal", default="snr_magnitude", help="the criterion by which SSVI keeps weights")
    parser.add_argument("--addition", default="noisy", help="the gradient by which SSVI adds weights")
    parser.add_argument("--rows", type=int, default=10**9, help="at most so many training rows")
    parser.add_argument("--validation", type=int, default=0, help="score on so many held out training rows instead")
    parser.add_argument("--draws", type=int, default=5, help="of a prediction")
    parser.add_argument("--shifted-rows", type=int, default=1000, help="test rows under every corruption; 0 for none")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--folder", type=Path, help="keeps the posterior, and the place of an unfinished run")
    parser.add_argument("--csv", type=Path, default=Path(__file__).with_name("cifar.csv"))
    parser.add_argument("--commit", help="of this code, where it is no checkout")
    return parser


def prior(module: torch.nn.Module, std: float, decay: float, rows: int) -> caveat.GaussianPrior:
    """Narrow for the weights of linear and convolutional layers, that of the decay for everything else."""
    layers = (name for name, m in module.named_modules() if isinstance(m, torch.nn.Linear | torch.nn.Conv2d))
    return caveat.GaussianPrior({f"{name}.weight": std**-2 for name in layers} | {"*": decay * rows})


def method_of(a: argparse.Namespace) -> Any:
    """The method, with its knobs."""
    on_gpu = a.device == "cuda"
    training = Training(
        epochs=a.epochs,
        optimizer="sgd",
        learning_rate=a.learning_rate,
        warmup=0.025,
        precision="bfloat16" if on_gpu else "float32",
        channels_last=on_gpu,
        compile=on_gpu and not a.no_compile,
    )
    spread: Any = {
        "initial_std": a.initial_std,
        "kl_weight": a.kl_weight,
        "kl_warmup": a.kl_warmup,
        "training": training,
    }
    if a.method == "dense":
        return MeanFieldVI(**spread)
    if a.method == "channel":
        return SSVI(density=a.density, interval=a.interval, structure="channel", **spread)
    sparse: Any = {"density": a.density, "allocation": a.allocation, "interval": a.interval}
    if a.method == "rigl":
        return RigL(**sparse, training=training)
    return SSVI(**sparse, **spread, criterion=a.removal, addition=a.addition)


def fitted(a: argparse.Namespace, train: TensorDataset, std: float) -> caveat.Posterior:
    """The posterior; from the folder where it is there."""
    x, y = train.tensors
    torch.manual_seed(a.seed)
    module = models.resnet18(x.shape[1], int(y.max()) + 1, a.width)
    if a.folder is not None and a.folder.exists():
        return caveat.load(a.folder, module, device=a.device)
    gaussian = prior(module, std, a.decay, len(x))
    task = caveat.Task(
        module, DataLoader(train, a.batch_size), caveat.Categorical(), gaussian, augment=data.crop_and_flip
    )
    return caveat.fit(task, method_of(a), seed=a.seed, device=a.device, folder=a.folder, progress=False)


def command(a: argparse.Namespace, parser: argparse.ArgumentParser) -> str:
    """What was run: everything that is not as it would be anyway."""
    words = ["cifar.py"]
    for name, value in vars(a).items():
        if name not in PATHS and value != parser.get_default(name):
            words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return " ".join(words)


def commit() -> str:
    """Of the checkout that this file is in, or of CAVEAT_COMMIT where it is none."""
    words = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    found = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    return os.environ.get("CAVEAT_COMMIT", found)


def add(path: Path, columns: tuple[str, ...], lines: list[dict[str, Any]]) -> None:
    """More lines to a csv."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns)
        if new:
            writer.writeheader()
        writer.writerows(lines)


def shifts(a: argparse.Namespace, rows: data.DataSet) -> tuple[dict[str, Any], dict[str, TensorDataset]]:
    """The first test rows under every corruption, and out-of-distribution rows."""
    if not a.shifted_rows or a.validation:
        return {}, {}
    few = range(min(a.shifted_rows, len(rows.test)))
    names = [name for name in data.CORRUPTIONS if name not in EXTRA]
    families = {
        name: {severity: Subset(own, few) for severity, own in data.shifted(rows, name).items()} for name in names
    }
    return families, data.ood_pairs(rows, a.data_dir, n=10 * len(few))


def shift_line(scored: Scored) -> dict[str, Any]:
    """Of one corruption and severity, or of out-of-distribution rows."""
    line = {"on": scored.family, "severity": scored.severity, "rows": scored.rows}
    line |= {name: f"{score.mean:.5g}" for name, score in scored.metrics.items() if name in SHIFT_COLUMNS}
    if scored.role == "test":
        line["marginal_ece"] = f"{scored['marginal_calibration_error'].mean:.5g}"
    return line


def main() -> None:
    parser = arguments()
    a = parser.parse_args()
    ran = command(a, parser)
    a.kl_weight = KL_WEIGHTS[a.method] if a.kl_weight is None else a.kl_weight
    rows = data.load(a.data, a.data_dir)
    x, y = (t[: a.rows] for t in rows.train.tensors)
    scored = rows.test
    if a.validation:
        scored = TensorDataset(x[-a.validation :], y[-a.validation :])
        x, y = x[: -a.validation], y[: -a.validation]
    families, ood = shifts(a, rows)  # what is missing for them is missed before the training
    std = ((a.kl_weight if a.method != "rigl" else 1.0) / (len(x) * a.decay)) ** 0.5
    posterior = fitted(a, TensorDataset(x, y), std)
    everything = caveat.evaluate(posterior, {"clean": scored} | families, ood=ood, draws=a.draws, progress=False)
    scores = everything["clean"]
    info, found = posterior.info, posterior.info.diagnostics
    about: dict[str, Any] = {"data": a.data, "method": a.method, "density": round(found["density"], 5), "seed": a.seed}
    about["knobs"] = f"width {a.width} batch {a.batch_size} rate {a.learning_rate} kl {a.kl_weight}"
    about["knobs"] += f" std {a.initial_std} prior {std:.3g}" + f" validation {a.validation}" * (a.validation > 0)
    about["knobs"] += f" {a.allocation}" * (a.method in ("ssvi", "rigl") and a.allocation != "uniform")
    about["knobs"] += f" interval {a.interval}" * (a.method != "dense")
    about["knobs"] += f" warmup {a.kl_warmup}" * (a.kl_warmup != 0.5)
    about["knobs"] += f" removal {a.removal}" * (a.removal != "snr_magnitude")
    about["knobs"] += f" addition {a.addition}" * (a.addition != "noisy")
    line = about | {"epochs": a.epochs, "accuracy": scores["accuracy"].mean, "nll": scores["nll"].mean}
    line |= {"ece": scores["ece"].mean, "marginal_ece": scores["marginal_calibration_error"].mean}
    line |= {"median_std_change": found.get("median_std_change", ""), "median_std": found.get("median_std", "")}
    line |= {"training_pflop": info.flops / 1e15, "stored_mb": info.stored_bytes / 2**20}
    line |= {"seconds": round(info.seconds, 1), "peak_gb": info.peak_bytes / 2**30, "draws": a.draws}
    line |= {"command": ran, "commit": a.commit or commit()}
    add(a.csv, COLUMNS, [line])
    shown = (f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in line.items())
    print(", ".join(shown), flush=True)
    if families:
        lines = [about | shift_line(own) for own in everything.data]
        add(a.csv.with_name(f"{a.csv.stem}_shift.csv"), SHIFT_COLUMNS, lines)


if __name__ == "__main__":
    main()
