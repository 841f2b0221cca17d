"""Gradients of a network's outputs for each row by itself, of all weights or of chosen ones only.

    jacobian = Jacobian(network, params, x, index)
    row_pass = jacobian.at(x)               one forward pass; row_pass.outputs is [B, ...]
    row_pass.columns(v)                     v^T J for each row: [B, S], the chosen weights only
    row_pass.squares(v)                     sum over rows of (v^T J)^2, for every weight
    row_pass.times(matrix)                  J matrix for each row, [B, D, m]

J[b, d, s] = d outputs[b, d] / d w_s is never held for a batch x outputs x all weights: a cotangent v (of the outputs'
shape) goes back through the network once (`watched_pass`), and each layer computes what is asked of its own gradient.
Parameters of functions that `function_rules` does not know get a copy for every row; which way a parameter takes is
found out on a few rows (`plan_search`).

Where the chosen weights are all of a linear layer, f = W phi + b, that makes the network's outputs, every output's
gradient is phi (`row_pass.features()`), and products with J are products with phi, cheaper by the number of outputs.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor

from caveat.batches import Inputs, map_tensors
from caveat.engine.cost import free_bytes, working_numbers
from caveat.engine.row_gradients.plan_search import check_rows_are_independent, find_plan
from caveat.engine.row_gradients.product_uses import ProductUse
from caveat.engine.row_gradients.uses import ChosenEntries, Use
from caveat.engine.row_gradients.watched_pass import Plan, WatchedPass, watched_pass
from caveat.engine.row_gradients.winograd import Winograd
from caveat.engine.torch_settings import refuse_inference_mode
from caveat.network import Network, Params

__all__ = ["Jacobian", "NotFactoredError", "Plans", "RowPass", "evenly", "one_hot"]


class NotFactoredError(ValueError):
    """A weight has no Kronecker factors: some rows reach it otherwise than the first ones did."""


@dataclass(frozen=True)
class Plans:
    """The plans of one network, by the parameters that they are for, shared by its Jacobians: finding one is costly."""

    by_names: dict[tuple[str, ...], Plan] = field(default_factory=dict)

    def plan(self, network: Network, params: Params, names: tuple[str, ...], x: Inputs) -> Plan:
        """The plan for these parameters, searched for in a pass over a few rows unless it is known."""
        if names not in self.by_names:
            self.by_names[names] = find_plan(network, params, names, x)
        return self.by_names[names]


class Jacobian:
    """Per-row gradients at fixed parameters.

    Args:
        network: the network.
        params: where to differentiate (with buffers, as a draw has them).
        x: a few rows to find the way with.
        index: chosen weights, ascending, as positions in the concatenation of all `network.names`; None for all.
        bfloat16: run the passes in bfloat16.
        plans: plans that were found before, and where a new one is kept.
    """

    def __init__(
        self,
        network: Network,
        params: Params,
        x: Inputs,
        index: Tensor | None = None,
        *,
        bfloat16: bool = False,
        plans: Plans | None = None,
    ) -> None:
        refuse_inference_mode()
        params = {name: _fast_layout(value) for name, value in params.items()}
        self.network, self.params, self.bfloat16 = network, params, bfloat16
        self.sizes = {name: params[name].numel() for name in network.names}
        self.size = sum(self.sizes.values()) if index is None else len(index)
        # For each parameter: where its chosen entries are among all chosen ones, and which of its entries they are.
        self.pieces: dict[str, tuple[slice, ChosenEntries]] = {}
        starts = [0, *accumulate(self.sizes.values())]
        ends = starts if index is None else torch.searchsorted(index, index.new_tensor(starts)).tolist()
        for name, start, low, high in zip(self.sizes, starts, ends, ends[1:], strict=False):
            if index is None:
                self.pieces[name] = (slice(low, high), ChosenEntries(torch.arange(high - low, device=network.device)))
            elif high > low:
                self.pieces[name] = (slice(low, high), ChosenEntries((index[low:high] - start).to(network.device)))
        self.plan = (plans or Plans()).plan(network, params, tuple(self.pieces), x)
        self.order = self._order()
        fixed = Winograd((dict(network.module.named_parameters()) | params).values())
        self.winograd: Winograd | None = fixed if fixed.weights and not bfloat16 else None

    def _order(self) -> Tensor | None:
        """Where the weights of each output are among the chosen ones, [D, I], bias last; see `RowPass.features`."""
        if set(self.plan.last) != set(self.sizes) or self.size < sum(self.sizes.values()):
            return None  # no such layer, or weights that are not of it: never used, but chosen
        outputs, device = len(self.params[self.plan.last[0]]), self.network.device
        places = (self.pieces[name][0] for name in self.plan.last)
        return torch.cat([torch.arange(p.start, p.stop, device=device).reshape(outputs, -1) for p in places], 1)

    def at(self, x: Inputs) -> "RowPass":
        """One forward pass over these rows.

        A layer that sees some of the rows only, or in another order (mixtures of experts), may have looked like any
        other in the first rows: its parameters get copies from then on, row by row, in this Jacobian.
        """
        x = map_tensors(_fast_layout, x)
        passed = self._pass(x, self.plan)
        wrong = passed.tape.unknown | passed.misplaced()
        if not wrong:
            return RowPass(self, passed)
        known = tuple(name for name in self.plan.known if name not in wrong)
        general = tuple(name for name in self.pieces if name not in known)
        numbers = self.plan.numbers + sum(self.sizes[name] for name in wrong)
        plan = replace(self.plan, known=known, general=general, vectorised=False, numbers=numbers, last=())
        passed = self._pass(x, plan)
        if not self.bfloat16:
            check_rows_are_independent(passed.outputs, passed.results[1].detach())
        self.plan, self.order = plan, None  # only now: rows that the network cannot take change nothing
        return RowPass(self, passed)

    def _pass(self, x: Inputs, plan: Plan) -> WatchedPass:
        try:
            return watched_pass(self.network, self.params, x, plan, self.winograd, self.bfloat16)
        except RuntimeError:  # a module that views images as they lie with channels first
            if self.winograd is None:
                raise
            self.winograd = None
            return self._pass(x, plan)

    def rows_at_once(self, columns: int = 0, layers: int = 1) -> int:
        """How many rows a pass should take, going by what it keeps of each.

        That is `columns` gradients of the chosen weights, and `layers` gradients at the layers' outputs; on the way
        through layers that are not differentiated a pass holds a few of its largest tensors.
        """
        on_gpu = self.network.device.type == "cuda"
        room = min(2**31, (free_bytes(self.network.device) or 2**31) // 16) if on_gpu else 0
        by_layers = (room if on_gpu else 2**26) // (4 * max(self.plan.numbers * layers, 1))
        by_columns = (room if on_gpu else 2**28) // (4 * max(self.size * columns, 1))
        by_pass = (room if on_gpu else 2**27) // (4 * 8 * max(self.plan.widest, 1))
        return max(1, min(4096 if on_gpu else 1024, by_layers, by_columns, by_pass))


class RowPass:
    """A forward pass over some rows, ready for cotangents of its outputs."""

    def __init__(self, jacobian: Jacobian, passed: WatchedPass) -> None:
        self.jacobian, self.passed, self.outputs = jacobian, passed, passed.outputs
        self._rows: Tensor | None = None
        self._output_gradients: list[list[Tensor]] | None = None

    def gradients(self, v: Tensor) -> list[Tensor]:
        """The gradients at every point for one cotangent of the outputs' shape, [B, ...]."""
        return self.passed.gradients(v)

    def columns(self, v: Tensor) -> Tensor:
        """v^T J of the chosen weights for each row, [B, S]; in bfloat16 where the passes are."""
        dtype = torch.bfloat16 if self.jacobian.bfloat16 else self.outputs.dtype
        columns = torch.zeros(len(self.outputs), self.jacobian.size, dtype=dtype, device=self.outputs.device)
        self.add_columns(v, columns)
        return columns

    def add_columns(self, v: Tensor, total: Tensor) -> None:
        """Add v^T J of the chosen weights for each row to [B, S], whose type products of matrices have, too."""
        gradients, pieces = self.gradients(v), self.jacobian.pieces
        for use, point in self.passed.uses if len(self.outputs) else ():
            place, entries = pieces[use.name]
            g = gradients[point].to(total.dtype) if isinstance(use, ProductUse) else gradients[point]
            total[:, place].add_(use.columns(g, entries))  # += would copy the sum onto itself

    def rows(self) -> Tensor:
        """J itself, the outputs of a row flattened, [B, D, S]; made once."""
        if self._rows is None:
            d = self.outputs.shape[1:].numel()  # may be another than the plan's: longer sequences
            self._rows = self.outputs.new_zeros(len(self.outputs), d, self.jacobian.size)
            for i, v in enumerate(one_hot(self.outputs)):
                self.add_columns(v, self._rows[:, i])
        return self._rows

    def of_outputs(self, chosen: Tensor) -> "RowPass":
        """The same pass with some of each row's flat outputs only, [B, d]."""
        with torch.enable_grad():
            results = [result.flatten(1)[:, chosen] for result in self.passed.results]
        outputs = self.outputs.flatten(1)[:, chosen]
        return RowPass(self.jacobian, replace(self.passed, outputs=outputs, results=results))

    def features(self) -> Tensor | None:
        """Phi [B, I] (with a one where there is a bias) of outputs W phi + b with all of W and b chosen, else None."""
        if self.jacobian.order is None or self.passed.last_layer() != self.jacobian.plan.last:
            return None
        weight = self.passed.uses[0][0]
        assert isinstance(weight, ProductUse)  # `last_layer` has seen to it
        phi = weight.inputs.to(self.outputs.dtype)
        return torch.cat([phi, torch.ones_like(phi[:, :1])], 1) if len(self.passed.uses) > 1 else phi

    def times(self, matrix: Tensor) -> Tensor:
        """J times a matrix [n, m], the outputs of a row flattened: [B, D, m]."""
        phi, order = self.features(), self.jacobian.order
        if phi is None or order is None:
            return self.rows() @ matrix.to(self.outputs.dtype)
        blocks = matrix.to(phi.dtype)[order.T]  # [I, D, m]
        return (phi @ blocks.flatten(1)).unflatten(1, blocks.shape[1:])

    def squares(self, v: Tensor, names: Iterable[str] | None = None, dtype: torch.dtype | None = None) -> Params:
        """The sum over rows of (v^T J)^2 for every weight of the parameters named, each of the parameter's shape.

        Products of matrices are made in `dtype`, that of the passes unless given.
        """
        gradients = self.gradients(v)
        wanted = self.jacobian.pieces if names is None else names
        squares = {name: torch.zeros_like(self.jacobian.params[name]) for name in wanted}
        for name, places in self.by_name().items():
            if name not in squares or not len(v):
                continue
            at = {point: gradients[point] for _, point in places}
            if dtype is not None and all(isinstance(use, ProductUse) for use, _ in places):
                at = {point: g.to(dtype) for point, g in at.items()}
            if len(places) == 1 and (quick := _one_position(*places[0], at)) is not None:
                total = quick
            else:
                total = torch.zeros((), device=v.device)
                for _, block in self._summed(name, places, [at]):
                    wide = block.float() if block.dtype == torch.bfloat16 else block
                    total = total + wide.square().sum((0, 1))
            squares[name] = total.reshape(self.jacobian.params[name].shape)
        return squares

    def blocks(
        self, cotangents: list[Tensor], names: Iterable[str] | None = None
    ) -> Iterator[tuple[str, slice, Tensor]]:
        """For each parameter and pieces of rows, the gradients of all its weights for several cotangents, [b, D, p]."""
        yield from self._blocks([self.gradients(v) for v in cotangents], names)

    def jacobian_blocks(self, names: Iterable[str]) -> Iterator[tuple[slice, Tensor]]:
        """J of whole parameters for pieces of rows, [b, D, p]."""
        for _, rows, block in self._blocks(self.output_gradients(), names):
            yield rows, block

    def output_gradients(self) -> list[list[Tensor]]:
        """Gradients at every point for one output after the other; made once, for all parameters."""
        if self._output_gradients is None:
            self._output_gradients = [self.gradients(v) for v in one_hot(self.outputs)]
        return self._output_gradients

    def _blocks(
        self, per_cotangent: list[list[Tensor]], names: Iterable[str] | None
    ) -> Iterator[tuple[str, slice, Tensor]]:
        wanted = None if names is None else set(names)
        for name, places in self.by_name().items():
            if wanted is None or name in wanted:
                for rows, block in self._summed(name, places, per_cotangent):
                    yield name, rows, block

    def products(self) -> dict[str, list[tuple[ProductUse, int]]]:
        """Uses of linear and convolutional weights, by parameter, with their points."""
        return {
            name: [(use, point) for use, point in places if isinstance(use, ProductUse)]
            for name, places in self.by_name().items()
            if all(isinstance(use, ProductUse) for use, _ in places)
        }

    def factored(self, name: str) -> list[tuple[ProductUse, int]]:
        """Uses of a weight that has Kronecker factors, with their points; none where it does not act."""
        places = self.by_name().get(name, [])
        if self.has_copies(name):
            raise NotFactoredError(
                f"{name} acts on some of the rows only, or in another order, unlike in the first rows, so it has no "
                "Kronecker factors: use structure='diagonal', or leave it out with parameters="
            )
        return [(use, point) for use, point in places if isinstance(use, ProductUse)]

    def has_copies(self, name: str) -> bool:
        """Whether every row has a copy of the parameter, whose gradients are known and nothing else."""
        return name in self.jacobian.plan.general and name in self.by_name()

    def by_name(self) -> dict[str, list[tuple[Use, int]]]:
        """Every use of a parameter with its point, by the parameter's name."""
        uses_by_name: dict[str, list[tuple[Use, int]]] = {}
        for use, point in self.passed.uses:
            uses_by_name.setdefault(use.name, []).append((use, point))
        return uses_by_name

    def _summed(
        self,
        name: str,
        places: list[tuple[Use, int]],
        per_cotangent: Sequence[Sequence[Tensor] | Mapping[int, Tensor]],
    ) -> Iterator[tuple[slice, Tensor]]:
        """Gradients of one parameter over all its uses, [b, D, p], for pieces of the rows."""
        if not len(self.outputs):
            return
        positions = max(len(use.arranged(self.passed.points[point])) // use.rows for use, point in places)
        on_the_way = max(use.on_the_way(self.passed.points[point]) for use, point in places)
        numbers = max(self.jacobian.sizes[name] * len(per_cotangent), on_the_way) * positions
        step = max(1, working_numbers(self.outputs) // numbers)
        by_cotangent = [
            zip(*(use.blocks(gradients[point], step) for use, point in places), strict=True)
            for gradients in per_cotangent
        ]
        for pieces in zip(*by_cotangent, strict=True):
            sums = [
                functools.reduce(torch.add, (block.reshape(len(block), -1) for _, block in same)) for same in pieces
            ]
            yield pieces[0][0][0], sums[0].unsqueeze(1) if len(sums) == 1 else torch.stack(sums, 1)


def evenly(rows: int, most: int) -> int:
    """The size of equal pieces of at most `most` rows: a last piece of few rows would cost as much as a whole one."""
    return -(-rows // max(1, -(-rows // most)))


def one_hot(outputs: Tensor) -> Iterator[Tensor]:
    """Cotangents of the outputs' shape, each of which picks one output of every row."""
    for d in range(outputs.shape[1:].numel()):
        v = outputs.new_zeros(len(outputs), outputs.shape[1:].numel())
        v[:, d] = 1
        yield v.reshape(outputs.shape)


def _one_position(use: Use, point: int, gradients: Mapping[int, Tensor]) -> Tensor | None:
    """Sum of squares where a weight acts once a row: (g^2)^T a^2, without a gradient for each row."""
    if not isinstance(use, ProductUse) or use.groups > 1 or use.outputs != len(use.weight):
        return None
    g = use.positions(use.arranged(gradients[point]))
    if g.shape[2] != 1 or len(g) != use.rows:
        return None
    a = use.patches(slice(None), g.dtype)
    if g.dtype == torch.bfloat16:
        g, a = g.float(), a.float()
    return g.squeeze(-1).square().T @ a.squeeze(-1).square()


def _fast_layout(tensor: Tensor) -> Tensor:
    """The tensor with channels last where that is faster: images and filters on a GPU."""
    if tensor.device.type != "cuda" or tensor.ndim != 4:
        return tensor
    return tensor.contiguous(memory_format=torch.channels_last)
