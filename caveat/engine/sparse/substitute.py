"""A network whose linear and convolutional layers hold few weights, or Gaussians over them, in place of whole tensors.

    y = sum_k m_k x_k + b                                                 point weights
    y ~ N(sum_k m_k x_k, sum_k s_k^2 x_k^2) + b, a draw a row             local reparameterisation (Kingma et al. 2015)
    y = sum_k (m_k + s_k z_k) x_k + b, one z for all rows                 where a module reads the weight itself

The weights of all layers lie one after the other in flat tensors, so that an optimiser, a file and a change of which
weights there are see one tensor each. Biases and every other parameter stay as they are, without a posterior.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from caveat.batches import Inputs
from caveat.engine.sparse.held_weights import TINY, DrawnWeight, HeldWeights, Noise, drawn_weights
from caveat.engine.sparse.kernels import Collector, LayerGeometry, Pattern, apply, apply_pair
from caveat.engine.sparse.weight_layout import WeightLayout, parameter_name, weight_name
from caveat.network import Network, Params
from caveat.randomness import seeded

__all__ = [
    "LayerGeometries",
    "SparseLayer",
    "Substitute",
    "all_weights",
    "inferred_weights",
    "left_out",
    "plain_layers",
    "sparse_layers",
    "stored_counts",
    "substitute_and_means",
]

_SHAPE = ("in_features", "out_features", "in_channels", "out_channels")
_GEOMETRY = ("kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
NARROW = 48  # channels of convolutions that are taken together on a GPU, measured on an H200; with 64 it is slower


class _Draw(torch.autograd.Function):
    """mean + sqrt(variance) noise, of which the derivative noise / (2 sqrt(variance)) is kept alone."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, variance: Tensor, noise: Tensor) -> Tensor:
        root = (variance + TINY).sqrt_()
        ctx.save_for_backward(torch.addcdiv(root.new_zeros(()), noise, root, value=0.5))
        return torch.addcmul(mean, root, noise)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        (slope,) = ctx.saved_tensors
        return g, g * slope, None


