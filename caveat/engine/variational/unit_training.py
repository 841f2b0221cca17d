"""Training a network whose units have noise, and what is left of it: what group methods share.

Readies a substitute whose layers multiply what they read, trains it, takes out the units that are noise, and says what
it cost. The noise and its score are the method's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from caveat.engine.run import Info, Run
from caveat.engine.sparse import Scheme, Substitute, WeightLayout, network_account, sparse_layers
from caveat.engine.training import Training
from caveat.engine.variational.layer_posterior import layer_info, random_layout, substitute_and_means, training_account
from caveat.engine.variational.layer_training import Trained
from caveat.engine.variational.noisy_training import NoisyModel, NoisyTraining, scale_inputs
from caveat.engine.variational.pruning import RemainingUnits, narrowed, pruned_account, remaining_units
from caveat.engine.variational.units import Units, expected, find_units
from caveat.network import Network, Params
from caveat.storage import State
from caveat.task import Task

__all__ = ["Outcome", "UnitNetwork", "train_and_prune", "unit_network"]


@dataclass(frozen=True)
class UnitNetwork:
    """A network in which units are multiplied by numbers."""

    network: Network
    layout: WeightLayout  # all weights
    substitute: Substitute
    mean: Tensor  # flat weights
    groups: Units
    multiply: Callable[[Tensor], None]  # sets the numbers, [size] or [rows, size]


def unit_network(task: Task, start: State, run: Run) -> UnitNetwork:
    """The substitute at the start's weights."""
    network = task.network.to(run.device)
    layers = sparse_layers(network)
    example, _ = next(task.train.batches([torch.arange(min(task.n, 2))], run.device))
    groups, why = find_units(network, layers, example)
    if why is not None:
        run.warnings.append(f"no channels are taken out, only single inputs of linear layers: {why}")
    layout = random_layout(layers, {name: geometry.size for name, geometry in layers.items()}, run)
    substitute, mean = substitute_and_means(network, start, layout)
    return UnitNetwork(network, layout, substitute, mean, groups, scale_inputs(substitute, groups))


@dataclass(frozen=True)
class Outcome:
    """What a method needs to say of its units."""

    noise: Params  # parameters [size] of the units' noise, as a state has them
    values: Params  # flat tensors of the weights: `mean`, and `log_std` where there is one
    scores: Tensor  # [size]: units with more than the threshold stay
    threshold: float


def train_and_prune(
    task: Task,
    units: UnitNetwork,
    noise: NoisyModel,
    outcome: Callable[[], Outcome],
    start: State,
    run: Run,
    *,
    training: Training,
    noise_learning_rate: float,
    kl_weight: Callable[[float], float],
    what: str,
) -> tuple[State, Info]:
    """The state and what there is to say; `outcome` is asked when training is over."""
    trainer = NoisyTraining(
        task,
        units.substitute,
        noise,
        start["hyper"],
        training,
        run,
        noise_learning_rate=noise_learning_rate,
        kl_weight=kl_weight,
    )
    scheme = Scheme(gaussian=what == "Gaussian", optimizer=training.optimizer)
    before = training_account(task, units.layout, run, scheme)
    history = trainer.train(before.total.training_flops)
    with torch.no_grad():
        end = outcome()
        chosen = remaining_units(units.groups, end.scores, end.threshold, run)

        def pruned() -> None:
            numbers = expected(end.noise)
            units.multiply(numbers * chosen.keep.to(numbers.device))
            units.substitute.use(end.values["mean"])

        rest, hyper = trainer.finish(pruned)
        thin = narrowed(units.network, units.groups, chosen, units.layout, end.values, rest, end.noise)
    trained = Trained(thin.layout, thin.values["mean"], thin.values.get("log_std"), thin.rest, hyper, history)
    example, _ = next(task.train.batches([torch.arange(min(task.n, 2))], run.device))
    after = network_account(thin.network, example, scheme, active=thin.layout.counts)
    bytes_of_noise = sum(t.numel() * t.element_size() for t in (*thin.noise.values(), *thin.slices.values()))
    made = pruned_account(before, after, thin.columns, bytes_of_noise)
    found: dict[str, Any] = {"sparsity": 1 - made.density} | _units(units.groups, chosen)
    state = thin.state(trained)
    return state, layer_info(task, trained, run, made, what, found)


def _units(groups: Units, chosen: RemainingUnits) -> dict[str, Any]:
    """How many are left of each kind, in the order of the groups, and which channels stay whole."""
    counts = [int(part.sum()) for part in chosen.keep.split([*groups.names.values()])]
    words = {name: f"{n} of {width}" for (name, width), n in zip(groups.names.items(), counts, strict=True)}
    return {"units": words, "whole": {} if groups.channels is None else groups.channels.whole}
