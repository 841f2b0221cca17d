"""What a network of few weights costs: floating-point operations, parameters and bytes, layer by layer.

A linear or convolutional layer with n of its N weights active does F = 2 n P operations at P output positions of an
example. A training step of point weights has three such products; one of a factorised Gaussian has six, since local
reparameterisation passes means and variances:

    forward F + gradient to the inputs F (none where no input needs one) + gradient to the weights F; twice if Gaussian
    and every `interval` steps the gradient to the whole weight, 2 N P in place of one F, averaged over all steps

Products with zero padding count, as in torch's own counter. Normalisation, activations, biases and noise do not: they
are small, and no smaller with few weights. Layers of other kinds are what that counter finds beyond these, three
times over in training, those whose weights are drawn among them; these have parameters and bytes of their own.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from caveat.batches import Inputs, count_rows
from caveat.engine.cost import FlopCounter, words
from caveat.engine.run import Run
from caveat.engine.sparse.kernels import LayerGeometry
from caveat.engine.sparse.weight_layout import WeightLayout
from caveat.network import Network
from caveat.task import Task

__all__ = [
    "Account",
    "Cost",
    "FlopsByCounts",
    "LayerCost",
    "Scheme",
    "channel_account",
    "flops_by_counts",
    "network_account",
    "training_account",
]

FlopsByCounts = Callable[[Mapping[str, int]], float]  # operations of an example, by the number of each layer's weights
Optimizer = Literal["sgd", "adam", "adamw"]
_MOMENTS: dict[Optimizer, int] = {"sgd": 1, "adam": 2, "adamw": 2}  # tensors kept for a parameter; sgd has momentum
_INDEX_BYTES = 4  # int32
_REST = "everything else"  # normalisation, buffers, layers of other kinds


@dataclass(frozen=True)
class Cost:
    """The cost of a layer or a network."""

    inference_flops: float = 0.0  # an example, with the mean weights or one draw of them
    training_flops: float = 0.0  # an example of a training step, update steps averaged in
    parameters: int = 0  # trained numbers: a Gaussian weight has two
    stored_bytes: int = 0  # parameters, indices of active weights, buffers
    training_bytes: int = 0  # the same with gradients and the optimiser's moments; without activations

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True)
class LayerCost:
    """A layer with its active weights, and as it would be with all."""

    name: str
    weights: int
    active: int
    cost: Cost
    dense: Cost


@dataclass(frozen=True)
class Account:
    """What a network costs, beside what it would with all weights."""

    rows: tuple[LayerCost, ...]
    # On update steps beside `training_bytes`: the largest layer's gradient; of channels, all weights and theirs.
    update_bytes: int = 0

    @property
    def total(self) -> Cost:
        """The cost of all layers together."""
        return sum((row.cost for row in self.rows), Cost())

    @property
    def dense(self) -> Cost:
        """The cost of all layers if they had all weights."""
        return sum((row.dense for row in self.rows), Cost())

    @property
    def density(self) -> float:
        """Active weights over weights, of all linear and convolutional layers."""
        return sum(row.active for row in self.rows) / max(sum(row.weights for row in self.rows), 1)

    @property
    def ratio(self) -> dict[str, float]:
        """Total over dense, for each kind of cost."""
        total, dense = asdict(self.total), asdict(self.dense)
        return {kind: total[kind] / dense[kind] if dense[kind] else 1.0 for kind in total}

    def as_json(self) -> dict[str, Any]:
        """Plain numbers, for a fit's diagnostics."""
        layers = [
            {"layer": row.name, "weights": row.weights, "active": row.active} | asdict(row.cost) for row in self.rows
        ]
        return {
            "density": self.density, "total": asdict(self.total), "dense": asdict(self.dense), "ratio": self.ratio,
            "update_bytes": self.update_bytes, "layers": layers,
        }  # fmt: skip

    def __str__(self) -> str:
        weights, active = sum(row.weights for row in self.rows), sum(row.active for row in self.rows)
        share = self.ratio
        lines = [
            ("", "weights", "active", "density", "MFLOP", "MFLOP", "bytes", "bytes"),
            ("layer", "", "", "", "inference", "training", "stored", "training"),
            *(_line(row.name, row.weights, row.active, row.cost) for row in self.rows),
            _line("total", weights, active, self.total),
            _line("with all weights", weights, weights, self.dense),
            ("ratio", "", "", "", *(
                f"{share[kind]:.4f}" for kind in ("inference_flops", "training_flops", "stored_bytes", "training_bytes")
            )),
        ]  # fmt: skip
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in lines
        )


