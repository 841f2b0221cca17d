"""A network whose linear and convolutional layers hold few weights, or Gaussians over them, in place of whole tensors.

    y = sum_k m_k x_k + b                                                 point weights
    y ~ N(sum_k m_k x_k, sum_k s_k^2 x_k^2) + b, a draw a row             local reparameterisation (Kingma et al. 2015)
    y = sum_k (m_k + s_k z_k) x_k + b, one z for all rows                 where a module reads the weight itself

The weights of all layers lie one after the other in flat tensors, so that an optimiser, a file and a change of which
weights there are see one tensor each. Biases and every other parameter stay as they are, without a posterior.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from caveat.batches import Inputs
from caveat.engine.sparse.kernels import Collector, LayerGeometry, Pattern, apply, apply_pair
from caveat.engine.sparse.weight_layout import WeightLayout, weight_name
from caveat.engine.sparse.weight_reads import WeightRead
from caveat.network import Network, Params
from caveat.randomness import seeded

__all__ = [
    "LayerGeometries",
    "Noise",
    "SparseLayer",
    "Substitute",
    "left_out",
    "plain_layers",
    "sparse_layers",
    "substitute_and_means",
]

Noise = Callable[[Tensor], Tensor]  # draws standard normals as randn_like does
_SHAPE = ("in_features", "out_features", "in_channels", "out_channels")
_GEOMETRY = ("kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
NARROW = 48  # channels of convolutions that are taken together on a GPU, measured on an H200; with 64 it is slower
_TINY = 1e-16  # added to a variance: the gradient of its root stays finite where all inputs are zero


class _Draw(torch.autograd.Function):
    """mean + sqrt(variance) noise, of which the derivative noise / (2 sqrt(variance)) is kept alone."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, variance: Tensor, noise: Tensor) -> Tensor:
        root = (variance + _TINY).sqrt_()
        ctx.save_for_backward(torch.addcdiv(root.new_zeros(()), noise, root, value=0.5))
        return torch.addcmul(mean, root, noise)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        (slope,) = ctx.saved_tensors
        return g, g * slope, None


class SparseLayer(nn.Module):
    """Takes the place of a linear or convolutional layer; it is told its weights before every pass."""

    bias: nn.Parameter | None
    values: Tensor  # [K] with a pattern; the whole shape without one, or where whole weights are given
    variance: Tensor | None  # shaped as the values; None for point weights
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
        self.pattern: Pattern | None = None
        self.collect: Collector | None = None
        self.calls = 0  # since a collector was set
        self.noise: Noise | None = None  # of outputs; None for torch's own
        self.weight_noise: Noise | None = None  # of weights, where a module reads them
        self._read: tuple[Tensor, Tensor] | None = None  # the values that were read last, and the whole weight of them

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
        return torch.addcmul(mean, (variance + _TINY).sqrt(), noise)

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

    @property
    def weight(self) -> Tensor:
        """The whole weight, for a module that reads it instead of calling the layer; with variances a draw of it.

        The draw is made when it is first computed with, and is the same until the layer is told its weights anew.
        """
        if self.variance is None and self.collect is None:
            return self._whole(self.values)
        if torch.compiler.is_compiling():
            return self._weight_read()
        return WeightRead.of(self.values, self.geometry.shape, self._weight_read)

    def _weight_read(self) -> Tensor:
        """The whole weight at these values, or a draw of it, once for all who read it."""
        if self._read is not None and self.was_read:
            return self._read[1]
        drawn = self.values
        if self.variance is not None:
            draw = torch.randn_like if self.weight_noise is None else self.weight_noise
            drawn = torch.addcmul(drawn, (self.variance + _TINY).sqrt(), draw(drawn))
        whole = self._whole(drawn)
        self.calls += self.collect is not None
        if self.collect is not None and whole.requires_grad:
            whole.register_hook(self.collect)
        self._read = (self.values, whole)
        return whole

    def _whole(self, values: Tensor) -> Tensor:
        """The whole weight with these values."""
        return values if self.pattern is None or values.ndim > 1 else self.pattern.whole(values)

    @property
    def was_read(self) -> bool:
        """Whether a module has computed with the weight since the layer was told its present one."""
        return self._read is not None and self._read[0] is self.values

    def forget(self, nothing: Tensor) -> None:
        """Let go of weights, which would otherwise be kept, or be outputs of a graph that a pass is compiled to."""
        self.values, self.variance, self._read = nothing, None, None


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
    """Every plain linear and convolutional layer of a network, in the module's order."""
    geometries = {name: LayerGeometry.of(module) for name, module in network.module.named_modules()}
    return {name: geometry for name, geometry in geometries.items() if geometry is not None}