class SparseLayer(nn.Module, HeldWeights):
    """Takes the place of a linear or convolutional layer; it is told its weights before every pass."""

    bias: nn.Parameter | None
    indices: Tensor  # a buffer, once the layer has settled

    def __init__(self, layer: Any, geometry: LayerGeometry) -> None:
        super().__init__()
        self.geometry = geometry
        self.register_parameter("bias", layer.bias)
        for name in _SHAPE + _GEOMETRY:  # a module may ask its layer for them
            if hasattr(layer, name):
                setattr(self, name, getattr(layer, name))
        # An empty parameter: it tells the device and type of a network that has no other parameter left.
        self.place = nn.Parameter(layer.weight.detach().new_empty(0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs [B, ...]; with variances, a draw of them."""
        self.calls += self.collect is not None
        pattern = self.pattern if self.values.ndim == 1 else None
        if self.variance is None:
            if pattern is None:
                return self.geometry.dense(x, self.values, self.bias)
            return apply(x, self.values, pattern, self.bias, self.collect)
        if pattern is None:
            mean, variance = dense_pair(self.geometry, x, self.values, self.variance, self.bias)
        else:
            mean, variance = apply_pair(x, self.values, self.variance, pattern, self.collect)
            if self.bias is not None:
                mean = mean + self.bias.view(-1, *[1] * (len(self.geometry.shape) - 2))
        noise = torch.randn_like(mean) if self.noise is None else self.noise(mean)
        if torch.is_grad_enabled():
            drawn: Tensor = _Draw.apply(mean, variance, noise)
            return drawn
        return torch.addcmul(mean, (variance + TINY).sqrt(), noise)

    def settle(self) -> None:
        """Keep the present weights and their places as buffers, which move and are saved with the module."""
        assert self.pattern is not None
        values, indices = self.values.detach().clone(), self.pattern.indices.clone()
        del self.values
        self.register_buffer("values", values)
        self.register_buffer("indices", indices)
        self._update_pattern()

    def _update_pattern(self) -> None:
        """Make the pattern anew where its indices were moved or loaded."""
        if "indices" in self._buffers:
            self.pattern = Pattern(self.geometry, self.indices)

    def _apply(self, fn: Any, recurse: bool = True) -> "SparseLayer":
        super()._apply(fn, recurse)
        self._update_pattern()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._update_pattern()


def dense_pair(
    geometry: LayerGeometry, x: Tensor, mean: Tensor, variance: Tensor, bias: Tensor | None, narrow: int | None = None
) -> tuple[Tensor, Tensor]:
    """Outputs with whole weights `mean` and the bias, and outputs of the squared inputs with weights `variance`.

    Convolutions of at most `narrow` channels (none on a CPU, unless given) become one, of the two weights as blocks on
    a diagonal: half of its products are with zero, but a GPU takes as long for these few channels as for twice as many.
    """
    squares = x * x  # square() would leave bfloat16
    narrow = (NARROW if x.device.type == "cuda" else 0) if narrow is None else narrow
    if len(geometry.shape) != 4 or geometry.groups > 1 or max(geometry.shape[:2]) > narrow:
        return geometry.dense(x, mean, bias), geometry.dense(squares, variance)
    none = torch.zeros_like(mean)
    weight = torch.cat([torch.cat([mean, none], 1), torch.cat([none, variance], 1)])
    offset = None if bias is None else torch.cat([bias, torch.zeros_like(bias)])
    outputs, spread = geometry.dense(torch.cat([x, squares], 1), weight, offset).chunk(2, 1)
    return outputs, spread


def plain_layers(network: Network) -> dict[str, LayerGeometry]:
    """Every linear and convolutional layer of a network: first those of torch's own classes, then of subclasses."""
    modules = dict(network.module.named_modules())
    geometries = {name: LayerGeometry.of(module) for name, module in modules.items()}
    found = {name: geometry for name, geometry in geometries.items() if geometry is not None}
    plain = {name: type(modules[name]) in (nn.Linear, nn.Conv1d, nn.Conv2d) for name in found}
    return {name: found[name] for name in sorted(found, key=lambda name: not plain[name])}


def all_weights(network: Network) -> dict[str, LayerGeometry]:
    """Whatever may have a posterior: `plain_layers`, and then every parameter that may be drawn, in layers or not.

    Files count weights in this order, which hooks that somebody puts on a layer do not change.
    """
    return plain_layers(network) | drawn_weights(network)


class LayerGeometries(dict[str, LayerGeometry]):
    """Geometries by layer; `first` names the network's first linear or convolutional layer, in the dict or not."""

    def __init__(self, layers: Mapping[str, LayerGeometry], first: str) -> None:
        super().__init__(layers)
        self.first = first


def sparse_layers(network: Network) -> LayerGeometries:
    """The layers that can hold few weights: those with a selected weight that no other layer shares, without hooks."""
    layers = _held_layers(network)
    if not layers:
        raise ValueError(
            "the network has no linear or convolutional layer (nn.Linear, nn.Conv1d, nn.Conv2d and what computes as "
            "they do; padded alike on both sides with zeros; no hooks; a weight of its own, selected by parameters=) "
            "whose units or channels could go: VariationalDropout and SSVI() take single weights of any layer"
        )
    return _of_one_type(network, LayerGeometries(layers, _first_layer(network)))


def _of_one_type(network: Network, layers: LayerGeometries) -> LayerGeometries:
    """These layers, whose weights lie in one tensor: a head in the type of a base beside adapters is refused."""
    parameters = dict(network.module.named_parameters())
    names = [parameter_name(name, geometry) for name, geometry in layers.items()]
    first = parameters[names[0]].dtype
    other = next((name for name in names if parameters[name].dtype != first), None)
    if other is not None:
        raise ValueError(
            f"weights of layers must be of one type, and {names[0]} is {first}, {other} {parameters[other].dtype}: "
            "leave those of one type out with parameters= (adapters alone are parameters='*lora_*'), or convert them"
        )
    return layers


def _held_layers(network: Network) -> dict[str, LayerGeometry]:
    modules = [module for _, module in network.module.named_modules(remove_duplicate=False)]
    owners = [id(p) for module in network.module.modules() for p in module.parameters(recurse=False)]
    layers = {}
    for name, geometry in plain_layers(network).items():
        module: Any = network.module.get_submodule(name)
        alone = sum(other is module for other in modules) == 1 and owners.count(id(module.weight)) == 1
        hooked = module._forward_hooks or module._forward_pre_hooks
        if weight_name(name) in network.names and alone and not hooked:
            layers[name] = geometry
    return layers


def _first_layer(network: Network) -> str:
    """The name of the first linear or convolutional layer, of any padding, a transposed one or a subclass too."""
    kinds = (nn.Linear, nn.modules.conv._ConvNd)
    return next((name for name, module in network.module.named_modules() if isinstance(module, kinds)), "")


def stored_counts(network: Network, counts: Mapping[str, int]) -> Tensor:
    """How many weights there are of each of `all_weights`, as files have it: it ends where none follow."""
    numbers = [counts.get(name, 0) for name in all_weights(network)]
    last = max((place for place, number in enumerate(numbers, 1) if number), default=0)
    return torch.tensor(numbers[: max(last, len(plain_layers(network)))], dtype=torch.int64)


def inferred_weights(network: Network) -> LayerGeometries:
    """The layers of `sparse_layers`, and every other weight that can be drawn, by its parameter's name."""
    layers = _held_layers(network)
    drawn = drawn_weights(network, {weight_name(name) for name in layers})
    if not layers and not drawn:
        raise ValueError(
            "none of the selected parameters is a weight that is multiplied with what goes through the network: "
            "embeddings, tokens, biases and norm layers have no variational posterior; select others with parameters="
        )
    first = _first_layer(network)
    return _of_one_type(network, LayerGeometries(layers | drawn, first if first in layers else weight_name(first)))


def left_out(network: Network, weights: Mapping[str, LayerGeometry]) -> tuple[list[str], list[str]]:
    """Names of the selected weights that stay deterministic: those that could be drawn, and other ones of two axes."""
    parameters = dict(network.module.named_parameters())
    inside = {parameter_name(name, geometry) for name, geometry in weights.items()}
    outside = [name for name in network.names if parameters[name].ndim > 1 and name not in inside]
    drawn = drawn_weights(network)
    return [name for name in outside if name in drawn], [name for name in outside if name not in drawn]


class Substitute:
    """A network's private copy with sparse layers in it.

    Args:
        network: the one to copy.
        layout: which layers become sparse, and where their weights are.
        rest: values of other parameters and of buffers, by name.
    """

    def __init__(self, network: Network, layout: WeightLayout, rest: Params) -> None:
        self.network = network.with_fixed({})
        self.layers: dict[str, SparseLayer | DrawnWeight] = {}
        module = self.network.module
        parameters = dict(module.named_parameters())
        for name, geometry in layout.geometries.items():
            if geometry.drawn:
                self.layers[name] = DrawnWeight(module, parameters[name], geometry)
                continue
            parent, _, child = name.rpartition(".")
            layer = SparseLayer(module.get_submodule(name), geometry)
            if name:
                setattr(module.get_submodule(parent), child, layer)
            else:
                module = self.network.module = layer
            self.layers[name] = layer
        inside = {parameter_name(name, geometry) for name, geometry in layout.geometries.items()}
        if next(module.parameters(), None) is None:  # its device and type are asked of its parameters
            module.register_parameter("place", nn.Parameter(next(iter(self.layers.values())).place))
        self.network.names = tuple(name for name in network.names if name not in inside)
        targets = dict(module.named_parameters()) | dict(module.named_buffers())
        with torch.no_grad():
            for name, value in rest.items():
                if name not in inside:
                    targets[name].copy_(value)
        self.arrange(layout)

    def arrange(self, layout: WeightLayout) -> None:
        """Move the layers' weights to the places of a new layout; `use` then gives their values."""
        self.layout = layout
        for name, pattern in layout.patterns().items():
            self.layers[name].pattern = pattern

    def use(self, values: Tensor, variance: Tensor | None = None) -> None:
        """Set the flat weights [size], and their variances [size], that the next passes compute with."""
        spread = None if variance is None else dict(self.layout.split(variance))
        for name, part in self.layout.split(values):
            layer = self.layers[name]
            shape = layer.geometry.shape if layer.pattern is None else part.shape
            layer.tell(part.view(shape), None if spread is None else spread[name].view(shape))

    def use_joined(self, values: Tensor, variance: Tensor | None = None) -> None:
        """Set whole weights of all layers, as `WeightLayout.joined` makes them, wherever the layout has weights."""
        spread = None if variance is None else dict(self.layout.split_joined(variance))
        for name, part in self.layout.split_joined(values):
            self.layers[name].tell(part, None if spread is None else spread[name])

    def forget(self, nothing: Tensor) -> None:
        """Let go of all weights."""
        for layer in self.layers.values():
            layer.forget(nothing)

    def collect(self, collectors: dict[str, Collector]) -> None:
        """Set the functions that get the gradients of whole weights, by layer; layers without one give none."""
        for name, layer in self.layers.items():
            layer.collect, layer.calls = collectors.get(name), 0

    def draw_noise(self, of_outputs: Noise | None, of_weights: Noise | None = None) -> None:
        """Set the functions that draw noise, for outputs and for weights that are read; None for torch's own."""
        for layer in self.layers.values():
            layer.noise, layer.weight_noise = of_outputs, of_weights

    def read_in_training(self, x: Inputs) -> set[str]:
        """The layers whose weights a training pass computes with beside the layers' own calls; nothing is changed."""
        self.collect(dict.fromkeys(self.layers, lambda gradient: None))  # weights that are read are then noticed
        with torch.no_grad(), seeded(0, self.network.device):
            self.network({}, x, train=True)
        self.collect({})
        return {name for name, layer in self.layers.items() if layer.was_read}

    def rest(self) -> Params:
        """Copies of the selected parameters beside the layers' weights, and of all buffers."""
        parameters = dict(self.network.module.named_parameters())
        selected = {name: parameters[name].detach().clone() for name in self.network.names}
        return selected | {name: b.detach().clone() for name, b in self.network.module.named_buffers()}

    def ran_sparse(self) -> float:
        """The share of the sparse layers' weights whose last pass took a sparse kernel."""
        sparse = [layer for layer in self.layers.values() if layer.pattern is not None]
        total = sum(layer.geometry.size for layer in sparse)
        ran = sum(layer.geometry.size for layer in sparse if getattr(layer.pattern, "ran", None) == "sparse")
        return ran / total if total else 0.0


def substitute_and_means(network: Network, params: Params, layout: WeightLayout) -> tuple[Substitute, Tensor]:
    """A network with sparse layers, and its first means [size]: the start's, larger where fewer inputs are added up."""
    means = layout.gathered({name: params[parameter] for name, parameter in layout.parameter_names().items()})
    for name, part in layout.split(means):
        part *= math.sqrt(layout.geometries[name].size / layout.counts[name])
    return Substitute(network, layout, params), means
