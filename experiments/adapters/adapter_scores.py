"""Scores of a posterior over adapters on rows with labels, how it tells other rows apart, and a csv that resumes."""

import csv
import math
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import caveat
from caveat.evaluate.metrics import joint_nll, ood_scores, top_label_ece

COLUMNS = ("rows", "method", "seed", "on", "accuracy", "nll", "ece", "joint_nll", "auroc_entropy", "auroc_epistemic",
           "fit_seconds", "prediction_seconds", "stored_mb", "peak_mb", "warnings", "commit", "command")  # fmt: skip


def predicted(
    posterior: caveat.Posterior, inputs: Any, draws: int, at_once: int = 250
) -> tuple[dict[str, Tensor], float]:
    """Log probabilities of every draw [S, N, C], entropy and its epistemic part [N], and the seconds it took.

    At most `draws` draws: as many as the method's default where those are fewer.
    """
    draws = min(draws, posterior.method.default_draws)
    begin = time.perf_counter()
    pieces = [posterior.predict(part, draws=draws) for part in _parts(inputs, at_once)]
    seconds = time.perf_counter() - begin
    return {
        "log_samples": torch.cat([piece.log_samples.cpu().double() for piece in pieces], 1),
        "entropy": torch.cat([piece.entropy.cpu() for piece in pieces]),
        "epistemic": torch.cat([piece.epistemic.cpu() for piece in pieces]),
    }, seconds


def scores(found: dict[str, Tensor], targets: Tensor) -> dict[str, float]:
    """Accuracy, likelihood, calibration, and the likelihood of ten labels of two rows together."""
    log_samples, count = found["log_samples"], math.log(len(found["log_samples"]))
    log_probs = log_samples.logsumexp(0) - count
    right = log_samples.gather(-1, targets.expand(len(log_samples), -1).unsqueeze(-1)).squeeze(-1)  # [S, N]
    return {
        "accuracy": float((log_probs.argmax(-1) == targets).double().mean()),
        "nll": -float(log_probs.gather(-1, targets.unsqueeze(-1)).mean()),
        "ece": top_label_ece(log_probs.exp(), targets),
        "joint_nll": joint_nll(right.T),
    }


def apart(inside: dict[str, Tensor], outside: dict[str, Tensor]) -> dict[str, float]:
    """AUROC of telling rows from outside by the entropy, and by its epistemic part."""
    kinds = ("entropy", "epistemic")
    return {f"auroc_{kind}": ood_scores(inside[kind], outside[kind])["auroc"] for kind in kinds}


def cost(posterior: caveat.Posterior, prediction_seconds: float) -> dict[str, Any]:
    """What a fit took, beside what a person should know of it."""
    info = posterior.info
    return {
        "fit_seconds": info.seconds,
        "prediction_seconds": prediction_seconds,
        "stored_mb": info.stored_bytes / 1e6,
        "peak_mb": info.peak_bytes / 1e6,
        "warnings": len(info.warnings),
        "commit": commit(),
        "command": shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def commit() -> str:
    """Of the checkout that this file is in, or of CAVEAT_COMMIT where it is none."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return os.environ.get("CAVEAT_COMMIT", found)


class Table:
    """Lines of a csv file; those that are there are not measured again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns = list(COLUMNS)
        self.done: set[tuple[str, str, str]] = set()
        if path.exists():
            with path.open(newline="") as file:
                lines = csv.DictReader(file)
                self.columns = list(lines.fieldnames or COLUMNS)  # of an older file, which goes on as it began
                self.done = {(line["rows"], line["method"], line["seed"]) for line in lines}

    def has(self, rows: int, method: str, seed: int) -> bool:
        """Whether there are lines of this run."""
        return (str(rows), method, str(seed)) in self.done

    def add(self, lines: list[dict[str, Any]]) -> None:
        """Write the lines of a run that has finished, all at once."""
        new = not self.path.exists()
        with self.path.open("a", newline="") as file:
            writer = csv.DictWriter(file, self.columns, lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerows([{name: _short(line.get(name, "")) for name in self.columns} for line in lines])


def _short(value: Any) -> Any:
    return f"{value:.5g}" if isinstance(value, float) else value


def _parts(inputs: Any, at_once: int) -> list[Any]:
    if isinstance(inputs, Tensor):
        return list(inputs.split(at_once))
    pieces = {name: value.split(at_once) for name, value in inputs.items()}
    return [dict(zip(pieces, part, strict=True)) for part in zip(*pieces.values(), strict=True)]
