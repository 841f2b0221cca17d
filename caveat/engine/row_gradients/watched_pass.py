"""A forward pass that is watched, so that a cotangent can go back to every place where a parameter acts.

    passed = watched_pass(network, params, x, plan)
    passed.gradients(v)                     at every point, for a cotangent v of the outputs' shape
    passed.uses                             what makes each row's gradient of a parameter from that, with its point

A `Tape` watches the torch functions that the module calls. Those that `function_rules` knows leave a record of what the
gradient of each row is computed from (`uses`, `product_uses`); any other function that takes a watched parameter makes
it "unknown". What is unknown gets a copy for every row, w_b = w for row b, in a second pass,

    outputs[b] = f(x_b, w_b),     the gradient of row b by itself = the gradient at w_b,

through `torch.func`, or row by row where torch.func cannot.
"""

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from caveat.batches import Inputs, count_rows, map_tensors, tensors
from caveat.engine.row_gradients.function_rules import RULES
from caveat.engine.row_gradients.product_uses import ProductUse
from caveat.engine.row_gradients.uses import Axis, ChosenEntries, NotRowsError, Record, Use
from caveat.engine.row_gradients.winograd import Winograd
from caveat.engine.torch_settings import plain_attention, process_lock
from caveat.network import Network, Params

__all__ = ["Plan", "Tape", "WatchedPass", "watched_pass"]

_FILTERS = process_lock()  # of Python's warnings, which are the process's and not a thread's


@dataclass(frozen=True)
class Plan:
    """How the gradient of each parameter is computed."""

    known: tuple[str, ...]  # by the rules of `function_rules`
    general: tuple[str, ...]  # by copies
    vectorised: bool  # whether torch.func can make the copies' pass
    axes: dict[str, tuple[Axis, ...]] | None = None  # where the rows are, for every use of a known one; None: find out
    numbers: int = 0  # at the outputs of the layers concerned, for one row
    outputs: int = 0  # of one row
    widest: int = 0  # numbers in the largest tensor of a forward pass, for one row
    last: tuple[str, ...] = ()  # weight and bias, where all that is watched is the linear layer that makes the outputs


def watched_pass(
    network: Network, params: Params, x: Inputs, plan: Plan, winograd: Winograd | None = None, bfloat16: bool = False
) -> "WatchedPass":
    """One forward pass over these rows; `winograd` is worth its while where many follow at the same parameters."""
    rows = count_rows(x)
    tape = Tape({id(params[name]): name for name in plan.known}, rows, plan.axes)
    precision = torch.autocast(network.device.type, torch.bfloat16) if bfloat16 else contextlib.nullcontext()
    with torch.enable_grad(), precision, plain_attention():
        with winograd or contextlib.nullcontext(), tape:
            outputs = network(params, x)
        results, points, uses = [outputs], tape.points, list(zip(tape.uses, tape.point_of, strict=True))
        if plan.general and rows:
            copies = {n: params[n].expand(rows, *params[n].shape).clone() for n in plan.general}
            for name, copied in copies.items():
                uses.append((_Copies(name, rows, "first"), len(points)))
                points.append(copied.requires_grad_())
            results.append(_with_copies(network, params, copies, x, plan.vectorised))
    # Probabilities and Fisher information are too fine for half precision.
    fine = outputs.dtype in (torch.float32, torch.float64)
    return WatchedPass(tape, outputs.detach() if fine else outputs.detach().float(), results, points, uses)


