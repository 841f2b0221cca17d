"""A posterior over the active weights of layers: what it keeps, and its predictions by passes through sparse layers.

On disk, the group "active" has flat tensors: `mean`, `log_std` (none for points), `indices` (int32, of the layers that
are neither dense nor given by columns) and `counts` of all linear and convolutional layers and then of parameters that
are drawn, 0 for those that are points. A linear layer that has lost whole inputs has, in place of indices,
`columns/<layer>`: the inputs that it still reads. "rest" has every other parameter and the buffers, "hyper" what the
likelihood learned, "noise" the numbers that multiply whole units, "slices" the channels of a narrow network.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from caveat.batches import Inputs, move, slices
from caveat.engine.predictors import PIECE_ROWS, PREPARED_BYTES, PreparedDraws, Replicas, WeightDraws
from caveat.engine.sparse import (
    LayerGeometry,
    SparseLayer,
    Substitute,
    WeightLayout,
    all_weights,
    column_indices,
    parameter_name,
)
from caveat.engine.state_checks import (
    buffers_like,
    check_hyper,
    check_indices,
    check_like,
    check_names,
    check_tensor,
    network_tensors,
)
from caveat.likelihoods import Hyper
from caveat.network import Network, Params
from caveat.randomness import normals
from caveat.storage import CorruptFile, State

__all__ = ["LayerPrediction", "LayerPredictor", "LayerState", "WeightFactors", "check_layers", "module_at"]

LayerPrediction = Literal["draws", "local"]  # one set of weights for all rows, or outputs drawn row by row

_COLUMNS = "columns/"  # in a file, before the name of a layer


class WeightFactors(Protocol):
    """What multiplies the weights of a draw, such as the noise of whole units."""

    def tensors(self) -> Params:
        """The group "noise" of a file."""

    def applied(self, values: Tensor, layout: WeightLayout, rng: torch.Generator | None) -> Tensor:
        """Flat weights [size] times a draw of their factors, or times the factors' means without a generator."""

    def check(self, inputs: dict[str, int]) -> None:
        """Raise a CorruptFile for factors that are not of layers with so many inputs."""


