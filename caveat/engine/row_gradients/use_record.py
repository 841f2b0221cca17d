"""What a forward pass leaves behind for gradients of each row: where parameters acted, and points to differentiate at.

A point is a tensor of zeros added to the output of a function that takes a watched parameter. The gradient at the point
is the gradient at that output, whatever is done to the output in place afterwards.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from caveat.engine.row_gradients.uses import Axis, ElementwiseUse, Use

__all__ = ["NotRowsError", "Record"]


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