@dataclass(frozen=True)
class WatchedPass:
    """What a forward pass leaves behind."""

    tape: "Tape"
    outputs: Tensor  # [B, ...], without a graph
    results: list[Tensor]  # the outputs with their graph, and again with copies where there are any
    points: list[Tensor]  # where gradients are taken
    uses: list[tuple[Use, int]]  # of parameters, each with its point

    def gradients(self, v: Tensor) -> list[Tensor]:
        """Gradients at every point for a cotangent of the outputs' shape."""
        reached = [result for result in self.results if result.requires_grad]
        if not reached:
            return [torch.zeros_like(point) for point in self.points]
        cotangents = [v.to(result.dtype) for result in reached]
        gradients = torch.autograd.grad(reached, self.points, cotangents, retain_graph=True, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(self.points, gradients, strict=True)]

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
        names = set()
        for use, point in at_risk:
            wanted, given = (use.arranged(gradients[point]).flatten(1) for gradients in (plain, multiplied))
            given = given / powers.repeat_interleave(len(given) // use.rows).unsqueeze(1).to(given.dtype)
            rounding = 0.1 * wanted.abs() + 1e-3 * wanted.abs().max()
            if bool(((given - wanted).abs() > rounding).any()):
                names.add(use.name)
        return names

    def last_layer(self) -> tuple[str, ...]:
        """Weight and bias of the linear layer that makes the outputs, where it is all that is watched; else none."""
        result, uses = self.results[0], [use for use, _ in self.uses]
        if result is not self.tape.watched_output or result._version or len(self.points) > 1 or len(uses) > 2:
            return ()  # something comes after it, perhaps in place, or something else is watched too
        weight = uses[0]
        if not isinstance(weight, ProductUse) or weight.convolution is not None or weight.inputs.ndim != 2:
            return ()
        return tuple(use.name for use in uses)


class Tape(Record, TorchFunctionMode):
    """Records every use of the watched parameters while it is active."""

    def __init__(self, watched: dict[int, str], rows: int, axes: Mapping[str, Sequence[Axis]] | None = None) -> None:
        super().__init__(watched, rows, axes)
        self.unknown: set[str] = set()
        self.last: set[str] = set()  # parameters that the last function to take any took
        self.selects = False  # whether a function picks entries of a tensor that has the rows, and may mix them up
        self.widest = 0  # numbers in the largest result of any function that has the rows, or rows x positions

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Let the function run and record what it does with watched parameters."""
        result = self._called(func, args, kwargs or {})
        self.selects |= func is not F.embedding and self._may_select(tensors((args, kwargs)))
        of_rows = (tensor.numel() for tensor in tensors(result) if self._has_rows(tensor))
        self.widest = max(self.widest, *of_rows, 0)
        return result

    def _may_select(self, given: list[Tensor]) -> bool:
        """Whether one of a function's tensors may be the places or a mask of what it takes from another."""
        return any(t.ndim and not t.is_floating_point() for t in given) and any(
            t.is_floating_point() and self._has_rows(t) for t in given
        )

    def _has_rows(self, tensor: Tensor) -> bool:
        folded = tensor.ndim > 0 and self.rows > 0 and len(tensor) % self.rows == 0
        return folded or self.rows in tensor.shape[:2]

    def _called(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        owned = {name for tensor in tensors((args, kwargs)) if (name := self.name(tensor)) is not None}
        if not owned:
            return func(*args, **kwargs)
        rule = RULES.get(func)
        if rule is not None:
            with contextlib.suppress(NotRowsError):
                found = rule(self, func, *args, **kwargs)
                if found is not None:
                    self.last = owned
                    return found
        result = func(*args, **kwargs)
        if any(id(tensor) not in self.watched for tensor in tensors(result)):
            self.unknown |= owned
            self.last = owned
        return result


@dataclass
class _Copies(Use):
    """A parameter with a copy for every row: the gradient at the copies is what is wanted."""

    def chosen(self, g: Tensor, entries: ChosenEntries) -> Tensor:
        return g.reshape(len(g), -1)[:, entries.index]

    def dense(self, g: Tensor, part: slice) -> Tensor:
        return g[part]


def _with_copies(network: Network, params: Params, copies: Params, x: Inputs, vectorised: bool) -> Tensor:
    """The outputs with parameters of each row's own."""
    batched = [t for t in tensors(x) if t.ndim]

    def one(copies_of_row: Params, *row: Tensor) -> Tensor:
        values = iter(row)
        alone = map_tensors(lambda t: next(values).unsqueeze(0) if t.ndim else t, x)
        return network(params | copies_of_row, alone)[0]

    if vectorised:
        with _FILTERS, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a layer that torch.func runs row by row is slow, not wrong
            return torch.vmap(one)(copies, *batched)
    return torch.stack(
        [one({n: c[i] for n, c in copies.items()}, *(t[i] for t in batched)) for i in range(count_rows(x))]
    )
