"""Weights that are held for a module: those of a layer that is called, and those that the module reads itself.

    theta = m + s z,   one z a pass for all rows

Joint projections of attention, recurrent layers, layers with forward functions of their own, parametrised weights and
weights that several layers share are parameters which their modules compute with in ways of their own. They are drawn:
the parameter is taken out of the module, and before every pass a draw of it is put in its place.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from caveat.engine.sparse.kernels import Collector, LayerGeometry, Pattern
from caveat.engine.sparse.weight_reads import WeightRead
from caveat.network import Network

__all__ = ["TINY", "DrawnWeight", "HeldWeights", "Noise", "drawn_weights"]

Noise = Callable[[Tensor], Tensor]  # draws standard normals as randn_like does
TINY = 1e-16  # added to a variance: the gradient of its root stays finite where it is zero
_TABLES = (nn.Embedding, nn.EmbeddingBag)  # of which rows are looked up
_SCALES = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)  # whose weights multiply number by number


class HeldWeights:
    """Weights of one tensor, told before every pass, and a draw of the whole tensor for who reads it."""

    geometry: LayerGeometry
    values: Tensor  # [K] with a pattern; the whole shape without one, or where whole weights are given
    variance: Tensor | None  # shaped as the values; None for point weights
    place: Tensor  # empty: tells the device and type
    pattern: Pattern | None = None
    collect: Collector | None = None
    calls: int = 0  # since a collector was set
    noise: Noise | None = None  # of outputs; None for torch's own
    weight_noise: Noise | None = None  # of weights that are read
    _read: tuple[Tensor, Tensor] | None = None  # the values that were read last, and the whole weight of them

    def tell(self, values: Tensor, variance: Tensor | None) -> None:
        """Set the values that the next passes compute with, and their variances."""
        self.values, self.variance = values, variance

    @property
    def weight(self) -> Tensor:
        """The whole weight, for a module that reads it; with variances a draw of it.

        The draw is made when it is first computed with, and is the same until the weights are told anew.
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
            drawn = torch.addcmul(drawn, (self.variance + TINY).sqrt(), draw(drawn))
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
        """Whether a module has computed with the weight since it was told its present values."""
        return self._read is not None and self._read[0] is self.values

    def forget(self, nothing: Tensor) -> None:
        """Let go of weights, which would otherwise be kept, or be outputs of a graph that a pass is compiled to."""
        self.values, self.variance, self._read = nothing, None, None


class DrawnWeight(HeldWeights):
    """Takes the place of a parameter, wherever a module has it."""

    def __init__(self, module: nn.Module, parameter: Tensor, geometry: LayerGeometry) -> None:
        self.geometry = geometry
        self.place = parameter.detach().new_empty(0)
        self._owners = [
            (owner, attribute)
            for owner in module.modules()
            for attribute, own in owner._parameters.items()
            if own is parameter
        ]
        for owner, attribute in self._owners:
            del owner._parameters[attribute]

    def tell(self, values: Tensor, variance: Tensor | None) -> None:
        """Set the values, and put a draw of them, or them, in the parameter's place."""
        super().tell(values, variance)
        self._put(self._weight_read())

    def forget(self, nothing: Tensor) -> None:
        """Let go of weights, those that modules have too."""
        super().forget(nothing)
        self._put(nothing)

    def _put(self, weight: Tensor) -> None:
        for owner, attribute in self._owners:
            setattr(owner, attribute, weight)


def drawn_weights(network: Network, taken: Collection[str] = ()) -> dict[str, LayerGeometry]:
    """By name the selected parameters that can be drawn, but for those `taken`.

    These are the ones with two axes or more that are longer than one. What is looked up or added (embeddings, tokens,
    positions), and what multiplies number by number in a norm layer, is not among them.
    """
    parameters = dict(network.module.named_parameters())
    owners: dict[int, list[Any]] = {}
    for module in network.module.modules():
        for parameter in module._parameters.values():
            owners.setdefault(id(parameter), []).append(module)
    drawn = {}
    for name in network.names:
        parameter, own = parameters[name], owners[id(parameters[name])]
        convolves = any(isinstance(owner, nn.modules.conv._ConvNd) for owner in own) and parameter.ndim > 2
        several = convolves or sum(length > 1 for length in parameter.shape) > 1
        is_added = parameter.ndim == 3 and len(parameter) == 1 and not convolves  # tokens and positions, [1, T, D]
        aside = all(isinstance(owner, _TABLES) for owner in own) or any(isinstance(owner, _SCALES) for owner in own)
        if several and not is_added and not aside and name not in taken:
            drawn[name] = LayerGeometry(tuple(parameter.shape), drawn=True)
    return drawn