@dataclass(frozen=True)
class Scheme:
    """How the weights are trained."""

    gaussian: bool = True  # a mean and a log standard deviation for each weight of a layer; otherwise points
    interval: int | None = None  # steps between searches for new weights; None never searches
    optimizer: Optimizer = "sgd"  # of means, points, biases and other parameters
    scale_optimizer: Optimizer = "adam"  # of logarithms of standard deviations

    def __post_init__(self) -> None:
        if self.interval is not None and self.interval < 1:
            raise ValueError(f"interval={self.interval} must be at least 1 step, or None where no weights are sought")

    def point(self, numbers: int, number_bytes: int, trained: bool) -> Cost:
        """The cost of numbers with one value each: biases, normalisation, buffers."""
        copies = 2 + _MOMENTS[self.optimizer] if trained else 1  # value, gradient, moments
        size = numbers * number_bytes
        return Cost(parameters=numbers if trained else 0, stored_bytes=size, training_bytes=copies * size)

    def weights(self, layer: "_Layer", n: int) -> Cost:
        """The cost of a layer's weights, n of them active."""
        sparse, products = n < layer.size, 2 if self.gaussian and layer.trained else 1
        once = 2.0 * n * layer.positions
        training = products * (once * (2 if layer.trained else 1) + 2.0 * n * layer.positions_to_inputs)
        if sparse and layer.trained and self.interval is not None:
            training += 2.0 * (layer.size - n) * layer.positions / self.interval
        if layer.seen:
            return Cost(once, training)
        index = Cost(stored_bytes=_INDEX_BYTES * n, training_bytes=_INDEX_BYTES * n) if sparse else Cost()
        cost = Cost(once, training) + index + self.point(n, layer.number_bytes, layer.trained)
        if products == 1:
            return cost
        size = n * layer.number_bytes
        copies = 2 + _MOMENTS[self.scale_optimizer]
        return cost + Cost(parameters=n, stored_bytes=size, training_bytes=copies * size)


def network_account(
    network: Network, example: Inputs, scheme: Scheme, active: Mapping[str, int] | None = None
) -> Account:
    """The costs of a network that has `active[name]` weights in the named layers and all weights in the others.

    Args:
        network: of ordinary layers, run once on the example; parameters it does not infer are counted as not trained
        example: a batch of inputs, its length divided out
        scheme: how the weights are trained
        active: number of active weights of linear and convolutional layers, by the layer's name
    """
    modules = {name: layer for name, layer in network.module.named_modules() if LayerGeometry.of(layer) is not None}
    parameters = dict(network.module.named_parameters())
    drawn = {name: parameters[name] for name in active or () if name not in modules and name in parameters}
    active = dict(active or {})
    _check(active, {name: layer.weight for name, layer in modules.items()} | drawn)
    layers, others = _measured(network, modules, example)
    trained = {id(p) for name, p in network.module.named_parameters() if name in network.names}
    left = {id(t): t for t in (*network.module.parameters(), *network.module.buffers())}
    rows, update_bytes = [], 0
    for name, layer in layers.items():
        n, bias = active.get(name, layer.size), left.pop(id(modules[name].bias), None)
        biases = Cost() if bias is None else scheme.point(bias.numel(), bias.element_size(), id(bias) in trained)
        left.pop(id(modules[name].weight), None)
        cost, dense = (scheme.weights(layer, count) + biases for count in (n, layer.size))
        rows.append(LayerCost(name, 0 if layer.seen else layer.size, 0 if layer.seen else n, cost, dense))
        if scheme.interval is not None and layer.trained and n < layer.size:
            update_bytes = max(update_bytes, layer.size * layer.number_bytes)
    for name, weight in drawn.items():  # their operations are among those of no layer
        left.pop(id(weight), None)
        whole = _Layer(weight.numel(), weight.element_size(), True, False, 0.0, 0.0)
        cost, dense = (scheme.weights(whole, count) for count in (active[name], whole.size))
        rows.append(LayerCost(name, whole.size, active[name], cost, dense))
    rest = Cost(others, 3 * others)
    for key, tensor in left.items():
        rest += scheme.point(tensor.numel(), tensor.element_size(), key in trained)
    if rest != Cost():
        rows.append(LayerCost(_REST, 0, 0, rest, rest))
    return Account(tuple(rows), update_bytes)


