"""Posteriors over the active weights of layers: how they begin, and draws and predictions from what they kept.

The state's group "active" has flat tensors: mean, log_std (none for points), int32 indices of the layers that are not
dense, and the counts of all linear and convolutional layers, 0 for those that are points; these and biases, norm layers
and buffers are in "rest". A linear layer that has lost whole inputs has, in place of indices, "columns/<layer>": those
that it still reads. A group "noise" has numbers that multiply whole units (`engine.groups`).
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from caveat.batches import Inputs, move, slices
from caveat.engine.channels import sliced_network, widened
from caveat.engine.replicas import Replicas
from caveat.engine.run import Info, Run
from caveat.engine.sparse import (
    Account,
    Cost,
    LayerCost,
    LayerGeometry,
    Scheme,
    Substitute,
    WeightLayout,
    column_indices,
    left_out,
    network_account,
    plain_layers,
    weight_name,
)
from caveat.engine.variational.layer_training import Trained
from caveat.engine.variational.units import drawn, expected, factors_of, kept_of, scaled
from caveat.engine.weight_draws import PIECE_ROWS
from caveat.likelihoods import Hyper
from caveat.network import Layer, Network, Params
from caveat.randomness import normals
from caveat.storage import State
from caveat.task import Task

__all__ = [
    "LayerPrediction",
    "LayerPredictor",
    "channel_account",
    "layer_info",
    "layout_of",
    "network_at",
    "random_layout",
    "substitute_and_means",
    "training_account",
    "warn_if_frozen",
]

LayerPrediction = Literal["draws", "local"]  # one set of weights for all rows, or outputs drawn row by row


def random_layout(geometries: dict[str, LayerGeometry], counts: dict[str, int], run: Run) -> WeightLayout:
    """Places chosen at random."""
    chosen = [
        torch.randperm(geometry.size, generator=run.rng)[: counts[name]].sort().values.int()
        for name, geometry in geometries.items()
        if counts[name] < geometry.size
    ]
    indices = torch.cat(chosen) if chosen else torch.zeros(0, dtype=torch.int32)
    return WeightLayout(geometries, counts, indices.to(run.device))


def substitute_and_means(network: Network, start: State, layout: WeightLayout) -> tuple[Substitute, Tensor]:
    """A network with sparse layers, and its first means: the start's, wider where fewer inputs are added up.

    The start's weights are let go: whole ones, which whoever called would hold while few are trained.
    """
    means = layout.gathered({name: start["params"][weight_name(name)] for name in layout.counts})
    for name, part in layout.split(means):
        part *= math.sqrt(layout.geometries[name].size / layout.counts[name])
    substitute = Substitute(network, layout, start["params"])
    start["params"].clear()
    return substitute, means


def warn_if_frozen(log_std: Tensor, initial_std: float, rate: float, run: Run) -> dict[str, Any]:
    """How far standard deviations came from where they began, by their logarithm; a warning where that is nowhere."""
    moved = float((log_std.detach() - math.log(initial_std)).abs().median())
    if moved < 0.1 and run.gradient_evaluations:
        run.warnings.append(
            f"the standard deviations hardly moved (median change of their logarithm {moved:.3f}): raise "
            f"std_learning_rate (now {rate:g}) or train longer"
        )
    return {"median_std_change": moved, "median_std": float(log_std.detach().median().exp())}


def layer_info(task: Task, trained: Trained, run: Run, made: Account, what: str, extra: dict[str, Any]) -> Info:
    """What there is to say of a fit."""
    network, layout = task.network.to(run.device), trained.layout
    wide = plain_layers(network)

    def treatment(layer: Layer) -> str:
        if layer.name not in layout.counts:
            return "point"
        count, size = layout.counts[layer.name], wide[layer.name].size
        share = "all weights" if count == size else f"{count:,} of {size:,} weights"
        bias = f"{layer.name}.bias".removeprefix(".")
        return f"{what}, {share}; bias a point" if bias in network.names else f"{what}, {share}"

    exchanged = extra.get("exchanged", extra.get("exchanged_channels"))
    if exchanged == 0 and extra["exchanging"] and made.density < 1 and run.gradient_evaluations:
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
    diagnostics = {"history": trained.history, "density": made.density, "account": made.as_json()} | extra
    return run.info(network, treatment, diagnostics)


def training_account(task: Task, layout: WeightLayout, run: Run, scheme: Scheme) -> Account:
    """FLOPs and bytes of training and using these layers."""
    example, _ = next(task.train.batches([torch.arange(min(task.n, 2))], run.device))
    return network_account(task.network.to(run.device), example, active=layout.counts, scheme=scheme)


def own_network(state: State, network: Network) -> Network:
    """The network that a state's weights are of: the one given, or a narrower one."""
    return sliced_network(network, state["slices"]) if "slices" in state else network


