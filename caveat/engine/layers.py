"""Where parameters act in a forward pass, layer by layer, and their gradient for each row of the batch.

A `Tape` watches the torch functions that a module calls. Where one of them takes a watched parameter and is known here
(linear, convolution, norms, embedding, attention, adding or multiplying elementwise), it records a `Use`: with g the
gradient at the function's output,

    linear, convolution:  grad W[o, k] = sum_t g[o, t] a[k, t]      a = inputs, or patches of them; t = positions
    norms, elementwise:   grad w[j]    = sum_t g[j, t] a[j, t]      a = what the weight multiplies (1 for a bias)
    embedding:            grad E[v, d] = sum_t [token_t = v] g[d, t]

for every row by itself, all of a tensor's weights or only chosen ones. Any other function that takes a watched
parameter makes it "unknown", and the Jacobian falls back on batched copies of that parameter.
"""

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

__all__ = ["Axis", "Elementwise", "Lookup", "Product", "Tape", "Use", "working_numbers"]

Axis = Literal["first", "second", "folded"]  # where the rows are in a function's tensors; folded is rows x positions

WORKING_NUMBERS = {
    "cpu": 2**21,
    "cuda": 2**28,
}  # in one temporary tensor: 8 MB, which caches hold, and 1 GB, of float32
# Bytes that could be moved in the time of one multiply-add: what a dense product costs against gathering.
BYTES_PER_PRODUCT = {"cpu": 0.4, "cuda": 0.08}


class Chosen:
    """Entries of a parameter (a flat index), and where they are in a weight: found once for all batches."""

    def __init__(self, index: Tensor) -> None:
        self.index = index
        self._found: dict[tuple[int, int, int], _Split] = {}

    def split(self, width: int, first: int, outputs: int) -> "_Split":
        """In rows of `width` numbers, of which `outputs` from `first` on act."""
        key = (width, first, outputs)
        if key not in self._found:
            row, k = self.index // width - first, self.index % width
            inside = (row >= 0) & (row < outputs)
            mine = None if bool(inside.all()) else inside
            row, k = (row, k) if mine is None else (row[mine], k[mine])
            used, place = row.unique(return_inverse=True)
            self._found[key] = _Split(mine, row, k, used, place * width + k)
        return self._found[key]


@dataclass
class _Split:
    mine: Tensor | None  # which entries act, where some do not
    row: Tensor
    k: Tensor  # the place in the row
    used: Tensor  # the rows that have entries
    place: Tensor  # of each entry among the numbers of those rows


@dataclass
class Use(ABC):
    """One place where a parameter acts."""

    name: str
    rows: int
    axis: Axis

    @abstractmethod
    def chosen(self, g: Tensor, entries: Chosen) -> Tensor:
        """Gradients of the chosen entries for each row, [N, s], N rows or more."""

    @abstractmethod
    def dense(self, g: Tensor, part: slice) -> Tensor:
        """Gradients of the whole parameter for some of the N rows, [n, *parameter]."""

    def columns(self, g: Tensor, entries: Chosen) -> Tensor:
        """Gradients of the chosen entries for each row of the batch, [B, s]."""
        return self._folded(self.chosen(self.arranged(g), entries))

    def blocks(self, g: Tensor, step: int) -> Iterator[tuple[slice, Tensor]]:
        """Gradients of the whole parameter, [b, *parameter], for pieces of `step` rows of the batch."""
        g = self.arranged(g)
        m = len(g) // self.rows
        for start in range(0, self.rows, step):
            stop = min(start + step, self.rows)
            found = self.dense(g, slice(start * m, stop * m))
            yield slice(start, stop), found if m == 1 else found.unflatten(0, (stop - start, m)).sum(1)

    def on_the_way(self, g: Tensor) -> int:
        """Numbers that `dense` needs for each of the N rows beside its result."""
        return self.arranged(g)[0].numel()

    def arranged(self, tensor: Tensor) -> Tensor:
        """The tensor with rows (or rows x positions) first."""
        return tensor.transpose(0, 1) if self.axis == "second" else tensor

    def _folded(self, values: Tensor) -> Tensor:
        m = len(values) // self.rows
        return values if m == 1 else values.unflatten(0, (self.rows, m)).sum(1)


