"""What there is to say of a fit over active weights: its coverage, costs, diagnostics and warnings."""

import math
from typing import Any

from caveat.engine.run import Info, Run
from caveat.engine.sparse import Account, left_out, plain_layers
from caveat.engine.training import training_report
from caveat.engine.variational.layer_training import LayerTraining, Trained
from caveat.network import Layer
from caveat.task import Task

__all__ = ["layer_info", "std_diagnostics"]


def layer_info(task: Task, trained: Trained, run: Run, account: Account, kind: str, more: dict[str, Any]) -> Info:
    """The info of a fit: layers are of this `kind` (Gaussian, point); `more` is added to the diagnostics."""
    network, layout = task.network.to(run.device), trained.layout
    wide = plain_layers(network)

    def treatment(layer: Layer) -> str:
        if layer.name not in layout.counts:
            return "point"
        count, size = layout.counts[layer.name], wide[layer.name].size
        share = "all weights" if count == size else f"{count:,} of {size:,} weights"
        bias = f"{layer.name}.bias".removeprefix(".")
        return f"{kind}, {share}; bias a point" if bias in network.names else f"{kind}, {share}"

    exchanged = more.get("exchanged", more.get("exchanged_channels"))
    if exchanged == 0 and more["exchanging"] and account.density < 1 and run.gradient_evaluations:
        run.warnings.append(
            "nothing was exchanged, so the places are those drawn at random at the start: lower interval (steps), "
            "raise replacement, or train longer; replacement=0 says that this is wanted"
        )
    if outside := left_out(network, layout.geometries):
        run.warnings.append(
            f"{', '.join(outside[:5])}{' and others' if len(outside) > 5 else ''} stay without a posterior: only "
            "nn.Linear, nn.Conv1d and nn.Conv2d are given one (not subclasses; padded alike on both sides with zeros; "
            "no hooks; weights of their own)"
        )
    diagnostics = training_report(trained.history) | {"density": account.density, "account": account.as_json()} | more
    return run.info(network, treatment, diagnostics)


def std_diagnostics(trainer: LayerTraining, initial_std: float, run: Run) -> dict[str, Any]:
    """Diagnostics of standard deviations: how far they came, and how far that is from what the bound asks for.

    Warns where they stayed where they began, and where training ended before they arrived.
    """
    assert trainer.log_std is not None
    log_std, rate = trainer.log_std.detach(), trainer.variables.scale_rate
    moved = float((log_std - math.log(initial_std)).abs().median())
    balance = trainer.std_balance() if run.gradient_evaluations else None
    advice = f"raise std_learning_rate (now {rate:g}) or train longer"
    if moved < 0.1 and run.gradient_evaluations:
        run.warnings.append(
            f"the standard deviations hardly moved (median change of their logarithm {moved:.3f}): {advice}"
        )
    elif balance is not None and not 0.5 < balance < 2:
        run.warnings.append(
            f"the standard deviations have not arrived: root mean square {balance**0.5:.2g} of what the bound asks for "
            f"with these means: {advice}"
        )
    return {
        "median_std_change": moved,
        "median_std": float(log_std.median().exp()),
        "std_balance": balance,
        "std_learning_rate": rate,
        "kl_weight": trainer.kl_weight(1.0),
    }
