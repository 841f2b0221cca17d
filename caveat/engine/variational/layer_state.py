"""What a posterior over the active weights of layers keeps.

On disk, the group "active" has flat tensors: `mean`, `log_std` (none for points), `indices` (int32, of the layers that
are neither dense nor given by columns) and `counts` of all plain linear and convolutional layers, 0 for those that are
points. A linear layer that has lost whole inputs has, in place of indices, `columns/<layer>`: the inputs that it still
reads. "rest" has every other parameter and the buffers, "hyper" what the likelihood learned, "noise" the numbers that
multiply whole units, "slices" the channels of a narrow network.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from caveat.engine.sparse import WeightLayout, column_indices, plain_layers
from caveat.engine.variational.unit_noise import UnitFactors
from caveat.likelihoods import Hyper
from caveat.network import Network, Params
from caveat.randomness import normals
from caveat.storage import CorruptFile, State

__all__ = ["LayerState"]

_COLUMNS = "columns/"  # in a file, before the name of a layer


@dataclass(frozen=True)
class LayerState:
    """The state of SSVI, MeanFieldVI, RigL and the methods that prune by noise, or of a draw of AEB or MaskedBNN."""

    mean: Tensor  # [size]: means, or points, of the active weights of all layers
    indices: Tensor  # int32: flat indices of the weights of layers that are neither dense nor given by columns
    counts: Tensor  # [layers]: how many active weights each plain layer has; 0 for a layer of points
    rest: Params  # every other parameter, and the buffers
    hyper: Hyper
    log_std: Tensor | None = None  # [size]; None for points
    columns: Params = field(default_factory=dict)  # int32: the inputs that a linear layer still reads, by layer
    units: UnitFactors | None = None  # what multiplies whole units
    slices: Params = field(default_factory=dict)  # of a narrow network, see `stored_slices`; empty for the whole one

    def tensors(self) -> State:
        """As a posterior keeps it, by group and name."""
        active = {"mean": self.mean, "indices": self.indices, "counts": self.counts}
        if self.log_std is not None:
            active["log_std"] = self.log_std
        active |= {f"{_COLUMNS}{name}": columns for name, columns in self.columns.items()}
        state: State = {"active": active, "rest": self.rest, "hyper": self.hyper}
        if self.units is not None:
            state["noise"] = self.units.tensors()
        return state | ({"slices": self.slices} if self.slices else {})

    @classmethod
    def of(cls, state: State) -> "LayerState":
        """The state that `tensors` made groups of."""
        missing = [group for group in ("active", "rest", "hyper") if group not in state]
        missing += [f"active/{name}" for name in ("mean", "indices", "counts") if name not in state.get("active", {})]
        if missing:
            raise CorruptFile(f"this is not the state of a posterior over active weights: it has no {missing[0]!r}")
        active = state["active"]
        return cls(
            active["mean"],
            active["indices"],
            active["counts"],
            state["rest"],
            state["hyper"],
            active.get("log_std"),
            {name.removeprefix(_COLUMNS): t for name, t in active.items() if name.startswith(_COLUMNS)},
            UnitFactors.of(state["noise"]) if "noise" in state else None,
            state.get("slices", {}),
        )

    def network(self, wide: Network) -> Network:
        """The network that the weights are of: the one given, or a narrower one."""
        if not self.slices:
            return wide
        from caveat.engine.channels import sliced_network  # a room that only narrow networks need

        return sliced_network(wide, self.slices)

    def layout(self, network: Network) -> WeightLayout:
        """Where the weights are in their network, which is `self.network(wide)`."""
        layers = plain_layers(network)
        counts = {name: n for name, n in zip(layers, self.counts.tolist(), strict=True) if n}
        geometries = {name: layers[name] for name in counts}
        sparse = [name for name, n in counts.items() if n < geometries[name].size]
        single = iter(self.indices.split([counts[name] for name in sparse if name not in self.columns]))
        parts = [
            column_indices(geometries[name], self.columns[name]) if name in self.columns else next(single)
            for name in sparse
        ]
        return WeightLayout(geometries, counts, torch.cat(parts) if parts else self.indices)

    def values(self, layout: WeightLayout, rng: torch.Generator | None) -> Tensor:
        """Flat weights [size]: a draw, or the means without a generator; points differ by the units' noise alone."""
        values = self.mean
        if self.log_std is not None and rng is not None:
            values = torch.addcmul(values, self.log_std.exp(), normals(values.shape, rng, values))
        return values if self.units is None else self.units.applied(values, layout, rng)

    def whole_params(self, wide: Network, layout: WeightLayout, rng: torch.Generator) -> Params:
        """A draw of all parameters of the wide network, zero where there are no weights."""
        params = self.rest | layout.whole(self.values(layout, rng))
        if not self.slices:
            return params
        from caveat.engine.channels import widened  # a room that only narrow networks need

        return widened(params, wide, self.slices)
