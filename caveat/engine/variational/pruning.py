"""What is left of a network when training is over: weights one by one, or a narrower network of whole units.

Nothing that goes is stored: weights that stay have values and int32 indices, channels that go make layers smaller, and
a linear layer that lost single inputs has a list of those that it still reads. No layer is emptied: where a threshold
would, its best weight or unit stays, and a warning says so.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from caveat.engine.channels import KeptChannels, gather, kept_entries, narrow_network, narrow_params, stored_slices
from caveat.engine.run import Run
from caveat.engine.sparse import Account, Cost, LayerCost, WeightLayout, plain_layers, weight_name
from caveat.engine.variational.layer_training import Trained
from caveat.engine.variational.units import Units
from caveat.network import Network, Params
from caveat.storage import State

__all__ = ["Narrowed", "narrowed", "pruned_account", "remaining_units", "remaining_weights", "smaller_layout"]


def remaining_weights(layout: WeightLayout, scores: Tensor, threshold: float, run: Run) -> Tensor:
    """Which flat weights stay: those of a score above the threshold, and each layer's best."""
    keep, emptied = scores > threshold, []
    for (name, part), (_, own) in zip(layout.split(keep), layout.split(scores), strict=True):
        if not part.any():
            part[own.argmax()] = True  # a view: `keep` itself
            emptied.append(name or "the module")
    _warn(emptied, "weight", run)
    return keep


def smaller_layout(layout: WeightLayout, keep: Tensor) -> WeightLayout:
    """Of a layout with all weights, the one with those that stay."""
    chosen = {name: part.nonzero()[:, 0] for name, part in layout.split(keep)}
    counts = {name: len(own) for name, own in chosen.items()}
    sparse = [own for name, own in chosen.items() if counts[name] < layout.geometries[name].size]
    indices = torch.cat(sparse) if sparse else keep.new_zeros(0, dtype=torch.int64)
    return WeightLayout(layout.geometries, counts, indices.int())


@dataclass(frozen=True)
class RemainingUnits:
    """Groups that stay."""

    keep: Tensor  # [size], bool
    kept: KeptChannels  # channels of each space
    columns: dict[str, Tensor]  # for layers with inputs of their own, which of all inputs stay, bool


def remaining_units(groups: Units, scores: Tensor, threshold: float, run: Run) -> RemainingUnits:
    """Groups of a score above the threshold, and the best of each space and layer.

    A channel whose every reader has lost its inputs from it goes, too.
    """
    keep, scores, emptied = (scores > threshold).cpu(), scores.cpu(), []
    widths = () if groups.channels is None else groups.channels.widths
    kept: KeptChannels = {space: torch.arange(width) for space, width in enumerate(widths)}
    for name, (space, first) in zip(groups.names, groups.spaces.items(), strict=False):  # spaces are named first
        if _keep_best(keep, scores, torch.arange(first, first + widths[space])):
            emptied.append(f"the channels of {name}")
    columns = {}
    for name, first in groups.inputs.items():
        of = groups.of[name]
        mine = torch.arange(first, first + len(of))
        reachable = torch.cat([keep, torch.ones(1, dtype=torch.bool)])[of[:, :-1]].all(1)  # by their channels
        if _keep_best(keep, scores, mine[reachable]):
            emptied.append(f"the inputs of {name or 'the module'}")
        columns[name] = keep[mine] & reachable
        keep[mine[~reachable]] = False
    for space, first in groups.spaces.items():
        mine = torch.arange(first, first + widths[space])
        read = torch.zeros(len(keep) + 1, dtype=torch.bool)
        for name, of in groups.of.items():
            own = of if name not in columns else of[columns[name]]
            read[own.flatten()] = True
        keep[mine] &= read[mine]
        kept[space] = keep[mine].nonzero()[:, 0]
    _warn(emptied, "unit", run)
    return RemainingUnits(keep, kept, columns)


def _keep_best(keep: Tensor, scores: Tensor, own: Tensor) -> bool:
    """Whether one had to be kept that was to go."""
    if keep[own].any():
        return False
    keep[own[scores[own].argmax()]] = True
    return True


def _warn(emptied: list[str], what: str, run: Run) -> None:
    if emptied:
        run.warnings.append(
            f"the threshold would have emptied {', '.join(emptied[:5])}{' and others' if len(emptied) > 5 else ''}: "
            f"the best {what} was kept; prune less (another threshold, a lower kl_weight), or train longer"
        )


