"""SSVI at the paper's scale: ResNet-18 on CIFAR-10 or CIFAR-100, 200 epochs, on a GPU.

    python experiments/ssvi/cifar.py --device cuda                # SSVI at 95%: 6 minutes on an H200
    python experiments/ssvi/cifar.py --device cuda --method dense
    python experiments/ssvi/cifar.py --device cuda --method rigl --data cifar100 --seed 1
    python experiments/ssvi/cifar.py --device cuda --data fashion_mnist --width 16 --epochs 30 --interval 50

One line a run is added to cifar.csv. Nothing is chosen on test rows: the last epoch counts. The prior's width is the
one at which the KL term decays means as usual weight decay does (beta / (N s^2) = 5e-4); biases and norm layers have
that decay too.
"""

import argparse
import csv
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import caveat
from caveat import SSVI, MeanFieldVI, RigL, Training, data, models

COLUMNS = ("data", "method", "density", "seed", "epochs", "accuracy", "nll", "ece", "marginal_ece", "median_std_change")
COLUMNS += ("median_std", "training_pflop", "stored_mb", "seconds", "peak_gb", "knobs")


def prior(module: torch.nn.Module, std: float, decay: float, rows: int) -> caveat.GaussianPrior:
    """Narrow for the weights of linear and convolutional layers, that of the decay for everything else."""
    layers = (name for name, m in module.named_modules() if isinstance(m, torch.nn.Linear | torch.nn.Conv2d))
    return caveat.GaussianPrior({f"{name}.weight": std**-2 for name in layers} | {"*": decay * rows})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=("cifar10", "cifar100", "fashion_mnist"), default="cifar10")
    parser.add_argument("--width", type=int, default=64, help="channels of the first stage")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--method", choices=("ssvi", "channel", "dense", "rigl"), default="ssvi")
    parser.add_argument("--density", type=float, default=0.05)
    parser.add_argument("--allocation", choices=("uniform", "erk"), default="uniform", help="of weights over layers")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--learning-rate", type=float, default=0.2)
    parser.add_argument("--kl-weight", type=float, default=0.01)
    parser.add_argument("--kl-warmup", type=float, default=0.5, help="share of training over which the KL weight rises")
    parser.add_argument("--initial-std", type=float, default=0.003)
    parser.add_argument("--decay", type=float, default=5e-4)
    parser.add_argument("--interval", type=int, default=100, help="steps between exchanges of weights")
    parser.add_argument("--rows", type=int, default=10**9, help="at most so many training rows")
    parser.add_argument("--validation", type=int, default=0, help="score on so many held out training rows instead")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", type=Path, help="keeps the posterior, and the place of an unfinished run")
    parser.add_argument("--csv", type=Path, default=Path(__file__).with_name("cifar.csv"))
    a = parser.parse_args()
    rows = data.load(a.data, a.data_dir)
    x, y = (t[: a.rows] for t in rows.train.tensors)
    scored = rows.test
    if a.validation:
        scored = TensorDataset(x[-a.validation :], y[-a.validation :])
        x, y = x[: -a.validation], y[: -a.validation]
    torch.manual_seed(a.seed)
    module = models.resnet18(x.shape[1], int(y.max()) + 1, a.width)
    std = (a.kl_weight / (len(x) * a.decay)) ** 0.5
    gaussian = prior(module, std if a.method != "rigl" else (a.decay * len(x)) ** -0.5, a.decay, len(x))
    loader = DataLoader(TensorDataset(x, y), a.batch_size)
    task = caveat.Task(module, loader, caveat.Categorical(), gaussian, augment=data.crop_and_flip)
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
    method: Any = {
        "ssvi": lambda: SSVI(density=a.density, allocation=a.allocation, interval=a.interval, **spread),
        "channel": lambda: SSVI(density=a.density, interval=a.interval, structure="channel", **spread),
        "dense": lambda: MeanFieldVI(**spread),
        "rigl": lambda: RigL(density=a.density, allocation=a.allocation, interval=a.interval, training=training),
    }[a.method]()
    begin = time.monotonic()
    posterior = caveat.fit(task, method, seed=a.seed, device=a.device, folder=a.folder, progress=False)
    taken = time.monotonic() - begin
    scores = caveat.evaluate(posterior, {"scored": scored}, progress=False)["scored"]
    info, found = posterior.info, posterior.info.diagnostics
    line: dict[str, Any] = {"data": a.data, "method": a.method, "density": round(found["density"], 5), "seed": a.seed}
    line |= {"epochs": a.epochs, "accuracy": scores["accuracy"].mean, "nll": scores["nll"].mean}
    line |= {"ece": scores["ece"].mean, "marginal_ece": scores["marginal_calibration_error"].mean}
    line |= {"median_std_change": found.get("median_std_change", ""), "median_std": found.get("median_std", "")}
    line |= {"training_pflop": info.flops / 1e15, "stored_mb": info.stored_bytes / 2**20, "seconds": round(taken, 1)}
    line |= {"peak_gb": info.peak_bytes / 2**30}
    line["knobs"] = f"width {a.width} batch {a.batch_size} rate {a.learning_rate} kl {a.kl_weight}"
    line["knobs"] += f" std {a.initial_std} prior {std:.3g}" + f" validation {a.validation}" * (a.validation > 0)
    line["knobs"] += f" {a.allocation}" * (a.method in ("ssvi", "rigl") and a.allocation != "uniform")
    new = not a.csv.exists()
    with a.csv.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if new:
            writer.writeheader()
        writer.writerow(line)
    shown = (f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in line.items())
    print(", ".join(shown), flush=True)


if __name__ == "__main__":
    main()
