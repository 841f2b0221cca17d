"""Where the weights of sparse layers are: in flat tensors, one layer after the other, and in each whole weight."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from caveat.engine.sparse.kernels import LayerGeometry, Pattern
from caveat.network import Params

__all__ = ["WeightLayout", "column_indices", "weight_name"]


def weight_name(layer: str) -> str:
    """The name of a layer's weight among the module's parameters; a layer that is the module itself is called ""."""
    return f"{layer}.weight".removeprefix(".")


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
            weights[weight_name(name)] = (
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