@dataclass(frozen=True)
class Narrowed:
    """A network with the units that stay, and what a state has of it."""

    network: Network
    layout: WeightLayout
    values: dict[str, Tensor]  # flat tensors of the narrow layout, by the names of those given
    rest: Params
    slices: Params  # empty where no channel went
    columns: Params  # int32: for linear layers that lost single inputs, those that stay
    noise: Params  # of the groups that stay, with the groups of each layer's inputs

    def state(self, trained: Trained) -> State:
        """As a posterior keeps it."""
        found = trained.state(self.network) | {"noise": self.noise} | ({"slices": self.slices} if self.slices else {})
        places = {"indices": self.layout.indices[:0]} | {f"columns/{name}": own for name, own in self.columns.items()}
        found["active"] |= places
        return found


def narrowed(
    network: Network,
    groups: Units,
    chosen: RemainingUnits,
    wide: WeightLayout,
    values: dict[str, Tensor],
    rest: Params,
    noise: Params,
) -> Narrowed:
    """Take out what goes.

    Args:
        network: the wide one
        groups: all of them
        chosen: those that stay
        wide: all weights of the layers
        values: flat tensors of the wide layout: `mean`, and `log_std` where there is one
        rest: parameters and buffers beside those weights
        noise: parameters [size] of the groups' noise
    """
    own, index, kept_slices = network, {}, {}
    if groups.channels is not None:
        own = narrow_network(network, groups.channels, chosen.kept)
        index = kept_entries(groups.channels, chosen.kept)
        like = dict(network.module.named_parameters()) | dict(network.module.named_buffers())
        kept_slices = {
            key: places
            for key, places in stored_slices(groups.channels, chosen.kept).items()
            if len(places) < like[key.rpartition("/")[0]].shape[int(key.rpartition("/")[2])]
        }
        rest = narrow_params(rest, groups.channels, chosen.kept)
    layers = plain_layers(own)
    geometries = {name: layers[name] for name in wide.counts}
    full = WeightLayout(geometries, {n: g.size for n, g in geometries.items()}, wide.indices)
    thin, keep = {}, torch.ones(full.size, dtype=torch.bool, device=values["mean"].device)
    columns: Params = {}
    for key, flat in values.items():
        whole = {n: part.view(wide.geometries[n].shape) for n, part in wide.split(flat)}
        parts = [gather(v, index[weight_name(n)]) if weight_name(n) in index else v for n, v in whole.items()]
        thin[key] = torch.cat([part.flatten() for part in parts])
    number = torch.full((groups.size + 1,), int(chosen.keep.sum()))
    number[:-1][chosen.keep] = torch.arange(int(chosen.keep.sum()))
    found = {key: value.detach()[chosen.keep.to(value.device)] for key, value in noise.items()}
    for name, of in groups.of.items():
        own_index = index.get(weight_name(name), ())
        inputs = own_index[1] if len(own_index) > 1 and own_index[1] is not None else torch.arange(len(of))
        found[f"of/{name}"] = number[of[inputs]].int().to(values["mean"].device)
        if name in chosen.columns and not bool((stay := chosen.columns[name][inputs].to(keep.device)).all()):
            columns[name] = stay.nonzero()[:, 0].int()
            dict(full.split(keep))[name].view(geometries[name].shape)[:, ~stay] = False
    few = {key: flat[keep] for key, flat in thin.items()}
    return Narrowed(own, smaller_layout(full, keep), few, rest, kept_slices, columns, found)


def pruned_account(before: Account, after: Account, columns: Params | None = None, extra_bytes: int = 0) -> Account:
    """Training cost what it did with all weights; what is stored and used is what stayed.

    `columns` are those of layers that are stored without an index for each weight.
    """
    rows, columns = [], columns or {}
    for was, now in zip(before.rows, after.rows, strict=True):
        cost = replace(now.cost, training_flops=was.cost.training_flops, training_bytes=was.cost.training_bytes)
        if was.name in columns:
            own = columns[was.name]
            cost += Cost(stored_bytes=own.element_size() * (len(own) - now.active))
        rows.append(LayerCost(was.name, was.weights, now.active, cost, was.dense))
    if extra_bytes:
        rows.append(LayerCost("noise of the units", 0, 0, Cost(stored_bytes=extra_bytes), Cost()))
    return Account(tuple(rows))
