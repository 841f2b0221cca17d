"""The main job: every method on scikit-learn's digits, clean, rotated and from outside, in one table and one page.

A small network (64-32-10, SiLU) keeps it short; each method runs its `quick` instance. The point is not the best score
but to see, side by side, what each posterior says when the input is one the network was never trained on.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from caveat import data, models, report
from caveat.engine.training import Training
from caveat.evaluate import evaluate
from caveat.fitting import fit
from caveat.likelihoods import Categorical
from caveat.methods import discover
from caveat.posterior import Posterior
from caveat.priors import GaussianPrior
from caveat.randomness import seeded
from caveat.storage import new_folder
from caveat.task import Task

__all__ = ["digits_data", "digits_task", "run_demo"]

ANGLES = range(15, 91, 15)
OUTSIDE = ("photographs", "permuted")


def digits_task(digits: data.DataSet, seed: int) -> Task:
    """The demo's network on the demo's data, a tenth of it held out for tuning."""
    with seeded(seed):
        module = models.mlp(64, 10, hidden=(32,), activation=nn.SiLU)
    return Task(module, DataLoader(digits.train, 64), Categorical(), GaussianPrior(1.0), validation=0.1)


def digits_data(digits: data.DataSet) -> tuple[dict[str, Any], dict[str, Dataset]]:
    """Clean and rotated test digits, and data from outside."""
    x, y = digits.test.tensors
    rotated = {angle: (data.rotate(x, angle, fill=digits.preprocessing["black"]), y) for angle in ANGLES}
    return {"clean": digits.test, "rotated": rotated}, {
        name: data.out_of_distribution(name, digits) for name in OUTSIDE
    }


def run_demo(folder: Path, *, seed: int = 0, device: torch.device | str = "cpu", progress: bool = True) -> str:
    """Fit and score every discovered method; write the results and the page; returns the table."""
    digits = data.load("digits")
    task = digits_task(digits, seed)
    inside, outside = digits_data(digits)
    with new_folder(folder, overwrite=(folder / "report.html").exists()) as place:
        for name, label, posterior in _posteriors(task, seed, device, progress):
            posterior.save(place / name / "posterior")
            evaluate(
                posterior,
                inside,
                ood=outside,
                folder=place / name,
                label=label,
                class_names=digits.class_names,
                progress=progress,
            )
        runs = report.read(place)
        report.write_csv(runs, place / "results.csv")
        report.write(place, title="Caveat: every method on digits")
        return report.format_text(report.table(runs))


def _posteriors(task: Task, seed: int, device: torch.device | str, progress: bool) -> Any:
    """Every method's quick instance as (folder name, label, posterior), MAP first since others start from it."""
    methods = discover()
    point: Posterior = fit(task, methods["map"].quick, seed=seed, device=device, progress=progress)
    yield "map", "MAP", point
    tempered = methods["map"](temperature=True, training=Training(epochs=0))
    yield "map_tempered", "MAP tempered", fit(task, tempered, start=point, seed=seed, device=device, progress=progress)
    for name, method in methods.items():
        if name != "map":
            start = point if method.starts_from == "trained" else None
            yield (
                name,
                method.__name__,
                fit(task, method.quick, start=start, seed=seed, device=device, progress=progress),
            )