@dataclass
class Product(Use):
    """The weight of a linear layer or a convolution (or rows of it, from `first` on)."""

    inputs: Tensor  # [N, *positions, I] or [N, I, *image], as the function took them
    weight: Tensor
    convolution: "Window | None" = None
    first: int = 0
    groups: int = 1
    outputs: int = 0  # how many rows of the weight act here
    _gathered: tuple[_Split, Tensor] | None = field(default=None, repr=False)
    _kept: dict[Any, Tensor] = field(default_factory=dict, repr=False)

    @property
    def width(self) -> int:
        """Weights of one output."""
        return self.weight[0].numel()

    def positions(self, g: Tensor) -> Tensor:
        """An output's gradient as [N, O, T]."""
        return g.flatten(2) if self.convolution else g.reshape(len(g), -1, g.shape[-1]).transpose(1, 2)

    def patches(self, part: slice, dtype: torch.dtype) -> Tensor:
        """What the weight multiplies, [n, groups * K, T]; kept for the next cotangent where there is room."""
        key = (part.start, part.stop, dtype)
        if key in self._kept:
            return self._kept[key]
        found = self._patches(part, dtype)
        if self.convolution is not None and len(self.inputs) * found[:1].numel() <= 2 * working_numbers(found):
            self._kept[key] = found
        return found

    def _patches(self, part: slice, dtype: torch.dtype) -> Tensor:
        x = self.arranged(self.inputs)[part].to(dtype)
        return self.positions(x) if self.convolution is None else self.convolution.patches(x)

    def chosen(self, g: Tensor, entries: Chosen) -> Tensor:
        """By gathering channels and patches, or from dense products of the outputs concerned: whichever moves less."""
        g, split = self.positions(g), entries.split(self.width, self.first, self.outputs)
        if split.mine is None:
            return self._chosen(g, split)
        found = g.new_zeros(len(g), len(entries.index))
        if len(split.row):
            found[:, split.mine] = self._chosen(g, split)
        return found

    def _chosen(self, g: Tensor, split: _Split) -> Tensor:
        n, t = len(g), g.shape[2]
        dense_bytes = len(split.used) * self.width * (8 + BYTES_PER_PRODUCT[g.device.type] * t)
        if self.groups == 1 and 16 * len(split.row) * t > dense_bytes:
            step = max(1, working_numbers(g) // (len(split.used) * self.width + self.width * t))
            pieces = []
            for start in range(0, n, step):
                part = slice(start, start + step)
                whole = g[part][:, split.used] @ self.patches(part, g.dtype).transpose(1, 2)  # [n, used, K]
                pieces.append(whole.flatten(1)[:, split.place])
            return _joined(pieces, 0)
        step = max(1, working_numbers(g) // (n * t))
        keep = len(split.row) <= step
        pieces = []
        for start in range(0, len(split.row), step):
            o, j = split.row[start : start + step], split.k[start : start + step]
            if keep and self._gathered is not None and self._gathered[0] is split:
                a = self._gathered[1]  # the same for every cotangent
            else:
                a = self._gather(o, j, g.dtype)
                self._gathered = (split, a) if keep else None
            pieces.append((g[:, o] * a).sum(-1) if t > 1 else (g[:, o] * a).squeeze(-1))
        return _joined(pieces, 1)

    def _gather(self, row: Tensor, k: Tensor, dtype: torch.dtype) -> Tensor:
        """Chosen patches, [N, s, T]."""
        x = self.arranged(self.inputs)
        if self.convolution is None:
            return self.positions(x)[:, k].to(dtype)
        channels = self.width // self.convolution.size
        group = row // (self.outputs // self.groups)
        return self.convolution.gather(x, group * channels + k // self.convolution.size, k % self.convolution.size).to(
            dtype
        )

    def on_the_way(self, g: Tensor) -> int:
        """The patches."""
        return self.groups * self.width * (super().on_the_way(g) // self.outputs)

    def dense(self, g: Tensor, part: slice) -> Tensor:
        """One product a row; zero at the rows of the weight that do not act here."""
        g = self.positions(g[part])
        a = self.patches(part, g.dtype)
        n, t = len(g), g.shape[2]
        if self.groups > 1:
            g, a = g.reshape(n, self.groups, -1, t), a.reshape(n, self.groups, -1, t)
        found = (g @ a.transpose(-1, -2)).reshape(n, -1, *self.weight.shape[1:])
        if self.outputs == len(self.weight):
            return found
        return F.pad(
            found, [0, 0] * (self.weight.ndim - 1) + [self.first, len(self.weight) - self.first - self.outputs]
        )


@dataclass
class Elementwise(Use):
    """A weight that multiplies something elementwise, or is added to it."""

    factor: Tensor | None  # what the weight multiplies, of the output's shape; None for 1
    shape: tuple[int, ...]  # the parameter's, aligned with the axes of the output after the first
    first: int = 0
    size: int = 0  # of the parameter, where only entries from `first` on act here
    original: tuple[int, ...] = ()  # the parameter's own shape

    def _sums(self, g: Tensor, part: slice) -> Tensor:
        found = g[part] if self.factor is None else g[part] * self.arranged(self.factor)[part].to(g.dtype)
        axes = [i + 1 for i, length in enumerate(self.shape) if length == 1 and found.shape[i + 1] > 1]
        found = found.sum(axes) if axes else found
        return found.reshape(len(found), -1)

    def chosen(self, g: Tensor, entries: Chosen) -> Tensor:
        """All of them: there are few."""
        return self.dense(g, slice(None)).reshape(len(g), -1)[:, entries.index]

    def dense(self, g: Tensor, part: slice) -> Tensor:
        """Sums over positions."""
        found = self._sums(g, part)
        rest = self.size - self.first - found.shape[1]
        found = F.pad(found, [self.first, rest]) if self.first or rest else found
        return found.reshape(len(found), *self.original)


@dataclass
class Lookup(Use):
    """The table of an embedding."""

    tokens: Tensor  # [N, *positions]
    shape: tuple[int, int]
    ignored: int | None

    def _flat(self, g: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """Tokens [n, T] and gradients [n, T, D], zero at the ignored token."""
        tokens = self.arranged(self.tokens)[part]
        tokens = tokens.reshape(len(tokens), -1)
        g = g[part].reshape(len(tokens), tokens.shape[1], -1)
        return tokens, g if self.ignored is None else g * (tokens != self.ignored).unsqueeze(-1)

    def chosen(self, g: Tensor, entries: Chosen) -> Tensor:
        """Sums over the positions that hold each chosen token."""
        tokens, g = self._flat(g, slice(None))
        step = max(1, working_numbers(g) // max(tokens.numel(), 1))
        pieces = []
        index, width = entries.index, self.shape[1]
        for v, d in zip((index // width).split(step), (index % width).split(step), strict=True):
            pieces.append((g[:, :, d] * (tokens.unsqueeze(-1) == v)).sum(1))
        return torch.cat(pieces, 1)

    def dense(self, g: Tensor, part: slice) -> Tensor:
        """Gradients added up where their token's row is."""
        tokens, g = self._flat(g, part)
        found = g.new_zeros(len(tokens), *self.shape)
        return found.scatter_add_(1, tokens.unsqueeze(-1).expand(-1, -1, self.shape[1]), g)


@dataclass(frozen=True)
class Window:
    """How a convolution slides: kernel, stride, padding (before, after) and dilation of each axis."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]

    @property
    def size(self) -> int:
        """Numbers in one channel of the kernel."""
        return math.prod(self.kernel)

    def _padded(self, x: Tensor) -> Tensor:
        return F.pad(x, [p for pair in reversed(self.padding) for p in pair]) if any(map(any, self.padding)) else x

    def _counts(self, padded: Tensor) -> list[int]:
        """Positions along each axis."""
        return [
            (length - d * (k - 1) - 1) // s + 1
            for length, k, s, d in zip(padded.shape[2:], self.kernel, self.stride, self.dilation, strict=True)
        ]

    def _views(self, x: Tensor) -> Iterator[Tensor]:
        """For each offset of the kernel the inputs that it meets, [N, C, *positions]: views of the padded input."""
        padded = self._padded(x)
        counts = self._counts(padded)
        for offset in product(*map(range, self.kernel)):
            cuts = (
                slice(o * d, o * d + (count - 1) * s + 1, s)
                for o, d, s, count in zip(offset, self.dilation, self.stride, counts, strict=True)
            )
            yield padded[(slice(None), slice(None), *cuts)]

    def patches(self, x: Tensor) -> Tensor:
        """All patches, [N, C * size, T]."""
        if x.device.type == "cpu" and len(self.kernel) == 2 and all(a == b for a, b in self.padding):
            pads = tuple(a for a, _ in self.padding)
            return F.unfold(x, self.kernel, self.dilation, pads, self.stride)
        padded = self._padded(x)
        steps = padded.stride()[2:]
        strides = (
            *padded.stride()[:2],
            *(step * d for step, d in zip(steps, self.dilation, strict=True)),
            *(step * s for step, s in zip(steps, self.stride, strict=True)),
        )
        windows = padded.as_strided((*padded.shape[:2], *self.kernel, *self._counts(padded)), strides)
        return windows.reshape(len(x), x.shape[1] * self.size, -1)  # one copy; a GPU's unfold goes image by image

    def gather(self, x: Tensor, channel: Tensor, offset: Tensor) -> Tensor:
        """Rows of the patches, [N, s, T]."""
        order = offset.argsort(stable=True)
        ends = torch.bincount(offset, minlength=self.size).cumsum(0).tolist()
        views = self._views(x[:, channel[order]])  # of what is wanted alone: there may be few among many channels
        pieces = [view[:, start:end].flatten(2) for view, start, end in zip(views, [0, *ends], ends, strict=False)]
        return torch.cat(pieces, 1)[:, order.argsort()]


class _NotRowsError(Exception):
    """A tensor in which the batch's rows cannot be told apart."""


class Tape(TorchFunctionMode):
    """Records every use of the watched parameters while it is active.

    `points` are zeros added to the outputs of the functions concerned: the gradient at a point is the gradient at that
    output, whatever is done to the output in place afterwards.
    """

    def __init__(self, watched: dict[int, str], rows: int, axes: Mapping[str, Sequence[Axis]] | None = None) -> None:
        super().__init__()
        self.watched, self.rows, self.axes = watched, rows, axes
        self.uses: list[Use] = []
        self.points: list[Tensor] = []
        self.point_of: list[int] = []  # for each use, its point
        self.unknown: set[str] = set()
        self.last: set[str] = set()  # parameters that the last function to take any took
        self.watched_output: Tensor | None = None  # of the last function with a point
        self.widest = 0  # numbers in the largest result of any function that has the rows, or rows x positions
        self.found_axes: dict[str, list[Axis]] = {}  # of every use of a parameter, in the order of the calls

    def name(self, tensor: Any) -> str | None:
        """The watched parameter that this is, if it is one."""
        return self.watched.get(id(tensor)) if isinstance(tensor, Tensor) else None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Let the function run; note what it does with watched parameters."""
        result = self._called(func, args, kwargs or {})
        of_rows = (tensor.numel() for tensor in _flat(result) if self._has_rows(tensor))
        self.widest = max(self.widest, *of_rows, 0)
        return result

    def _has_rows(self, tensor: Tensor) -> bool:
        folded = tensor.ndim > 0 and self.rows > 0 and len(tensor) % self.rows == 0
        return folded or self.rows in tensor.shape[:2]

    def _called(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        owned = {name for tensor in _flat((args, kwargs)) if (name := self.name(tensor)) is not None}
        if not owned:
            return func(*args, **kwargs)
        rule = RULES.get(func)
        if rule is not None:
            with contextlib.suppress(_NotRowsError):
                found = rule(self, func, *args, **kwargs)
                if found is not None:
                    self.last = owned
                    return found
        result = func(*args, **kwargs)
        if any(id(tensor) not in self.watched for tensor in _flat(result)):
            self.unknown |= owned
            self.last = owned
        return result

    def axis(self, tensor: Tensor, *parameters: Tensor | None, channels: bool = False) -> Axis:
        """Where the rows are in a tensor that meets these parameters: found from its shape, the same in later passes.

        A later pass may meet a parameter more often (a longer sequence): then as it did last. The second axis of an
        image is its channels.
        """
        name = next(name for parameter in parameters if (name := self.name(parameter)) is not None)
        earlier = self.found_axes.setdefault(name, [])
        if tensor.ndim < 2 or (self.axes is not None and name not in self.axes):
            raise _NotRowsError
        found: Axis
        if self.axes is not None:
            known = self.axes[name]
            found = known[min(len(earlier), len(known) - 1)]
        elif len(tensor) == self.rows:
            found = "first"
        elif not channels and tensor.ndim > 2 and tensor.shape[1] == self.rows:
            found = "second"
        elif len(tensor) % self.rows == 0:
            found = "folded"
        else:
            raise _NotRowsError
        earlier.append(found)
        return found

    def record(self, output: Tensor, uses: Iterable[Use]) -> Tensor:
        """The output with a point added to it."""
        point = output.new_zeros(()).expand(output.shape).requires_grad_()  # takes no memory
        self.points.append(point)
        for use in uses:
            self.uses.append(use)
            self.point_of.append(len(self.points) - 1)
        self.watched_output = output + point
        return self.watched_output

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, first: int, count: int, first_bias: int | None = None
    ) -> Tensor:
        """Rows `first` to `first + count` of a linear map; its biases may start elsewhere."""
        start = first if first_bias is None else first_bias
        output = F.linear(
            x,
            weight if count == len(weight) else weight[first : first + count],
            bias if bias is None or count == len(bias) else bias[start : start + count],
        )
        if self.name(weight) is None and self.name(bias) is None:
            return output
        axis = self.axis(x, weight, bias)
        uses: list[Use] = []
        if (name := self.name(weight)) is not None:
            uses.append(Product(name, self.rows, axis, x.detach(), weight, first=first, outputs=count))
        if bias is not None and (name := self.name(bias)) is not None:
            shape = (*[1] * (output.ndim - 2), count)
            uses.append(Elementwise(name, self.rows, axis, None, shape, start, len(bias), tuple(bias.shape)))
        return self.record(output, uses)


def _joined(pieces: list[Tensor], axis: int) -> Tensor:
    """The pieces along an axis; a single one without a copy."""
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, axis)


def working_numbers(like: Tensor) -> int:
    """How many numbers a temporary tensor may hold."""
    return WORKING_NUMBERS[like.device.type]


def _flat(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _flat(item)
    elif isinstance(value, dict):
        yield from _flat(list(value.values()))


def _linear(tape: Tape, func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    if tape.name(input) is not None or weight.ndim != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        return None
    return tape.linear(input, weight, bias, 0, len(weight))


def _convolution(
    tape: Tape,
    func: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    axes = weight.ndim - 2
    if tape.name(input) is not None or input.ndim != weight.ndim:
        return None
    output = func(input, weight, bias, stride, padding, dilation, groups)
    dilations = _each(dilation, axes)
    if isinstance(padding, str):
        reach = [d * (k - 1) for d, k in zip(dilations, weight.shape[2:], strict=True)]
        pads = tuple((r // 2, r - r // 2) if padding == "same" else (0, 0) for r in reach)
    else:
        pads = tuple((p, p) for p in _each(padding, axes))
    window = Window(tuple(weight.shape[2:]), _each(stride, axes), pads, dilations)
    axis = tape.axis(input, weight, bias, channels=True)
    uses: list[Use] = []
    if (name := tape.name(weight)) is not None:
        x = input.detach()
        uses.append(Product(name, tape.rows, axis, x, weight, convolution=window, groups=groups, outputs=len(weight)))
    if bias is not None and (name := tape.name(bias)) is not None:
        uses.append(_added(tape, name, bias, axis, (len(bias), *[1] * axes)))
    return tape.record(output, uses)


def _added(tape: Tape, name: str, bias: Tensor, axis: Axis, shape: tuple[int, ...]) -> Elementwise:
    return Elementwise(name, tape.rows, axis, None, shape, 0, bias.numel(), tuple(bias.shape))


def _normalised(
    tape: Tape,
    output: Tensor,
    plain: Callable[[], Tensor],
    weight: Tensor | None,
    bias: Tensor | None,
    shape: tuple[int, ...],
    channels: bool = False,
) -> Tensor:
    """A norm layer: `plain` gives what it makes without weight and bias."""
    axis = tape.axis(output, weight, bias, channels=channels)
    uses: list[Use] = []
    if weight is not None and (name := tape.name(weight)) is not None:
        with torch.no_grad():
            factor = plain()
        uses.append(Elementwise(name, tape.rows, axis, factor, shape, 0, weight.numel(), tuple(weight.shape)))
    if bias is not None and (name := tape.name(bias)) is not None:
        uses.append(_added(tape, name, bias, axis, shape))
    return tape.record(output, uses)


def _batch_norm(
    tape: Tape,
    func: Any,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *rest: Any,
    **named: Any,
) -> Tensor | None:
    if tape.name(input) is not None:
        return None
    output = func(input, running_mean, running_var, weight, bias, *rest, **named)
    return _normalised(
        tape,
        output,
        lambda: func(input, running_mean, running_var, None, None, *rest, **named),
        weight,
        bias,
        (input.shape[1], *[1] * (input.ndim - 2)),
        channels=True,
    )


def _group_norm(
    tape: Tape, func: Any, input: Tensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Tensor | None:
    if tape.name(input) is not None:
        return None
    output = func(input, num_groups, weight, bias, eps)
    shape = (input.shape[1], *[1] * (input.ndim - 2))
    return _normalised(
        tape, output, lambda: func(input, num_groups, None, None, eps), weight, bias, shape, channels=True
    )


def _layer_norm(
    tape: Tape, func: Any, input: Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Tensor | None:
    if tape.name(input) is not None:
        return None
    output = func(input, normalized_shape, weight, bias, eps)
    shape = (*[1] * (input.ndim - 1 - len(normalized_shape)), *normalized_shape)
    return _normalised(tape, output, lambda: func(input, normalized_shape, None, None, eps), weight, bias, shape)


def _rms_norm(
    tape: Tape, func: Any, input: Tensor, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> Tensor | None:
    if tape.name(input) is not None:
        return None
    output = func(input, normalized_shape, weight, eps)
    shape = (*[1] * (input.ndim - 1 - len(normalized_shape)), *normalized_shape)
    return _normalised(tape, output, lambda: func(input, normalized_shape, None, eps), weight, None, shape)


def _embedding(
    tape: Tape,
    func: Any,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor | None:
    if max_norm is not None or scale_grad_by_freq:
        return None
    output = func(input, weight, padding_idx)
    ignored = None if padding_idx is None else padding_idx % len(weight)
    name = tape.name(weight)
    assert name is not None  # the only parameter it can take
    shape = (weight.shape[0], weight.shape[1])
    return tape.record(output, [Lookup(name, tape.rows, tape.axis(output, weight), input, shape, ignored)])


def _combined(tape: Tape, func: Any, input: Any, other: Any, multiplied: bool) -> Tensor | None:
    """Adding or multiplying elementwise with one watched parameter that does not vary over rows."""
    weight, x = (input, other) if tape.name(input) is not None else (other, input)
    name = tape.name(weight)
    if name is None or tape.name(x) is not None or not isinstance(x, Tensor):
        return None
    output: Tensor = func(input, other)
    missing = output.ndim - weight.ndim
    if output.ndim < 2 or missing < 0 or len(output) != tape.rows or (missing == 0 and weight.shape[0] != 1):
        return None
    shape = (*[1] * (missing - 1), *weight.shape) if missing else tuple(weight.shape[1:])
    factor = x.detach().expand_as(output) if multiplied else None
    axis = tape.axis(output, weight)
    use = Elementwise(name, tape.rows, axis, factor, shape, 0, weight.numel(), tuple(weight.shape))
    return tape.record(output, [use])


def _add(tape: Tape, func: Any, input: Any, other: Any, **named: Any) -> Tensor | None:
    return None if named else _combined(tape, func, input, other, multiplied=False)


def _multiply(tape: Tape, func: Any, input: Any, other: Any, **named: Any) -> Tensor | None:
    return None if named else _combined(tape, func, input, other, multiplied=True)


def _attention(
    tape: Tape,
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    *rest: Any,
    **named: Any,
) -> tuple[Tensor, Tensor | None] | None:
    """The projections as linear maps of their own; torch's function does what is between, with identities for them."""
    if rest or any(tape.name(t) is not None for t in (query, key, value, bias_k, bias_v)):
        return None
    e = embed_dim_to_check
    weights = [named.pop(f"{which}_proj_weight", None) for which in "qkv"]
    if named.pop("use_separate_proj_weight", False):
        parts = [
            tape.linear(x, w, in_proj_bias, 0, e, first_bias=i * e)
            for i, (x, w) in enumerate(zip((query, key, value), weights, strict=True))
        ]
    elif in_proj_weight is None:
        return None
    elif query is key and key is value:
        parts = list(tape.linear(query, in_proj_weight, in_proj_bias, 0, 3 * e).chunk(3, -1))
    else:
        parts = [tape.linear(x, in_proj_weight, in_proj_bias, i * e, e) for i, x in enumerate((query, key, value))]
    same = torch.eye(e, dtype=query.dtype, device=query.device)
    mixed, attention = func(
        *parts,
        e,
        num_heads,
        None,
        None,
        bias_k,
        bias_v,
        add_zero_attn,
        dropout_p,
        same,
        None,
        use_separate_proj_weight=True,
        q_proj_weight=same,
        k_proj_weight=same,
        v_proj_weight=same,
        **named,
    )
    return tape.linear(mixed, out_proj_weight, out_proj_bias, 0, e), attention


def _each(value: Any, axes: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * axes if len(values) == 1 else values


RULES: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    F.conv1d: _convolution,
    F.conv2d: _convolution,
    F.conv3d: _convolution,
    F.batch_norm: _batch_norm,
    F.instance_norm: _batch_norm,
    F.group_norm: _group_norm,
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    F.embedding: _embedding,
    F.multi_head_attention_forward: _attention,
    torch.add: _add,
    Tensor.add: _add,
    Tensor.__add__: _add,
    Tensor.__radd__: _add,
    torch.mul: _multiply,
    Tensor.mul: _multiply,
    Tensor.__mul__: _multiply,
    Tensor.__rmul__: _multiply,
}
