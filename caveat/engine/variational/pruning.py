"""What is left of a network when training is over: weights one by one, or a narrower network of whole units.

Nothing that goes is stored: weights that stay have values and int32 indices, channels that go make layers smaller, and
a linear layer that lost single inputs has a list of those that it still reads. No layer is emptied: where a threshold
would, its best weight or unit stays, and a warning says so.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from caveat.engine.channels import (
    Index,
    KeptChannels,
    gather,
    kept_entries,
    narrow_network,
    narrow_params,
    stored_slices,
)
from caveat.engine.run import Run
from caveat.engine.sparse import Account, ActiveWeights, Cost, LayerCost, WeightLayout, plain_layers, weight_name
from caveat.engine.variational.layer_posterior import LayerState
from caveat.engine.variational.layer_training import Trained
from caveat.engine.variational.unit_noise import UnitFactors, UnitNoise
from caveat.engine.variational.units import Units
from caveat.network import Network, Params

__all__ = [
    "PrunedNetwork",
    "RemainingUnits",
    "pruned_account",
    "pruned_network",
    "remaining_units",
    "remaining_weights",
    "smaller_layout",
]


def remaining_weights(layout: WeightLayout, scores: Tensor, threshold: float, run: Run) -> Tensor:
    """Which flat weights stay, a mask [size]: those of a score above the threshold, and each layer's best."""
    stay, emptied = scores > threshold, []
    for (name, part), (_, layer_scores) in zip(layout.split(stay), layout.split(scores), strict=True):
        if not part.any():
            part[layer_scores.argmax()] = True  # a view: `stay` itself
            emptied.append(name or "the module")
    _warn_of_emptied(emptied, "weight", run)
    return stay


def smaller_layout(layout: WeightLayout, stay: Tensor) -> WeightLayout:
    """The layout of the weights that stay, a mask [size], of a layout with all weights."""
    places = {name: part.nonzero()[:, 0] for name, part in layout.split(stay)}
    counts = {name: len(chosen) for name, chosen in places.items()}
    sparse = [chosen for name, chosen in places.items() if counts[name] < layout.geometries[name].size]
    indices = torch.cat(sparse) if sparse else stay.new_zeros(0, dtype=torch.int64)
    return WeightLayout(layout.geometries, counts, indices.int())


@dataclass(frozen=True)
class RemainingUnits:
    """The units that stay."""

    mask: Tensor  # [units], bool
    channels: KeptChannels  # of each space
    columns: dict[str, Tensor]  # for layers whose inputs are units: which of all inputs stay, [inputs], bool


def remaining_units(units: Units, scores: Tensor, threshold: float, run: Run) -> RemainingUnits:
    """Units of a score [units] above the threshold, and the best of each space and layer.

    A channel whose every reader has lost its inputs from it goes, too.
    """
    mask, scores, emptied = (scores > threshold).cpu(), scores.cpu(), []
    widths = () if units.channels is None else units.channels.widths
    channels: KeptChannels = {space: torch.arange(width) for space, width in enumerate(widths)}
    for name, (space, first) in zip(units.names, units.spaces.items(), strict=False):  # spaces are named first
        if _keep_best(mask, scores, torch.arange(first, first + widths[space])):
            emptied.append(f"the channels of {name}")
    columns = {}
    for name, first in units.inputs.items():
        of_inputs = units.of_inputs[name]
        inputs = torch.arange(first, first + len(of_inputs))
        reachable = torch.cat([mask, torch.ones(1, dtype=torch.bool)])[of_inputs[:, :-1]].all(1)  # by their channels
        if _keep_best(mask, scores, inputs[reachable]):
            emptied.append(f"the inputs of {name or 'the module'}")
        columns[name] = mask[inputs] & reachable
        mask[inputs[~reachable]] = False
    for space, first in units.spaces.items():
        members = torch.arange(first, first + widths[space])
        read = torch.zeros(len(mask) + 1, dtype=torch.bool)
        for name, of_inputs in units.of_inputs.items():
            read[(of_inputs if name not in columns else of_inputs[columns[name]]).flatten()] = True
        mask[members] &= read[members]
        channels[space] = mask[members].nonzero()[:, 0]
    _warn_of_emptied(emptied, "unit", run)
    return RemainingUnits(mask, channels, columns)


def _keep_best(mask: Tensor, scores: Tensor, members: Tensor) -> bool:
    """Where no member stays, let the one of the highest score stay; returns whether that was so."""
    if mask[members].any():
        return False
    mask[members[scores[members].argmax()]] = True
    return True


def _warn_of_emptied(emptied: list[str], what: str, run: Run) -> None:
    if emptied:
        run.warnings.append(
            f"the threshold would have emptied {', '.join(emptied[:5])}{' and others' if len(emptied) > 5 else ''}: "
            f"the best {what} was kept; prune less (another threshold, a lower kl_weight), or train longer"
        )


