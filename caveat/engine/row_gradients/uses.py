"""A place where a parameter acts in a forward pass, and from it the parameter's gradient for each row of the batch.

With g the gradient at the output of the function that takes the parameter,

    elementwise:  grad w[j]    = sum_t g[j, t] a[j, t]      a = what w multiplies (1 where it is added); t = positions
    embedding:    grad E[v, d] = sum_t [token_t = v] g[d, t]

for every row by itself, of the whole parameter or of chosen entries. The weights of linear layers and convolutions are
in `product_uses`.

A `Record` holds the uses of a forward pass, each with a point to differentiate at: zeros that were added to the output
of the function. The gradient at the point is g, whatever is done to the output in place afterwards.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from caveat.engine.cost import working_numbers

__all__ = ["Axis", "ChosenEntries", "ElementwiseUse", "LookupUse", "NotRowsError", "Record", "Split", "Use"]

Axis = Literal["first", "second", "folded"]  # where the rows are in a function's tensors; folded is rows x positions


@dataclass
class Use(ABC):
    """One place where a parameter acts."""

    name: str
    rows: int
    axis: Axis

    @abstractmethod
    def chosen(self, g: Tensor, entries: "ChosenEntries") -> Tensor:
        """Gradients of the chosen entries for each row, [N, s], N rows or more."""

    @abstractmethod
    def dense(self, g: Tensor, part: slice) -> Tensor:
        """Gradients of the whole parameter for some of the N rows, [n, *parameter]."""

    def columns(self, g: Tensor, entries: "ChosenEntries") -> Tensor:
        """Gradients of the chosen entries for each row of the batch, [B, s]."""
        return _summed(self.chosen(self.arranged(g), entries), self.rows)

    def blocks(self, g: Tensor, step: int) -> Iterator[tuple[slice, Tensor]]:
        """Gradients of the whole parameter, [b, *parameter], for pieces of `step` rows of the batch."""
        g = self.arranged(g)
        m = len(g) // self.rows
        for start in range(0, self.rows, step):
            stop = min(start + step, self.rows)
            yield slice(start, stop), _summed(self.dense(g, slice(start * m, stop * m)), stop - start)

    def on_the_way(self, g: Tensor) -> int:
        """Numbers that `dense` needs for each of the N rows beside its result."""
        return self.arranged(g)[0].numel()

    def arranged(self, tensor: Tensor) -> Tensor:
        """The tensor with rows (or rows x positions) first."""
        return tensor.transpose(0, 1) if self.axis == "second" else tensor


@dataclass
class ElementwiseUse(Use):
    """A parameter that multiplies something elementwise, or is added to it."""

    parameter: Tensor
    factor: Tensor | None  # what the parameter multiplies, of the output's shape; None for 1
    shape: tuple[int, ...]  # of what acts, aligned with the axes of the output after the first
    first: int = 0  # where only entries from here on act

    def chosen(self, g: Tensor, entries: "ChosenEntries") -> Tensor:
        """The gradients of the chosen entries, taken from those of all entries, which are few."""
        return self.dense(g, slice(None)).reshape(len(g), -1)[:, entries.index]

    def dense(self, g: Tensor, part: slice) -> Tensor:
        """Sums over positions; zero at the entries that do not act here."""
        gradients = g[part] if self.factor is None else g[part] * self.arranged(self.factor)[part].to(g.dtype)
        axes = [i + 1 for i, length in enumerate(self.shape) if length == 1 and gradients.shape[i + 1] > 1]
        gradients = gradients.sum(axes) if axes else gradients
        gradients = gradients.reshape(len(gradients), -1)
        rest = self.parameter.numel() - self.first - gradients.shape[1]
        gradients = F.pad(gradients, [self.first, rest]) if self.first or rest else gradients
        return gradients.reshape(len(gradients), *self.parameter.shape)


@dataclass
class LookupUse(Use):
    """The table of an embedding."""

    table: Tensor
    tokens: Tensor  # [N, *positions]
    ignored: int | None

    def _flat(self, g: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """Tokens [n, T] and gradients [n, T, D], zero at the ignored token."""
        tokens = self.arranged(self.tokens)[part]
        tokens = tokens.reshape(len(tokens), -1)
        g = g[part].reshape(len(tokens), tokens.shape[1], -1)
        return tokens, g if self.ignored is None else g * (tokens != self.ignored).unsqueeze(-1)

    def chosen(self, g: Tensor, entries: "ChosenEntries") -> Tensor:
        """Sums over the positions that hold each chosen token; where many are chosen, added up where their place is."""
        tokens, g = self._flat(g, slice(None))
        if len(entries.index) > self.table.shape[1]:
            return self._added_up(tokens, g, entries.index)
        step = max(1, working_numbers(g) // max(tokens.numel(), 1))
        pieces = []
        index, width = entries.index, self.table.shape[1]
        for v, d in zip((index // width).split(step), (index % width).split(step), strict=True):
            pieces.append((g[:, :, d] * (tokens.unsqueeze(-1) == v)).sum(1))
        return torch.cat(pieces, 1)

    def _added_up(self, tokens: Tensor, g: Tensor, index: Tensor) -> Tensor:
        """The same for an ascending index, at a cost by the tokens of each row and not by the entries chosen."""
        width = self.table.shape[1]
        wanted = (tokens.unsqueeze(-1) * width + torch.arange(width, device=g.device)).flatten(1)  # [n, T D]
        place = torch.searchsorted(index, wanted).clamp_max_(len(index) - 1)
        chosen = torch.where(index[place] == wanted, g.flatten(1), 0.0)
        return g.new_zeros(len(g), len(index)).scatter_add_(1, place, chosen)

    def dense(self, g: Tensor, part: slice) -> Tensor:
        """Gradients added up where their token's row is."""
        tokens, g = self._flat(g, part)
        gradients = g.new_zeros(len(tokens), *self.table.shape)
        return gradients.scatter_add_(1, tokens.unsqueeze(-1).expand(-1, -1, self.table.shape[1]), g)


