"""A small problem, short trainings and interrupted ones, for the tests of training layers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import caveat
from caveat import GaussianPrior, Training
from caveat.engine import run as run_module
from caveat.engine.training import Moments
from caveat.engine.variational.layer_training import LayerTraining


def rows(n: int = 48) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    return x, (x.mean((1, 2, 3)) > 0).long()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(24, 10), nn.ReLU(), nn.Linear(10, 2),
    )  # fmt: skip


SIZES = {"0": 36, "3": 216, "6": 240, "8": 20}


def task(prior: GaussianPrior | None = None, validation: float | None = None) -> caveat.Task:
    return caveat.Task(network(), rows(), caveat.Categorical(), prior, validation=validation)


def short(**knobs: Any) -> Training:
    return Training(**{"epochs": 8, "batch_size": 12, "learning_rate": 0.01} | knobs)


def ssvi(**knobs: Any) -> caveat.SSVI:
    return caveat.SSVI(**{"density": 0.3, "interval": 3, "training": short()} | knobs)


def watch(monkeypatch: pytest.MonkeyPatch, look: Callable[[LayerTraining], None]) -> None:
    """Call a function after every step of training."""
    after_step = LayerTraining._after_step

    def spied(self: LayerTraining, moments: Moments) -> None:
        after_step(self, moments)
        look(self)

    monkeypatch.setattr(LayerTraining, "_after_step", spied)


def interrupted(
    make_task: Callable[[], caveat.Task], made: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> caveat.Posterior:
    """A fit that is killed after some epochs and goes on."""
    with monkeypatch.context() as patch:
        patch.setattr(run_module.Run, "checkpoint_due", lambda self: self.folder is not None)
        checkpoint, kept = run_module.Run.checkpoint, 0

        def killed(self: run_module.Run, carry: Any, note: dict[str, object]) -> None:
            nonlocal kept
            checkpoint(self, carry, note)
            kept += 1
            if kept == after:
                raise KeyboardInterrupt

        patch.setattr(run_module.Run, "checkpoint", killed)
        with pytest.raises(KeyboardInterrupt):
            caveat.fit(make_task(), made, folder=folder, progress=False)
    return caveat.fit(make_task(), made, folder=folder, progress=False)


def same(one: caveat.Posterior, other: caveat.Posterior) -> None:
    for group, tensors in one.state.items():
        for name, value in tensors.items():
            assert torch.equal(value, other.state[group][name]), f"{group}/{name}"


EACH = GaussianPrior({"0.weight": torch.linspace(1, 5, 36).view(4, 1, 3, 3), "3.*": 40.0, "*": 1.0})
RESUMED = {
    "layer": (ssvi(), None),
    "global": (ssvi(scope="global"), None),
    "global, precisions": (ssvi(scope="global", dense=()), EACH),
    "across epochs": (ssvi(interval=5, addition="batches", addition_batches=4), None),
    "over epochs": (ssvi(interval=5, addition="batches", training=short(epochs=32, batch_size=48)), None),
    "at the mean": (ssvi(addition="mean", training=short(optimizer="sgd")), None),
    "mean field": (caveat.MeanFieldVI(training=short()), None),
    "channels": (ssvi(structure="channel"), None),
    "points": (caveat.RigL(density=0.3, interval=3, scope="global", training=short(optimizer="sgd")), EACH),
}


def plain_task(prior: GaussianPrior | None) -> caveat.Task:
    """In float64, without BatchNorm, whose statistics are of a rank's own rows, and without ties among gradients.

    These would come of dead units, and of two classes, whose gradients differ in sign alone.
    """
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Identity(), nn.Conv2d(4, 6, 3), nn.Tanh(), nn.Flatten(),
        nn.Linear(24, 10), nn.Tanh(), nn.Linear(10, 3),
    )  # fmt: skip
    x, y = rows()
    return caveat.Task(module.double(), (x.double(), y), caveat.Categorical(), prior)


def places_found() -> dict[str, list[Any]]:
    found = {}
    for kind in ("layer", "global, precisions", "across epochs", "at the mean", "points", "channels"):
        made, prior = RESUMED[kind]
        state = caveat.fit(plain_task(prior), made, progress=False).state
        kept = [own.tolist() for own in state.get("slices", {}).values()]
        active = state["active"]
        found[kind] = [active["indices"].tolist() + kept, active["counts"].tolist(), active["mean"].tolist()]
    return found