def flops_by_counts(network: Network, example: Inputs, scheme: Scheme) -> tuple[FlopsByCounts, FlopsByCounts]:
    """FLOPs of inference and of training as `network_account` counts them, as functions of `active`, after one pass."""
    modules = {name: layer for name, layer in network.module.named_modules() if LayerGeometry.of(layer) is not None}
    layers, others = _measured(network, modules, example)

    def total(active: Mapping[str, int]) -> Cost:
        parts = (scheme.weights(layer, active.get(name, layer.size)) for name, layer in layers.items())
        return sum(parts, Cost(others, 3 * others))

    return lambda active: total(active).inference_flops, lambda active: total(active).training_flops


def training_account(task: Task, layout: WeightLayout, run: Run, scheme: Scheme) -> Account:
    """What it costs to train and to use the network with the weights of a layout."""
    return network_account(task.network.to(run.device), task.example(run.device), scheme, layout.counts)


def channel_account(task: Task, narrow: Network, run: Run, scheme: Scheme, interval: int) -> Account:
    """What it costs to train and to use a narrow network, with a pass of the wide one every `interval` steps."""
    example, wide = task.example(run.device), task.network.to(run.device)
    few, many = network_account(narrow, example, scheme), network_account(wide, example, scheme)
    update = sum(row.cost.inference_flops for row in many.rows)
    rows = [replace(row, cost=now.cost, active=now.weights) for row, now in zip(many.rows, few.rows, strict=True)]
    rows.append(LayerCost("exchange of channels", 0, 0, Cost(training_flops=3 * update / interval), Cost()))
    # An exchange has the wide weights and their gradients for a moment.
    update_bytes = 2 * sum(row.weights for row in many.rows) * narrow.dtype.itemsize
    return replace(few, rows=tuple(rows), update_bytes=update_bytes)


@dataclass(frozen=True)
class _Layer:
    """What a linear or convolutional layer's cost depends on, beside its active weights."""

    size: int  # of the whole weight
    number_bytes: int
    trained: bool
    seen: bool  # an earlier layer has the same weight, and stores it
    positions: float  # of the outputs, an example
    positions_to_inputs: float  # those whose inputs need a gradient


def _check(active: Mapping[str, int], weights: Mapping[str, Any]) -> None:
    for name, n in active.items():
        if name not in weights:
            raise ValueError(
                f"active names {name!r}, which is no linear or convolutional layer: there are {', '.join(weights)}"
            )
        size = weights[name].numel()
        if not 1 <= n <= size:
            raise ValueError(f"active[{name!r}] = {n} must be between 1 and the layer's {size:,} weights")


def _measured(network: Network, modules: Mapping[str, nn.Module], example: Inputs) -> tuple[dict[str, _Layer], float]:
    """Every layer as one forward pass finds it, and the operations of an example that are of no such layer."""
    rows = count_rows(example)
    names = {module: name for name, module in modules.items()}
    positions = {name: [0.0, 0.0] for name in modules}

    def watch(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        here = output.numel() / len(_weight(module)) / rows
        positions[names[module]][0] += here
        positions[names[module]][1] += here * inputs[0].requires_grad

    handles = [module.register_forward_hook(watch) for module in modules.values()]
    parameters = dict(network.module.named_parameters())
    # With a graph, so that the inputs of each layer know whether anything before them is trained.
    params = {name: p.detach().requires_grad_(name in network.names) for name, p in parameters.items()}
    try:
        with torch.enable_grad(), FlopCounter() as counter:
            network(params, example)
    finally:
        for handle in handles:
            handle.remove()
    trained, seen, layers = {id(parameters[name]) for name in network.names}, set(), {}
    for name, module in modules.items():
        weight = _weight(module)
        key = id(weight)
        layers[name] = _Layer(weight.numel(), weight.element_size(), key in trained, key in seen, *positions[name])
        seen.add(key)
    others = counter.total / rows - sum(2.0 * layer.size * layer.positions for layer in layers.values())
    return layers, max(others, 0.0)


def _weight(layer: nn.Module) -> Tensor:
    weight: Tensor = layer.weight  # type: ignore[assignment]
    return weight


def _line(name: str, weights: int, active: int, cost: Cost) -> tuple[str, ...]:
    density = f"{active / weights:.2%}" if weights else ""
    flops = (f"{count / 1e6:,.3f}" for count in (cost.inference_flops, cost.training_flops))
    return (name, f"{weights:,}", f"{active:,}", density, *flops, words(cost.stored_bytes), words(cost.training_bytes))