class ChosenEntries:
    """Chosen entries of a parameter, a flat index [s], and where they are in a weight, found once for all batches.

    The index is ascending.
    """

    def __init__(self, index: Tensor) -> None:
        self.index = index
        self._found: dict[tuple[int, int, int], Split] = {}

    def split(self, width: int, first: int, outputs: int) -> "Split":
        """The entries in a weight with rows of `width` numbers, of which `outputs` rows from `first` on act."""
        key = (width, first, outputs)
        if key not in self._found:
            row, k = self.index // width - first, self.index % width
            inside = (row >= 0) & (row < outputs)
            mine = None if bool(inside.all()) else inside
            row, k = (row, k) if mine is None else (row[mine], k[mine])
            used, number = row.unique(return_inverse=True)
            place = number * width + k
            every = len(place) == len(used) * width and bool((place[1:] > place[:-1]).all())
            self._found[key] = Split(mine, row, k, used, None if every else place)
        return self._found[key]


@dataclass
class Split:
    """Chosen entries as rows of a weight and places in them."""

    mine: Tensor | None  # which entries act, where some do not
    row: Tensor
    k: Tensor  # the place in the row
    used: Tensor  # the rows that have entries
    place: Tensor | None  # of each entry among the numbers of those rows; None where they are all of them, in order


class NotRowsError(Exception):
    """A tensor in which the batch's rows cannot be told apart."""


class Record:
    """Every use of the watched parameters, in the order of the calls.

    Args:
        watched: names of parameters, by the identity of their tensors.
        rows: of the batch.
        axes: where an earlier pass found the rows in the tensors that met each parameter; None to find out.
    """

    def __init__(self, watched: dict[int, str], rows: int, axes: Mapping[str, Sequence[Axis]] | None = None) -> None:
        super().__init__()
        self.watched, self.rows, self.axes = watched, rows, axes
        self.uses: list[Use] = []
        self.points: list[Tensor] = []
        self.point_of: list[int] = []  # for each use, its point
        self.watched_output: Tensor | None = None  # of the last function with a point
        self.found_axes: dict[str, list[Axis]] = {}  # of every use of a parameter, in the order of the calls

    def name(self, tensor: Any) -> str | None:
        """The name of the watched parameter that this tensor is, or None where it is not one."""
        return self.watched.get(id(tensor)) if isinstance(tensor, Tensor) else None

    def axis(self, tensor: Tensor, *parameters: Tensor | None, channels: bool = False) -> Axis:
        """Where the rows are in a tensor that meets these parameters: found from its shape, the same in later passes.

        A later pass may meet a parameter more often (a longer sequence): then as it did last. It may also meet it with
        some of the rows only, which cannot be told apart. The second axis of an image is its channels.
        """
        name = next(name for parameter in parameters if (name := self.name(parameter)) is not None)
        earlier = self.found_axes.setdefault(name, [])
        if tensor.ndim < 2 or (self.axes is not None and name not in self.axes):
            raise NotRowsError
        axis: Axis
        if self.axes is not None:
            known = self.axes[name]
            axis = known[min(len(earlier), len(known) - 1)]
        elif len(tensor) == self.rows:
            axis = "first"
        elif not channels and tensor.ndim > 2 and tensor.shape[1] == self.rows:
            axis = "second"
        else:
            axis = "folded"
        length = tensor.shape[1] if axis == "second" else len(tensor)
        if length != self.rows and (axis != "folded" or length % max(self.rows, 1) or not length):
            raise NotRowsError
        earlier.append(axis)
        return axis

    def add(self, output: Tensor, uses: Iterable[Use]) -> Tensor:
        """Record the uses of a function's parameters, and return its output with a point added to it."""
        point = output.new_zeros(()).expand(output.shape).requires_grad_()  # takes no memory
        self.points.append(point)
        for use in uses:
            self.uses.append(use)
            self.point_of.append(len(self.points) - 1)
        self.watched_output = output + point
        return self.watched_output

    def elementwise(
        self,
        parameter: Tensor | None,
        axis: Axis,
        shape: tuple[int, ...],
        factor: Tensor | None = None,
        first: int = 0,
    ) -> list[Use]:
        """The use of a parameter that is added, or multiplies `factor`; none where it is not a watched one."""
        name = self.name(parameter)
        if parameter is None or name is None:
            return []
        return [ElementwiseUse(name, self.rows, axis, parameter, factor, shape, first)]


def _summed(values: Tensor, rows: int) -> Tensor:
    """Rows x positions summed over the positions."""
    m = len(values) // rows
    return values if m == 1 else values.unflatten(0, (rows, m)).sum(1)