@dataclass(frozen=True)
class LayerState:
    """The state of SSVI, MeanFieldVI, RigL and the methods that prune by noise, or of a draw of AEB or MaskedBNN."""

    mean: Tensor  # [size]: means, or points, of the active weights of all layers
    indices: Tensor  # int32: flat indices of the weights of layers that are neither dense nor given by columns
    counts: Tensor  # int64: how many active weights there are of each of `all_weights`, as far as there are any
    rest: Params  # every other parameter, and the buffers
    hyper: Hyper
    log_std: Tensor | None = None  # [size]; None for points
    columns: Params = field(default_factory=dict)  # int32: the inputs that a linear layer still reads, by layer
    units: WeightFactors | None = None  # what multiplies whole units
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
            _unit_factors(state["noise"]) if "noise" in state else None,
            state.get("slices", {}),
        )

    def check(self, wide: Network, learned: Hyper | None = None) -> None:
        """Refuse what are not active weights, and everything else, of a network.

        With `learned`, what the likelihood of a draw learned is not looked at: `hyper` has it among what is common.
        """
        if learned is None:
            check_hyper(self.hyper, wide)
        network = self._checked_network(wide)
        layers = all_weights(network)
        check_tensor("active/counts", self.counts, (min(len(self.counts), len(layers)),), (torch.int64,))
        weights, buffers = network_tensors(network)
        counts = self._counts(layers)
        names = {name: parameter_name(name, geometry) for name, geometry in layers.items()}
        for name, count in counts.items():
            if not 0 <= count <= layers[name].size or (count and names[name] not in weights):
                raise CorruptFile(f"active/counts has {count} weights of {name!r}")
        held = [names[name] for name, count in counts.items() if count]
        if len(set(held)) < len(held):
            raise CorruptFile("active/counts has the weights of a layer twice")
        size = sum(counts.values())
        kinds = (network.dtype,) if size else (network.dtype, torch.float32)  # nothing is of any type
        check_tensor("active/mean", self.mean, (size,), kinds)
        if self.log_std is not None:  # of what is not there the logarithm is minus infinity
            check_tensor("active/log_std", self.log_std, (size,), (network.dtype,), logarithm=True)
        self._check_places(counts, layers)
        rest = {name: like for name, like in weights.items() if name not in held}
        rest |= buffers_like(self.rest, buffers)
        check_like("rest", self.rest, rest)
        if self.units is not None:
            self.units.check({name: layers[name].shape[1] for name in counts if not layers[name].drawn})

    def _counts(self, weights: Mapping[str, LayerGeometry]) -> dict[str, int]:
        """How many of each tensor's weights are active; a file ends its counts where none follow."""
        counts = self.counts.tolist()
        return dict(zip(weights, counts + [0] * (len(weights) - len(counts)), strict=True))

    def _check_places(self, counts: dict[str, int], layers: Mapping[str, LayerGeometry]) -> None:
        """Refuse places that are not some of each sparse layer's weights."""
        sparse = [name for name, count in counts.items() if 0 < count < layers[name].size]
        for name, columns in self.columns.items():
            if name not in sparse or counts[name] != len(columns) * layers[name].shape[0]:
                raise CorruptFile(f"active/{_COLUMNS}{name} does not belong there")
            check_indices(f"active/{_COLUMNS}{name}", columns, layers[name].shape[1])
        single = [name for name in sparse if name not in self.columns]
        check_tensor("active/indices", self.indices, (sum(counts[name] for name in single),), (torch.int32,))
        for name, places in zip(single, self.indices.split([counts[name] for name in single]), strict=True):
            check_indices(f"active/indices of {name!r}", places, layers[name].size)

    def _checked_network(self, wide: Network) -> Network:
        """The network that the weights are of, once the slices are known to make one."""
        like = dict(wide.module.named_parameters()) | dict(wide.module.named_buffers())
        for key, entries in self.slices.items():
            name, _, axis = key.rpartition("/")
            if name not in like or not axis.isdigit() or int(axis) >= like[name].ndim:
                raise CorruptFile(f"slices/{key} does not belong there")
            check_indices(f"slices/{key}", entries, like[name].shape[int(axis)])
        try:
            return self.network(wide)
        except Exception as error:  # whatever a module says that is cut in ways that do not go together
            raise CorruptFile(f"slices do not make a network ({error})") from error

    def network(self, wide: Network) -> Network:
        """The network that the weights are of: the one given, or a narrower one."""
        if not self.slices:
            return wide
        from caveat.engine.channels import sliced_network  # a room that only narrow networks need

        return sliced_network(wide, self.slices)

    def layout(self, network: Network) -> WeightLayout:
        """Where the weights are in their network, which is `self.network(wide)`."""
        layers = all_weights(network)
        counts = {name: n for name, n in self._counts(layers).items() if n}
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


def check_layers(state: State, network: Network, groups: Sequence[str], *, has_widths: bool) -> None:
    """Refuse a state that is not over active weights of the network, with widths or as points, in these groups."""
    check_names("state", state, groups, ["slices"])
    layers = LayerState.of(state)
    if (layers.log_std is not None) != has_widths:
        raise CorruptFile(f"active/log_std {'is missing' if has_widths else 'does not belong there'}")
    known = {"mean", "indices", "counts", "log_std"}
    check_names(
        "active", [name for name in state["active"] if not name.startswith(_COLUMNS)], known - {"log_std"}, known
    )
    layers.check(network)


def _unit_factors(tensors: Params) -> WeightFactors:
    from caveat.engine.variational.unit_noise import UnitFactors  # of the methods that prune units, and of no other

    return UnitFactors.of(tensors)


