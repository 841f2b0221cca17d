"""Gradients of a network's outputs for each row by itself, of all weights or of chosen ones only.

    jacobian = Jacobian(network, params, x, index)
    here = jacobian.at(x)                   one forward pass; here.outputs is [B, ...]
    here.columns(v)                         v^T J for each row: [B, S], the chosen weights only
    here.squares(v)                         sum over rows of (v^T J)^2, for every weight
    here.times(matrix)                      J matrix for each row, [B, D, m]

J is never held for a batch x outputs x all weights: a cotangent v (of the outputs' shape) goes back through the network
once, and each layer makes what is asked of its own gradient. Parameters that act in layers that `layer_rules` does not
know get a copy for every row, through `torch.func`, or row by row where torch.func cannot. Which way a parameter goes
is found on a few rows, where its gradient must agree with autograd's for one row alone, at parameters nearby: a layer
that starts at zero would hide those below it.

Where the chosen weights are all of a linear layer, f = W phi + b, that makes the network's outputs, every output's
gradient is phi (`here.features()`), and products with J are products with phi, cheaper by the number of outputs.
"""

import contextlib
import threading
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, count
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from caveat.batches import Inputs, count_rows, map_tensors, tensors
from caveat.engine.cost import free_bytes
from caveat.engine.product_gradients import Product
from caveat.engine.row_gradients import Axis, Chosen, Use
from caveat.engine.tape import Tape
from caveat.engine.winograd import Winograd
from caveat.engine.working_memory import working_numbers
from caveat.network import Network, Params

__all__ = ["Here", "Jacobian", "evenly", "full_precision", "one_hot", "plain_attention", "refuse_inference_mode"]


@dataclass(frozen=True)
class _Plan:
    """How each parameter's gradient is made."""

    known: tuple[str, ...]  # by the rules of `layer_rules`
    general: tuple[str, ...]  # by copies
    vectorised: bool  # whether torch.func can make the copies' pass
    axes: dict[str, tuple[Axis, ...]]  # where the rows are, for every use of a known parameter
    numbers: int = 0  # at the outputs of the layers concerned, for one row
    outputs: int = 0  # of one row
    widest: int = 0  # numbers in the largest tensor of a forward pass, for one row
    last: tuple[str, ...] = ()  # weight and bias, where all that is watched is the linear layer that makes the outputs


def refuse_inference_mode() -> None:
    """Where gradients are needed."""
    if torch.is_inference_mode_enabled():
        raise ValueError("gradients are needed, and torch.inference_mode() makes none: use torch.no_grad() instead")


_PRECISION = threading.RLock()  # held while the settings are changed: they are the process's, not a thread's


@contextlib.contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """For derivatives that are compared: float32 without the ten bits that a GPU's convolutions round to by default.

    Rounding alone would be harmless; but it turns some of the relus over, and the derivatives then differ by far more.
    Afterwards convolutions, recurrent layers and matrix products each hold the setting that they had: one that followed
    `torch.backends.fp32_precision` does so no longer. On another device than a GPU nothing is touched.
    """
    if device.type != "cuda":
        yield
        return
    backends: Any = torch.backends  # its parts are not typed
    settings = backends.cudnn.conv, backends.cudnn.rnn, backends.cuda.matmul
    with _PRECISION:
        before = [setting.fp32_precision for setting in settings]
        for setting in settings:
            setting.fp32_precision = "ieee"
        try:
            yield
        finally:
            for setting, value in zip(settings, before, strict=True):
                setting.fp32_precision = value


