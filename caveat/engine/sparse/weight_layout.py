"""The weights of sparse layers in flat tensors, one layer after the other, and where each is in its whole weight."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from caveat.engine.run import Run
from caveat.engine.sparse.kernels import LayerGeometry, Pattern
from caveat.network import Params

__all__ = ["ActiveWeights", "WeightLayout", "column_indices", "parameter_name", "random_layout", "weight_name"]


def weight_name(layer: str) -> str:
    """The name of a layer's weight among the module's parameters; a layer that is the module itself is called ""."""
    return f"{layer}.weight".removeprefix(".")


def parameter_name(key: str, geometry: LayerGeometry) -> str:
    """The name of a weight among the module's parameters, by what a layout calls it: its layer, or its own name."""
    return key if geometry.drawn else weight_name(key)


def column_indices(geometry: LayerGeometry, columns: Tensor) -> Tensor:
    """Flat indices, int32 [outputs * columns], of the weights of a linear layer that reads these inputs alone."""
    rows = torch.arange(geometry.shape[0], dtype=torch.int32, device=columns.device)
    return (rows[:, None] * geometry.shape[1] + columns.int()).flatten()


@dataclass
class WeightLayout:
    """Where each layer's weights lie in the flat tensors, and which of the whole weight's entries they are."""

    geometries: dict[str, LayerGeometry]
    counts: dict[str, int]  # how many weights each layer has; all of them where it is dense
    indices: Tensor  # int32: sorted flat indices of each layer that is not dense, one layer after the other

    @property
    def size(self) -> int:
        """How many weights all layers have together."""
        return sum(self.counts.values())

    def is_dense(self, name: str) -> bool:
        """Whether a layer has all of its weights."""
        return self.counts[name] == self.geometries[name].size

    def indices_of(self) -> dict[str, Tensor | None]:
        """The flat indices of each layer's weights; None for a dense layer."""
        sparse = [name for name in self.counts if not self.is_dense(name)]
        parts = dict(zip(sparse, self.indices.split([self.counts[name] for name in sparse]), strict=True))
        return {name: parts.get(name) for name in self.counts}

    def parameter_names(self) -> dict[str, str]:
        """The names of the weights among the module's parameters."""
        return {key: parameter_name(key, self.geometries[key]) for key in self.counts}

    def patterns(self) -> dict[str, Pattern | None]:
        """The flat indices as patterns, which sparse layers take; None for a dense layer."""
        return {
            name: None if places is None else Pattern(self.geometries[name], places)
            for name, places in self.indices_of().items()
        }

    def split(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Each layer's part of a flat tensor [..., size]."""
        return zip(self.counts, flat.split([*self.counts.values()], dim=-1), strict=True)

    def gathered(self, weights: Params) -> Tensor:
        """The flat tensor [size] that whole weights, by layer name, have at these places."""
        parts = []
        for name, places in self.indices_of().items():
            flat = weights[name].flatten()
            parts.append(flat if places is None else flat[places.long()])
        return torch.cat(parts)

    def whole(self, flat: Tensor) -> Params:
        """Whole weights by parameter name, zero where a flat tensor [size] has none."""
        patterns = self.patterns()
        weights = {}
        for name, part in self.split(flat):
            pattern = patterns[name]
            weights[parameter_name(name, self.geometries[name])] = (
                part.view(self.geometries[name].shape) if pattern is None else pattern.whole(part)
            )
        return weights

    @cached_property
    def positions(self) -> Tensor:
        """The position of each weight among all entries of all whole weights, one layer after the other, [size]."""
        parts, before = [], 0
        for name, places in self.indices_of().items():
            size = self.geometries[name].size
            parts.append(torch.arange(size, device=self.indices.device) if places is None else places.long())
            parts[-1] += before
            before += size
        return torch.cat(parts)

    def joined(self, flat: Tensor) -> Tensor:
        """All whole weights, flat, one layer after the other, with zeros elsewhere; `flat` itself if it has all."""
        total = sum(geometry.size for geometry in self.geometries.values())
        return flat if total == self.size else flat.new_zeros(total).scatter_(0, self.positions, flat)

    def split_joined(self, joined: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Each layer's whole weight, from a tensor that `joined` made."""
        parts = joined.split([self.geometries[name].size for name in self.counts])
        for name, part in zip(self.counts, parts, strict=True):
            yield name, part.view(self.geometries[name].shape)


def random_layout(geometries: dict[str, LayerGeometry], counts: dict[str, int], run: Run) -> WeightLayout:
    """A layout with `counts` weights of each layer, at places drawn from the run's generator."""
    places = [
        torch.randperm(geometry.size, generator=run.rng)[: counts[name]].sort().values.int()
        for name, geometry in geometries.items()
        if counts[name] < geometry.size
    ]
    indices = torch.cat(places) if places else torch.zeros(0, dtype=torch.int32)
    return WeightLayout(geometries, counts, indices.to(run.device))


@dataclass(frozen=True)
class ActiveWeights:
    """The weights of all sparse layers, one after the other, that training and exchanges change in place."""

    mean: Tensor  # [size]: means of Gaussians, or point weights
    log_std: Tensor | None = None  # [size]: logarithms of standard deviations; None for points

    def variance(self) -> Tensor | None:
        """The variance of every weight, [size]; None for points."""
        return None if self.log_std is None else (2 * self.log_std).exp()

    def new_log_std(self, layout: WeightLayout, new_std: float | None) -> Tensor:
        """Log standard deviations of weights that are added to each layer, [layers]; its mean unless given."""
        assert self.log_std is not None
        parts = [part.mean() for _, part in layout.split(self.log_std.detach().exp())]
        means = torch.stack(parts).log()
        return means if new_std is None else torch.full_like(means, math.log(new_std))
