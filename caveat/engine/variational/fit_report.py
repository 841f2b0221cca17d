"""What there is to say of a fit over active weights: its coverage, costs, diagnostics and warnings."""

import math
from collections.abc import Mapping
from typing import Any

from caveat.engine.run import Info, Run
from caveat.engine.sparse import Account, LayerGeometry, WeightLayout, all_weights, left_out, parameter_name
from caveat.engine.training import training_report
from caveat.engine.variational.layer_training import LayerTraining, Trained
from caveat.network import Layer, layer_of
from caveat.task import Task

__all__ = ["held_by", "layer_info", "std_diagnostics"]


def layer_info(task: Task, trained: Trained, run: Run, account: Account, kind: str, more: dict[str, Any]) -> Info:
    """The info of a fit: layers are of this `kind` (Gaussian, point); `more` is added to the diagnostics."""
    network, layout = task.network.to(run.device), trained.layout
    wide = all_weights(network)

    inside = set(layout.parameter_names().values())

    def treatment(layer: Layer) -> str:
        held = held_by(layer, layout, wide)
        if held is None:
            return "point"
        count, size = held
        share = "all weights" if count == size else f"{count:,} of {size:,} weights"
        rest = [name for name in network.names if layer_of(name) == layer.name and name not in inside]
        points = "bias a point" if [name.rpartition(".")[2] for name in rest] == ["bias"] else "the rest points"
        return f"{kind}, {share}; {points}" if rest else f"{kind}, {share}"

    exchanged = more.get("exchanged", more.get("exchanged_channels"))
    if exchanged == 0 and more["exchanging"] and account.density < 1 and run.gradient_evaluations:
        run.warnings.append(
            "nothing was exchanged, so the places are those drawn at random at the start: lower interval (steps), "
            "raise replacement, or train longer; replacement=0 says that this is wanted"
        )
    could_be, others = left_out(network, layout.geometries)
    if could_be:
        run.warnings.append(
            f"{_listed(could_be)} stay without a posterior: units are of layers that are called, nn.Linear, nn.Conv1d "
            "and nn.Conv2d (or what computes as they do; padded alike on both sides with zeros; no hooks; weights of "
            "their own)"
        )
    if others:
        run.warnings.append(
            f"{_listed(others)} stay without a posterior: they are looked up or added (embeddings, tokens, positions), "
            "or multiply number by number"
        )
    diagnostics = training_report(trained.history) | {"density": account.density, "account": account.as_json()} | more
    return run.info(network, treatment, diagnostics)


def held_by(
    layer: Layer, layout: WeightLayout, wide: Mapping[str, LayerGeometry] | None = None
) -> tuple[int, int] | None:
    """How many active weights a layer has, of how many; None where it has none. `wide` has its weights before."""
    wide = layout.geometries if wide is None else wide
    own = [n for n, g in layout.geometries.items() if layer_of(parameter_name(n, g)) == layer.name]
    return (sum(layout.counts[n] for n in own), sum(wide[n].size for n in own)) if own else None


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (" and others" if len(names) > 5 else "")


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