class Jacobian:
    """Per-row gradients at fixed parameters.

    Args:
        network: the network.
        params: where to differentiate (with buffers, as a draw has them).
        x: a few rows to find the way with.
        index: chosen weights, ascending, as positions in the concatenation of all `network.names`; None for all.
        bfloat16: run the passes in bfloat16.
    """

    def __init__(
        self, network: Network, params: Params, x: Inputs, index: Tensor | None = None, *, bfloat16: bool = False
    ) -> None:
        refuse_inference_mode()
        params = {name: _fast_layout(value) for name, value in params.items()}
        self.network, self.params, self.bfloat16 = network, params, bfloat16
        self.sizes = {name: params[name].numel() for name in network.names}
        self.size = sum(self.sizes.values()) if index is None else len(index)
        # For each parameter: where its chosen entries are among all chosen ones, and which of its entries they are.
        self.pieces: dict[str, tuple[slice, Chosen]] = {}
        starts = [0, *accumulate(self.sizes.values())]
        ends = starts if index is None else torch.searchsorted(index, index.new_tensor(starts)).tolist()
        for name, start, low, high in zip(self.sizes, starts, ends, ends[1:], strict=False):
            if index is None:
                self.pieces[name] = (slice(low, high), Chosen(torch.arange(high - low, device=network.device)))
            elif high > low:
                self.pieces[name] = (slice(low, high), Chosen((index[low:high] - start).to(network.device)))
        self.winograd: Winograd | None = None  # none while the way is found, which is a single pass
        key = ("jacobian", *self.pieces)
        if key not in network.found:
            self.params = _nearby(params, network.names)
            try:
                with full_precision(network.device):
                    network.found[key] = self._planned(_few_rows(x))
            except CheckpointError as error:  # what is computed again would be at other parameters
                raise ValueError(
                    "the network computes activations again in its backward pass (torch.utils.checkpoint), where the "
                    "gradients of each row cannot be followed: switch gradient checkpointing off in the module"
                ) from error
            self.params = params
        self.plan: _Plan = network.found[key]
        self.order = self._order()
        fixed = Winograd((dict(network.module.named_parameters()) | params).values())
        self.winograd = fixed if fixed.weights and not bfloat16 else None

    def _order(self) -> Tensor | None:
        """Where the weights of each output are among the chosen ones, [D, I], bias last; see `Here.features`."""
        if set(self.plan.last) != set(self.sizes) or self.size < sum(self.sizes.values()):
            return None  # no such layer, or weights that are not of it: never used, but chosen
        outputs, device = len(self.params[self.plan.last[0]]), self.network.device
        places = (self.pieces[name][0] for name in self.plan.last)
        return torch.cat([torch.arange(p.start, p.stop, device=device).reshape(outputs, -1) for p in places], 1)

    def at(self, x: Inputs) -> "Here":
        """One forward pass over these rows.

        A layer that sees some of the rows only, or in another order (mixtures of experts), may have looked like any
        other in the first rows: its parameters get copies from then on, row by row.
        """
        x = map_tensors(_fast_layout, x)
        here = self._pass(x, self.plan, self.bfloat16)
        wrong = here.tape.unknown | here.misplaced()
        if not wrong:
            return here
        known = tuple(name for name in self.plan.known if name not in wrong)
        general = tuple(name for name in self.pieces if name not in known)
        numbers = self.plan.numbers + sum(self.sizes[name] for name in wrong)
        self.plan = replace(self.plan, known=known, general=general, vectorised=False, numbers=numbers, last=())
        self.network.found["jacobian", *self.pieces] = self.plan
        self.order = None
        here = self._pass(x, self.plan, self.bfloat16)
        if not self.bfloat16:
            _check_rows_are_independent(here.outputs, here.results[1].detach())
        return here

    def rows_at_once(self, columns: int = 0, layers: int = 1) -> int:
        """How many rows a pass should take, going by what it keeps of each.

        That is `columns` gradients of the chosen weights, and `layers` gradients at the layers' outputs; on the way
        through layers that are not differentiated a pass holds a few of its largest tensors.
        """
        on_gpu = self.network.device.type == "cuda"
        room = min(2**31, (free_bytes(self.network.device) or 2**31) // 16)  # of a GPU
        by_layers = (room if on_gpu else 2**26) // (4 * max(self.plan.numbers * layers, 1))
        by_columns = (room if on_gpu else 2**28) // (4 * max(self.size * columns, 1))
        by_pass = (room if on_gpu else 2**27) // (4 * 8 * max(self.plan.widest, 1))
        return max(1, min(4096 if on_gpu else 1024, by_layers, by_columns, by_pass))

    def _pass(self, x: Inputs, plan: _Plan, bfloat16: bool = False, find_axes: bool = False) -> "Here":
        rows, device = count_rows(x), self.network.device.type
        tape = Tape({id(self.params[name]): name for name in plan.known}, rows, None if find_axes else plan.axes)
        precision = torch.autocast(device, torch.bfloat16) if bfloat16 else contextlib.nullcontext()
        with torch.enable_grad(), precision, plain_attention():
            try:
                with self.winograd or contextlib.nullcontext(), tape:
                    outputs = self.network(self.params, x)
            except RuntimeError:  # a module that views images as they lie with channels first
                if self.winograd is None:
                    raise
                self.winograd = None
                return self._pass(x, plan, bfloat16, find_axes)
            results, points, uses = [outputs], tape.points, list(zip(tape.uses, tape.point_of, strict=True))
            if plan.general and rows:
                copies = {n: self.params[n].expand(rows, *self.params[n].shape).clone() for n in plan.general}
                for name, copied in copies.items():
                    uses.append((_Copies(name, rows, "first"), len(points)))
                    points.append(copied.requires_grad_())
                results.append(self._with_copies(copies, x, plan.vectorised))
        return Here(self, tape, outputs.detach(), results, points, uses)

    def _with_copies(self, copies: Params, x: Inputs, vectorised: bool) -> Tensor:
        """The outputs with parameters of each row's own."""
        batched = [t for t in tensors(x) if t.ndim]

        def one(own: Params, *row: Tensor) -> Tensor:
            values = iter(row)
            alone = map_tensors(lambda t: next(values).unsqueeze(0) if t.ndim else t, x)
            return self.network(self.params | own, alone)[0]

        if vectorised:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a layer that torch.func runs row by row is slow, not wrong
                return torch.vmap(one)(copies, *batched)
        return torch.stack(
            [one({n: c[i] for n, c in copies.items()}, *(t[i] for t in batched)) for i in range(count_rows(x))]
        )

    def _planned(self, x: Inputs) -> _Plan:
        """Try the rules, then copies, each against autograd's gradient of the second row alone."""
        rows = count_rows(x)
        second = map_tensors(lambda t: t[1:2] if t.ndim else t, x)
        watched = {name: self.params[name].detach().clone().requires_grad_() for name in self.pieces}
        try:
            with torch.enable_grad(), plain_attention():
                alone = self.network(self.params | watched, second)
        except ValueError as error:  # BatchNorm without running statistics
            raise ValueError(
                f"the network cannot take a row by itself, so a row has no gradient of its own: {error}"
            ) from error
        noise = torch.randn((rows, *alone.shape[1:]), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        v = noise.to(alone.device, alone.dtype)
        exact = dict.fromkeys(watched, torch.zeros((), device=alone.device))
        if alone.requires_grad:
            found = torch.autograd.grad(alone, list(watched.values()), v[1:2], allow_unused=True)
            exact |= {n: g for n, g in zip(watched, found, strict=True) if g is not None}
        plan = _Plan(tuple(self.pieces), (), False, {}, 0)
        for vectorised in (True, True, False):  # the rules alone, then with copies of the rest, then row by row
            while True:
                try:
                    here = self._pass(x, plan, find_axes=True)
                except Exception:  # whatever torch.func says that it cannot do; row by row is tried next, and raises
                    if not plan.general or not vectorised:
                        raise
                    break
                _check_rows_are_independent(here.outputs[1:2], alone.detach())
                axes = {name: tuple(found) for name, found in here.tape.found_axes.items()}
                numbers = sum(point.numel() for point in here.points) // rows
                wrong = here.tape.unknown | self._differing(here, v, exact)
                if not wrong:
                    last = here.last_layer()
                    sizes = numbers, alone.numel(), here.tape.widest // rows
                    return _Plan(plan.known, plan.general, plan.vectorised, axes, *sizes, last)
                if wrong <= set(plan.general):
                    break
                rest = tuple(name for name in plan.known if name not in wrong)
                general = tuple(name for name in self.pieces if name not in rest)
                plan = _Plan(rest, general, vectorised, {}, 0)
            plan = _Plan(plan.known, plan.general, False, {}, 0)
        raise ValueError(
            f"the gradients of {', '.join(sorted(wrong)[:3])} differ between a row alone and in a batch: "
            "leave those parameters out with parameters="
        )

    def _differing(self, here: "Here", v: Tensor, exact: Params) -> set[str]:
        """Parameters whose gradient for the second row is not autograd's."""
        found, gradients = {name: torch.zeros_like(self.params[name]) for name in self.pieces}, here.gradients(v)
        for use, point in here.uses:
            g = use.arranged(gradients[point])
            m = len(g) // use.rows
            found[use.name] += use.dense(g, slice(m, 2 * m)).sum(0).reshape(found[use.name].shape)
        norms = _norms([exact[name] for name in found])
        errors = _norms([value - exact[name] for name, value in found.items()])
        tolerance, least = _rounding(v), 1e-4 * max(norms, default=0.0)
        close = [error <= tolerance * max(norm, least) for error, norm in zip(errors, norms, strict=True)]
        return {name for name, is_close in zip(found, close, strict=True) if not is_close}


class Here:
    """A forward pass, ready for cotangents."""

    def __init__(
        self,
        jacobian: Jacobian,
        tape: Tape,
        outputs: Tensor,
        results: list[Tensor],
        points: list[Tensor],
        uses: list[tuple[Use, int]],
    ) -> None:
        self.jacobian, self.tape, self.results, self.points, self.uses = jacobian, tape, results, points, uses
        self._rows: Tensor | None = None
        self._output_gradients: list[list[Tensor]] | None = None
        # Probabilities and Fisher information are too fine for half precision.
        self.outputs = outputs if outputs.dtype in (torch.float32, torch.float64) else outputs.float()

    def gradients(self, v: Tensor) -> list[Tensor]:
        """Gradients at every point for a cotangent of the outputs' shape."""
        reached = [result for result in self.results if result.requires_grad]
        if not reached:
            return [torch.zeros_like(point) for point in self.points]
        cotangents = [v.to(result.dtype) for result in reached]
        found = torch.autograd.grad(reached, self.points, cotangents, retain_graph=True, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(self.points, found, strict=True)]

    def misplaced(self) -> set[str]:
        """Parameters that met rows elsewhere than they were taken to be, where that can happen.

        A cotangent that is multiplied by a power of two of each row's own multiplies the row's gradients, and no
        others, by that power.
        """
        at_risk = [
            (u, p) for u, p in self.uses if not isinstance(u, _Copies) and (u.axis == "folded" or self.tape.selects)
        ]
        if not at_risk or not len(self.outputs):
            return set()
        rng = torch.Generator().manual_seed(0)
        v = torch.randn(self.outputs.shape, generator=rng, dtype=torch.float64).to(self.outputs)
        powers = (2.0 ** (torch.arange(len(v)) % 61 - 30)).to(v)
        plain, multiplied = self.gradients(v), self.gradients(v * powers.reshape(-1, *[1] * (v.ndim - 1)))
        found = set()
        for use, point in at_risk:
            wanted, given = (use.arranged(gradients[point]).flatten(1) for gradients in (plain, multiplied))
            given = given / powers.repeat_interleave(len(given) // use.rows).unsqueeze(1).to(given.dtype)
            rounding = 0.1 * wanted.abs() + 1e-3 * wanted.abs().max()
            if bool(((given - wanted).abs() > rounding).any()):
                found.add(use.name)
        return found

    def columns(self, v: Tensor) -> Tensor:
        """v^T J of the chosen weights for each row, [B, S]; in bfloat16 where the passes are."""
        dtype = torch.bfloat16 if self.jacobian.bfloat16 else self.outputs.dtype
        found = torch.zeros(len(self.outputs), self.jacobian.size, dtype=dtype, device=self.outputs.device)
        self._add_columns(v, found)
        return found

    def _add_columns(self, v: Tensor, found: Tensor) -> None:
        gradients, pieces = self.gradients(v), self.jacobian.pieces
        for use, point in self.uses if len(self.outputs) else ():
            place, entries = pieces[use.name]
            found[:, place].add_(use.columns(gradients[point], entries))  # += would copy the sum onto itself

    def rows(self) -> Tensor:
        """J itself, the outputs of a row flattened, [B, D, S]; made once."""
        if self._rows is None:
            d = self.outputs.shape[1:].numel()  # may be another than the plan's: longer sequences
            self._rows = self.outputs.new_zeros(len(self.outputs), d, self.jacobian.size)
            for i, v in enumerate(one_hot(self.outputs)):
                self._add_columns(v, self._rows[:, i])
        return self._rows

    def of_outputs(self, chosen: Tensor) -> "Here":
        """The same pass with some of each row's flat outputs only, [B, d]."""
        with torch.enable_grad():
            results = [result.flatten(1)[:, chosen] for result in self.results]
        outputs = self.outputs.flatten(1)[:, chosen]
        return Here(self.jacobian, self.tape, outputs, results, self.points, self.uses)

    def last_layer(self) -> tuple[str, ...]:
        """Weight and bias of the linear layer that makes the outputs, where it is all that is watched; else none."""
        result, uses = self.results[0], [use for use, _ in self.uses]
        if result is not self.tape.watched_output or result._version or len(self.points) > 1 or len(uses) > 2:
            return ()  # something comes after it, perhaps in place, or something else is watched too
        weight = uses[0]
        if not isinstance(weight, Product) or weight.convolution is not None or weight.inputs.ndim != 2:
            return ()
        return tuple(use.name for use in uses)

    def features(self) -> Tensor | None:
        """Phi [B, I] (with a one where there is a bias) of outputs W phi + b with all of W and b chosen, else None."""
        if self.jacobian.order is None or self.last_layer() != self.jacobian.plan.last:
            return None
        weight = self.uses[0][0]
        assert isinstance(weight, Product)  # `last_layer` has seen to it
        phi = weight.inputs.to(self.outputs.dtype)
        return torch.cat([phi, torch.ones_like(phi[:, :1])], 1) if len(self.uses) > 1 else phi

    def times(self, matrix: Tensor) -> Tensor:
        """J times a matrix [n, m], the outputs of a row flattened: [B, D, m]."""
        phi, order = self.features(), self.jacobian.order
        if phi is None or order is None:
            return self.rows() @ matrix.to(self.outputs.dtype)
        blocks = matrix.to(phi.dtype)[order.T]  # [I, D, m]
        return (phi @ blocks.flatten(1)).unflatten(1, blocks.shape[1:])

    def squares(self, v: Tensor, names: Iterable[str] | None = None) -> Params:
        """Sum over rows of the squared gradient of every weight (of the parameters named)."""
        gradients = self.gradients(v)
        wanted = self.jacobian.pieces if names is None else names
        found = {name: torch.zeros_like(self.jacobian.params[name]) for name in wanted}
        for name, places in self.by_name().items():
            if name not in found or not len(v):
                continue
            if len(places) == 1 and (quick := _one_position(*places[0], gradients)) is not None:
                total = quick
            else:
                total = torch.zeros((), device=v.device)
                for _, block in self._summed(name, places, [gradients]):
                    wide = block.float() if block.dtype == torch.bfloat16 else block
                    total = total + wide.square().sum((0, 1))
            found[name] = total.reshape(self.jacobian.params[name].shape)
        return found

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

    def products(self) -> dict[str, list[tuple[Product, int]]]:
        """Uses of linear and convolutional weights, by parameter, with their points."""
        return {
            name: [(use, point) for use, point in places if isinstance(use, Product)]
            for name, places in self.by_name().items()
            if all(isinstance(use, Product) for use, _ in places)
        }

    def factored(self, name: str) -> list[tuple[Product, int]]:
        """Uses of a weight that has Kronecker factors, with their points; none where it does not act."""
        places = self.by_name().get(name, [])
        if any(use.name in self.jacobian.plan.general for use, _ in places):
            raise ValueError(
                f"{name} acts on some of the rows only, or in another order, unlike in the first rows, so it has no "
                "Kronecker factors: use structure='diagonal', or leave it out with parameters="
            )
        return [(use, point) for use, point in places if isinstance(use, Product)]

    def by_name(self) -> dict[str, list[tuple[Use, int]]]:
        """Uses and their points, by parameter."""
        found: dict[str, list[tuple[Use, int]]] = {}
        for use, point in self.uses:
            found.setdefault(use.name, []).append((use, point))
        return found

    def _summed(
        self, name: str, places: list[tuple[Use, int]], per_cotangent: list[list[Tensor]]
    ) -> Iterator[tuple[slice, Tensor]]:
        """Gradients of one parameter over all its uses, [b, D, p], for pieces of the rows."""
        if not len(self.outputs):
            return
        positions = max(len(use.arranged(self.points[point])) // use.rows for use, point in places)
        on_the_way = max(use.on_the_way(self.points[point]) for use, point in places)
        numbers = max(self.jacobian.sizes[name] * len(per_cotangent), on_the_way) * positions
        step = max(1, working_numbers(self.outputs) // numbers)
        by_cotangent = [
            zip(*(use.blocks(gradients[point], step) for use, point in places), strict=True)
            for gradients in per_cotangent
        ]
        for pieces in zip(*by_cotangent, strict=True):
            sums = [sum(block.reshape(len(block), -1) for _, block in same) for same in pieces]
            yield pieces[0][0][0], torch.stack(sums, 1)


@dataclass
class _Copies(Use):
    """A parameter with a copy for every row: the gradient at the copies is what is wanted."""

    def chosen(self, g: Tensor, entries: Chosen) -> Tensor:
        return g.reshape(len(g), -1)[:, entries.index]

    def dense(self, g: Tensor, part: slice) -> Tensor:
        return g[part]


def evenly(rows: int, most: int) -> int:
    """The size of pieces that are equal and at most so large: a last piece of few rows costs as much as a whole one."""
    return -(-rows // max(1, -(-rows // most)))


def one_hot(outputs: Tensor) -> Iterator[Tensor]:
    """Cotangents that pick one output of every row after the other."""
    for d in range(outputs.shape[1:].numel()):
        v = outputs.new_zeros(len(outputs), outputs.shape[1:].numel())
        v[:, d] = 1
        yield v.reshape(outputs.shape)


def _one_position(use: Use, point: int, gradients: list[Tensor]) -> Tensor | None:
    """Sum of squares where a weight acts once a row: (g^2)^T a^2, without a gradient for each row."""
    if not isinstance(use, Product) or use.groups > 1 or use.outputs != len(use.weight):
        return None
    g = use.positions(use.arranged(gradients[point]))
    if g.shape[2] != 1 or len(g) != use.rows:
        return None
    a = use.patches(slice(None), g.dtype)
    if g.dtype == torch.bfloat16:
        g, a = g.float(), a.float()
    return g.squeeze(-1).square().T @ a.squeeze(-1).square()


def _few_rows(x: Inputs) -> Inputs:
    """Three rows, or more where another axis is as long; the same one again where there is only one."""
    taken = {length for t in tensors(x) for length in t.shape[1:]}
    chosen = torch.arange(next(n for n in count(3) if n not in taken)) % count_rows(x)
    return map_tensors(lambda t: t[chosen.to(t.device)] if t.ndim else t, x)


def _nearby(params: Params, names: tuple[str, ...]) -> Params:
    """Parameters a tenth away, none of them zero."""
    rng = torch.Generator().manual_seed(1)

    def moved(value: Tensor) -> Tensor:
        noise = 0.1 * torch.randn(value.shape, generator=rng).to(value)
        return value + noise * torch.where(value == 0, torch.ones_like(value), value)

    return params | {name: moved(params[name].detach()) for name in names}


def _rounding(like: Tensor) -> float:
    """The relative difference that other batch sizes may make, by rounding and by relus that it turns over."""
    return 1e-8 if like.dtype == torch.float64 else 1e-2


def _norms(tensors: list[Tensor]) -> list[float]:
    """Read all at once: each reading waits for a GPU."""
    return torch.stack([tensor.norm().double() for tensor in tensors]).tolist() if tensors else []


def _fast_layout(tensor: Tensor) -> Tensor:
    """Channels last where it is faster: images and filters on a GPU."""
    if tensor.device.type != "cuda" or tensor.ndim != 4:
        return tensor
    return tensor.contiguous(memory_format=torch.channels_last)


def _check_rows_are_independent(in_batch: Tensor, alone: Tensor) -> None:
    scale = float(alone.abs().max())
    if not float((in_batch - alone).abs().max()) <= _rounding(alone) * scale + 1e-6:
        raise ValueError(
            "the network's output for a row depends on the other rows of the batch, so a row has no gradient of its "
            "own: use BatchNorm with running statistics, and no operation over the batch axis"
        )


@contextlib.contextmanager
def plain_attention() -> Iterator[None]:
    """Attention by its ordinary operations: torch's fused inference path cannot be differentiated."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