@dataclass(frozen=True)
class PrunedNetwork:
    """A network with the units that stay, and what a state has of it."""

    network: Network
    layout: WeightLayout
    weights: ActiveWeights  # of the layout
    rest: Params
    slices: Params  # empty where no channel went
    columns: Params  # int32: for linear layers that lost single inputs, those that stay
    units: UnitFactors  # of the units that stay

    def state(self, trained: Trained) -> LayerState:
        """What a posterior keeps: columns in place of indices."""
        return replace(
            trained.state(self.network, self.slices),
            indices=self.layout.indices[:0],
            columns=self.columns,
            units=self.units,
        )


def pruned_network(
    network: Network,
    units: Units,
    remaining: RemainingUnits,
    layout: WeightLayout,
    weights: ActiveWeights,
    rest: Params,
    noise: UnitNoise,
) -> PrunedNetwork:
    """Take out the units that go.

    Args:
        network: the wide one
        units: all of them
        remaining: those that stay
        layout: of all weights of the wide network's layers
        weights: of that layout
        rest: parameters and buffers beside those weights
        noise: of all units
    """
    narrow, entries, slices = network, {}, {}
    if units.channels is not None:
        narrow = narrow_network(network, units.channels, remaining.channels)
        entries = kept_entries(units.channels, remaining.channels)
        slices = _slices_of_smaller_tensors(network, stored_slices(units.channels, remaining.channels))
        rest = narrow_params(rest, units.channels, remaining.channels)
    layers = plain_layers(narrow)
    geometries = {name: layers[name] for name in layout.counts}
    full = WeightLayout(geometries, {n: g.size for n, g in geometries.items()}, layout.indices)
    stay, columns = torch.ones(full.size, dtype=torch.bool, device=weights.mean.device), {}
    number = torch.full((units.size + 1,), int(remaining.mask.sum()))  # of each unit among those that stay
    number[:-1][remaining.mask] = torch.arange(int(remaining.mask.sum()))
    of_inputs: Params = {}
    for name, all_units in units.of_inputs.items():
        index = entries.get(weight_name(name), ())
        inputs = index[1] if len(index) > 1 and index[1] is not None else torch.arange(len(all_units))
        of_inputs[name] = number[all_units[inputs]].int().to(weights.mean.device)
        if name in remaining.columns and not bool((reads := remaining.columns[name][inputs].to(stay.device)).all()):
            columns[name] = reads.nonzero()[:, 0].int()
            dict(full.split(stay))[name].view(geometries[name].shape)[:, ~reads] = False
    few = ActiveWeights(
        _narrowed(weights.mean, layout, entries)[stay],
        None if weights.log_std is None else _narrowed(weights.log_std, layout, entries)[stay],
    )
    factors = UnitFactors(noise.of_units(remaining.mask), of_inputs)
    return PrunedNetwork(narrow, smaller_layout(full, stay), few, rest, slices, columns, factors)


def _slices_of_smaller_tensors(network: Network, slices: Params) -> Params:
    """Stored slices without those that keep every entry of their axis."""
    wide = dict(network.module.named_parameters()) | dict(network.module.named_buffers())

    def length(key: str) -> int:
        name, _, axis = key.rpartition("/")
        return wide[name].shape[int(axis)]

    return {key: chosen for key, chosen in slices.items() if len(chosen) < length(key)}


def _narrowed(flat: Tensor, layout: WeightLayout, entries: dict[str, Index]) -> Tensor:
    """Flat values of a layout with all weights, for the narrow network's layers, flat."""
    whole = {name: part.view(layout.geometries[name].shape) for name, part in layout.split(flat)}
    parts = [gather(v, entries[weight_name(n)]) if weight_name(n) in entries else v for n, v in whole.items()]
    return torch.cat([part.flatten() for part in parts])


def pruned_account(before: Account, after: Account, columns: Params | None = None, extra_bytes: int = 0) -> Account:
    """The costs of a pruned network: training was that of all weights, storage and use are those of what stayed.

    Args:
        before: with all weights.
        after: with those that stayed.
        columns: of layers that are stored without an index for each weight.
        extra_bytes: stored for the noise of units.
    """
    rows, columns = [], columns or {}
    for was, now in zip(before.rows, after.rows, strict=True):
        cost = replace(now.cost, training_flops=was.cost.training_flops, training_bytes=was.cost.training_bytes)
        if was.name in columns:
            reads = columns[was.name]
            cost += Cost(stored_bytes=reads.element_size() * (len(reads) - now.active))
        rows.append(LayerCost(was.name, was.weights, now.active, cost, was.dense))
    if extra_bytes:
        rows.append(LayerCost("noise of the units", 0, 0, Cost(stored_bytes=extra_bytes), Cost()))
    return Account(tuple(rows))