class LayerPredictor:
    """Predicts from active weights, through replicas of a network with sparse layers.

    Args:
        state: what the posterior keeps.
        network: the wide network.
        local: draw outputs row by row (local reparameterisation) instead of one set of weights for all rows.
    """

    def __init__(self, state: LayerState, network: Network, local: bool = False) -> None:
        self._state, self._network = state, network
        self._local = local and state.log_std is not None
        self._substitutes = Replicas(self._substitute)
        self._prepared: PreparedDraws[list[Tensor]] = PreparedDraws()

    def draws(self, n: int, rng: torch.Generator) -> Iterator[Params]:
        """Whole weights of n draws, zero where there are none."""
        layout = self._state.layout(self._state.network(self._network))
        for _ in range(n):
            yield self._state.whole_params(self._network, layout, rng)

    def outputs(self, x: Inputs, n: int, rng: torch.Generator) -> tuple[Tensor, Hyper]:
        """Outputs of n passes through sparse layers, [S, B, ...], and the hyper."""
        state, device, outputs = self._state, self._network.device, []
        with torch.no_grad(), self._substitutes.lent() as substitute:
            if self._local:
                seed = int(torch.randint(2**62, (), generator=rng))
                draw = partial(_normals_like, torch.Generator(device).manual_seed(seed))
                substitute.draw_noise(draw, draw)
            for values in self._values(substitute, n, rng):
                if self._local and state.log_std is not None:
                    substitute.use(state.mean, (2 * state.log_std).exp())
                else:
                    substitute.use(values)
                pieces = (move(piece, device) for piece in slices(x, PIECE_ROWS))
                outputs.append(torch.cat([substitute.network.evaluation_pass(piece) for piece in pieces]))
        return torch.stack(outputs), state.hyper

    def _values(self, substitute: Substitute, n: int, rng: torch.Generator) -> Iterable[Tensor]:
        """Flat weights of n draws; few enough are kept for the next prediction, more are made one after the other."""
        state = self._state
        if self._local:
            return [state.mean] * n

        def drawn() -> Iterator[Tensor]:
            return (state.values(substitute.layout, rng) for _ in range(n))

        nbytes = n * state.mean.numel() * state.mean.element_size()
        return drawn() if nbytes > PREPARED_BYTES else self._prepared.of(n, rng, nbytes, lambda: list(drawn()))

    def fixed_form(self, n: int | None, rng: torch.Generator, example: Inputs) -> WeightDraws:
        """The draws that `outputs` makes, of a narrow network where the posterior is of one."""
        if self._local:
            raise TypeError(
                "prediction='local' draws noise for every row anew, so no module without randomness gives it: fit with "
                "prediction='draws'"
            )
        assert n is not None  # there is no closed form
        network = self._state.network(self._network)
        layout = self._state.layout(network)
        draws = (self._state.values(layout, rng) for _ in range(n))
        members = [(network, self._state.rest | layout.whole(values)) for values in draws]
        return WeightDraws(members, self._state.hyper)

    def moments(self, x: Inputs, joint: bool = False) -> None:
        """None: there is no closed form."""
        return None

    def _substitute(self) -> Substitute:
        network = self._state.network(self._network)
        return Substitute(network, self._state.layout(network), self._state.rest)


def _normals_like(rng: torch.Generator, like: Tensor) -> Tensor:
    return torch.randn(like.shape, generator=rng, dtype=like.dtype, device=like.device)


def module_at(state: LayerState, wide: Network, rng: torch.Generator | None) -> nn.Module:
    """A module with the weights of a draw, or at their means without a generator; dense layers stay plain ones."""
    network = state.network(wide)
    layout = state.layout(network)
    parts = dict(layout.split(state.values(layout, rng)))
    places = layout.indices_of()
    few = [name for name, geometry in layout.geometries.items() if places[name] is not None and not geometry.drawn]
    sparse = WeightLayout(
        {name: layout.geometries[name] for name in few},
        {name: layout.counts[name] for name in few},
        torch.cat([layout.indices[:0], *(indices for name in few if (indices := places[name]) is not None)]),
    )
    names, patterns, dense = layout.parameter_names(), layout.patterns(), dict[str, Tensor]()
    for name in layout.counts.keys() - sparse.counts.keys():
        pattern, part = patterns[name], parts[name]
        dense[names[name]] = part.view(layout.geometries[name].shape) if pattern is None else pattern.whole(part)
    if not sparse.counts:
        return network.with_fixed(state.rest | dense).module
    substitute = Substitute(network, sparse, state.rest | dense)
    substitute.use(torch.cat([parts[name] for name in sparse.counts]))
    for layer in substitute.layers.values():
        assert isinstance(layer, SparseLayer)
        layer.settle()
    return substitute.network.module