class LayerGeometries(dict[str, LayerGeometry]):
    """Geometries by layer; `first` names the network's first linear or convolutional layer, in the dict or not."""

    def __init__(self, layers: Mapping[str, LayerGeometry], first: str) -> None:
        super().__init__(layers)
        self.first = first


def sparse_layers(network: Network) -> LayerGeometries:
    """The layers that can hold few weights: those with a selected weight that no other layer shares, without hooks."""
    modules = [module for _, module in network.module.named_modules(remove_duplicate=False)]
    owners = [id(p) for module in network.module.modules() for p in module.parameters(recurse=False)]
    layers = {}
    for name, geometry in plain_layers(network).items():
        module: Any = network.module.get_submodule(name)
        alone = sum(other is module for other in modules) == 1 and owners.count(id(module.weight)) == 1
        hooked = module._forward_hooks or module._forward_pre_hooks
        if weight_name(name) in network.names and alone and not hooked:
            layers[name] = geometry
    if not layers:
        raise ValueError(
            "the network has no linear or convolutional layer (nn.Linear, nn.Conv1d, nn.Conv2d, not subclasses; padded "
            "alike on both sides with zeros; no hooks; a weight of its own, selected by parameters=) that could be "
            "made sparse or Bayesian"
        )
    kinds = (nn.Linear, nn.modules.conv._ConvNd)  # of any padding, transposed ones and subclasses too
    return LayerGeometries(
        layers, next(name for name, module in network.module.named_modules() if isinstance(module, kinds))
    )


def left_out(network: Network, layers: dict[str, LayerGeometry]) -> list[str]:
    """Names of the selected weights of two axes or more that stay deterministic."""
    parameters = dict(network.module.named_parameters())
    inside = {weight_name(name) for name in layers}
    return [name for name in network.names if parameters[name].ndim > 1 and name not in inside]


class Substitute:
    """A network's private copy with sparse layers in it.

    Args:
        network: the one to copy.
        layout: which layers become sparse, and where their weights are.
        rest: values of other parameters and of buffers, by name.
    """

    def __init__(self, network: Network, layout: WeightLayout, rest: Params) -> None:
        self.network = network.with_fixed({})
        self.layers: dict[str, SparseLayer] = {}
        module = self.network.module
        for name, geometry in layout.geometries.items():
            parent, _, child = name.rpartition(".")
            layer = SparseLayer(module.get_submodule(name), geometry)
            if name:
                setattr(module.get_submodule(parent), child, layer)
            else:
                module = self.network.module = layer
            self.layers[name] = layer
        inside = {weight_name(name) for name in layout.geometries}
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
            layer.values = part.view(shape)
            layer.variance = None if spread is None else spread[name].view(shape)

    def use_joined(self, values: Tensor, variance: Tensor | None = None) -> None:
        """Set whole weights of all layers, as `WeightLayout.joined` makes them, wherever the layout has weights."""
        spread = None if variance is None else dict(self.layout.split_joined(variance))
        for name, part in self.layout.split_joined(values):
            self.layers[name].values, self.layers[name].variance = part, None if spread is None else spread[name]

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
    means = layout.gathered({name: params[weight_name(name)] for name in layout.counts})
    for name, part in layout.split(means):
        part *= math.sqrt(layout.geometries[name].size / layout.counts[name])
    return Substitute(network, layout, params), means
