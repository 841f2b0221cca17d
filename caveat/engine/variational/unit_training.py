"""Training a network whose units have noise, and what is left of it: what group methods share.

A substitute whose layers multiply what they read is trained, the units that are mostly noise are taken out, and the
costs are accounted for. The noise and its score are the method's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from caveat.engine.run import Info, Run
from caveat.engine.sparse import (
    ActiveWeights,
    LayerGeometry,
    Scheme,
    Substitute,
    WeightLayout,
    network_account,
    random_layout,
    sparse_layers,
    substitute_and_means,
    training_account,
)
from caveat.engine.training import Training
from caveat.engine.variational.fit_report import layer_info
from caveat.engine.variational.layer_training import Trained
from caveat.engine.variational.noisy_training import NoisyModel, NoisyTraining, scale_inputs
from caveat.engine.variational.pruning import RemainingUnits, pruned_account, pruned_network, remaining_units
from caveat.engine.variational.unit_noise import UnitNoise
from caveat.engine.variational.units import Units, find_units
from caveat.likelihoods import Hyper
from caveat.network import Network, Params
from caveat.storage import State
from caveat.task import Task

__all__ = ["TrainedUnits", "UnitNetwork", "train_and_prune", "unit_network"]


@dataclass(frozen=True)
class UnitNetwork:
    """A network in which units are multiplied by numbers."""

    network: Network
    layout: WeightLayout  # all weights
    substitute: Substitute
    mean: Tensor  # flat weights, [size]
    units: Units
    multiply: Callable[[Tensor], None]  # sets the numbers, [units] or [rows, units]


def unit_network(task: Task, params: Params, run: Run) -> UnitNetwork:
    """The substitute at the start's weights, with its units."""
    network = task.network.to(run.device)
    layers = _layers_that_are_called(task, params, sparse_layers(network), run)
    units, why = find_units(network, layers, task.example(run.device))
    if why is not None:
        run.warnings.append(f"no channels are taken out, only single inputs of linear layers: {why}")
    layout = random_layout(layers, {name: geometry.size for name, geometry in layers.items()}, run)
    substitute, mean = substitute_and_means(network, params, layout)
    return UnitNetwork(network, layout, substitute, mean, units, scale_inputs(substitute, units))


def _layers_that_are_called(
    task: Task, params: Params, layers: dict[str, LayerGeometry], run: Run
) -> dict[str, LayerGeometry]:
    """The layers without those whose weights a module reads itself: what these multiply is not theirs to scale."""
    network = task.network.to(run.device)
    sizes = {name: geometry.size for name, geometry in layers.items()}
    substitute, mean = substitute_and_means(network, params, random_layout(layers, sizes, run))
    substitute.use(mean)
    read = substitute.read_in_training(task.example(run.device))
    if read == set(layers):
        raise ValueError(
            f"modules read the weights of {', '.join(sorted(read)[:3])} instead of calling these layers, so that their "
            "inputs cannot be given noise: VariationalDropout prunes single weights"
        )
    return {name: geometry for name, geometry in layers.items() if name not in read}


@dataclass(frozen=True)
class TrainedUnits:
    """What a method says of its units when training is over."""

    noise: UnitNoise
    weights: ActiveWeights
    scores: Tensor  # [units]: units with more than the threshold stay
    threshold: float


def train_and_prune(
    task: Task,
    scaled: UnitNetwork,
    model: NoisyModel,
    outcome: Callable[[], TrainedUnits],
    hyper: Hyper,
    run: Run,
    *,
    training: Training,
    noise_learning_rate: float,
    kl_weight: Callable[[float], float],
    kind: str,
) -> tuple[State, Info]:
    """Train, take out the units that are noise, and return state and info; `outcome` is asked when training is over."""
    trainer = NoisyTraining(
        task,
        scaled.substitute,
        model,
        hyper,
        training,
        run,
        noise_learning_rate=noise_learning_rate,
        kl_weight=kl_weight,
    )
    scheme = Scheme(gaussian=kind == "Gaussian", optimizer=training.descent.optimizer)
    before = training_account(task, scaled.layout, run, scheme)
    history = trainer.train(before.total.training_flops)
    with torch.no_grad():
        end = outcome()
        remaining = remaining_units(scaled.units, end.scores, end.threshold, run)

        def without_removed_units() -> None:
            numbers = end.noise.expected()
            scaled.multiply(numbers * remaining.mask.to(numbers.device))
            scaled.substitute.use(end.weights.mean)

        rest, hyper = trainer.finish(without_removed_units)
        pruned = pruned_network(scaled.network, scaled.units, remaining, scaled.layout, end.weights, rest, end.noise)
    trained = Trained(pruned.layout, pruned.weights.mean, pruned.weights.log_std, pruned.rest, hyper, history)
    after = network_account(pruned.network, task.example(run.device), scheme, pruned.layout.counts)
    stored = (*pruned.units.tensors().values(), *pruned.slices.values())
    account = pruned_account(before, after, pruned.columns, sum(t.numel() * t.element_size() for t in stored))
    diagnostics: dict[str, Any] = {"sparsity": 1 - account.density} | _counts_of_units(scaled.units, remaining)
    return pruned.state(trained).tensors(), layer_info(task, trained, run, account, kind, diagnostics)


def _counts_of_units(units: Units, remaining: RemainingUnits) -> dict[str, Any]:
    """Diagnostics: how many units are left of each kind, and which channels stay whole."""
    counts = [int(part.sum()) for part in remaining.mask.split([*units.names.values()])]
    words = {name: f"{n} of {width}" for (name, width), n in zip(units.names.items(), counts, strict=True)}
    return {"units": words, "whole": {} if units.channels is None else units.channels.whole}