def channel_account(task: Task, narrow: Network, run: Run, scheme: Scheme, interval: int) -> Account:
    """The same of a narrow network, whose updates take a pass of the wide one."""
    example, _ = next(task.train.batches([torch.arange(min(task.n, 2))], run.device))
    few, many = (network_account(own, example, scheme) for own in (narrow, task.network.to(run.device)))
    update = sum(row.cost.inference_flops for row in many.rows)
    rows = [replace(row, cost=now.cost, active=now.weights) for row, now in zip(many.rows, few.rows, strict=True)]
    rows.append(LayerCost("exchange of channels", 0, 0, Cost(training_flops=3 * update / interval), Cost()))
    # An exchange has the wide weights and their gradients for a moment.
    update_bytes = 2 * sum(row.weights for row in many.rows) * narrow.dtype.itemsize
    return replace(few, rows=tuple(rows), update_bytes=update_bytes)


def layout_of(state: State, network: Network) -> WeightLayout:
    """Where a state's weights are in its own network."""
    layers = plain_layers(network)
    active = state["active"]
    counts = {name: n for name, n in zip(layers, active["counts"].tolist(), strict=True) if n}
    geometries = {name: layers[name] for name in counts}
    sparse = [name for name, n in counts.items() if n < geometries[name].size]
    single = iter(active["indices"].split([counts[name] for name in sparse if f"columns/{name}" not in active]))
    parts = [
        column_indices(geometries[name], active[f"columns/{name}"]) if f"columns/{name}" in active else next(single)
        for name in sparse
    ]
    return WeightLayout(geometries, counts, torch.cat(parts) if parts else active["indices"])


def _values(state: State, layout: WeightLayout, rng: torch.Generator | None) -> Tensor:
    """Flat weights: a draw, or without a generator the means; of points the points, but for noise of whole units."""
    values, log_std = state["active"]["mean"], state["active"].get("log_std")
    if log_std is not None and rng is not None:
        noise = normals(values.shape, rng, values)
        values = torch.addcmul(values, log_std.exp(), noise)
    if "noise" not in state:
        return values
    units = expected(state["noise"]) if rng is None else drawn(state["noise"], rng)
    return scaled(values, layout, factors_of(units, kept_of(state["noise"])))


class LayerPredictor:
    """Predicts from active weights, through replicas of a network with sparse layers.

    Args:
        state: what the posterior keeps.
        network: the network that it is of.
        local: draw outputs row by row (local reparameterisation) instead of one set of weights for all rows.
    """

    def __init__(self, state: State, network: Network, local: bool = False) -> None:
        self._state, self._network = state, network
        self._local = local and "log_std" in state["active"]
        self._substitutes = Replicas(self._substitute)

    def draws(self, n: int, rng: torch.Generator) -> Iterator[Params]:
        """Whole weights, zero where there are none."""
        state = self._state
        layout = layout_of(state, own_network(state, self._network))
        for _ in range(n):
            params = state["rest"] | layout.whole(_values(state, layout, rng))
            yield widened(params, self._network, state["slices"]) if "slices" in state else params

    def outputs(self, x: Inputs, n: int, rng: torch.Generator) -> tuple[Tensor, Hyper]:
        """Outputs of n passes through sparse layers, [S, B, ...]."""
        state, device, outputs = self._state, self._network.device, []
        with torch.no_grad(), self._substitutes.lent() as substitute:
            if self._local:
                seed = int(torch.randint(2**62, (), generator=rng))
                substitute.draw_noise(partial(_normals_like, torch.Generator(device).manual_seed(seed)))
            for _ in range(n):
                if self._local:
                    substitute.use(state["active"]["mean"], (2 * state["active"]["log_std"]).exp())
                else:
                    substitute.use(_values(state, substitute.layout, rng))
                pieces = (move(piece, device) for piece in slices(x, PIECE_ROWS))
                outputs.append(torch.cat([substitute.network.evaluation_pass(piece) for piece in pieces]))
        return torch.stack(outputs), state["hyper"]

    def moments(self, x: Inputs, joint: bool = False) -> None:
        """None: there is no closed form."""
        return None

    def _substitute(self) -> Substitute:
        network = own_network(self._state, self._network)
        return Substitute(network, layout_of(self._state, network), self._state["rest"])


def _normals_like(rng: torch.Generator, like: Tensor) -> Tensor:
    return torch.randn(like.shape, generator=rng, dtype=like.dtype, device=like.device)


def network_at(state: State, network: Network, rng: torch.Generator | None) -> nn.Module:
    """A module with the weights of a draw, or at their means."""
    own = own_network(state, network)
    layout = layout_of(state, own)
    values = _values(state, layout, rng)
    sparse = WeightLayout(
        {name: geometry for name, geometry in layout.geometries.items() if not layout.is_dense(name)},
        {name: count for name, count in layout.counts.items() if not layout.is_dense(name)},
        layout.indices,
    )
    parts = dict(layout.split(values))
    whole = {weight_name(n): parts[n].view(g.shape) for n, g in layout.geometries.items() if n not in sparse.counts}
    if not sparse.counts:
        return own.with_fixed(state["rest"] | whole).module
    substitute = Substitute(own, sparse, state["rest"] | whole)
    substitute.use(torch.cat([parts[name] for name in sparse.counts]))
    for layer in substitute.layers.values():
        layer.settle()
    return substitute.network.module
