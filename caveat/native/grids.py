"""How a layer's inputs and outputs lie in flat grids, in which a step of the kernel is a step of fixed length.

One axis, with kernel k, stride s, padding p, dilation d, reach r = d(k-1): output j reads x_i, i = js - p + d kappa.

    s = 1:  x_i lies at i, pitch = size + max(p, 2p - r): the zeros after a row are also those before the next.
            Output j lies at j and reads j + shift, shift = d kappa - p.
    s > 1:  i + p = s u + phase; x_i lies at u in the row of its phase, pitch = ceil((size + 2p) / s).
            Output j reads the row of phase (d kappa) mod s at j + shift, shift = (d kappa) div s.

Why no test of bounds is needed, neither at the ends of a row nor (pitch and rows alike) at those of an image:
forward, the i that output j < outputs reads lie in [-p, size + p), and beside x there are at least p zeros up to the
next x, as pitch >= size + p; with s > 1 the whole padded row is there. Outputs fit: outputs = size + 2p - r <= pitch.
Backward, x_i takes dy at j = i - shift, which is zero but for real outputs. With s = 1, j lies in [p - r, size + p):
above, size + p <= pitch, so j stays in its row; below, j = -1 ... p - r are the last r - p of the row before, and
zero since outputs + r - p = size + p <= pitch. With s > 1, shift is at most q = r div s, and outputs + q <= pitch
because the last output's last tap lies in the padded row: the last q of a row are zero. Slack at both ends of the
grid's rows serves the first and the last image.

Side by side: with lanes = 16, sixteen rows of the batch take turns, position by position, and all loads are aligned.
A linear layer is the case of one position; its features come in units of sixteen, which are transposed together.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Grid", "Structure"]

LANES = 16
CACHE = 2**17  # numbers of the inputs' grid that may wait in a core's cache (half a megabyte)

Integers = NDArray[np.int32]


@dataclass(frozen=True)
class Axis:
    """One axis of a convolution."""

    size: int
    kernel: int
    stride: int
    padding: int
    dilation: int

    @property
    def reach(self) -> int:
        """From the first to the last input that an output reads."""
        return self.dilation * (self.kernel - 1)

    @property
    def outputs(self) -> int:
        """How many outputs the axis has."""
        return (self.size + 2 * self.padding - self.reach - 1) // self.stride + 1

    @property
    def pitch(self) -> int:
        """The number of positions from a row to the next."""
        if self.stride == 1:
            return self.size + max(self.padding, 2 * self.padding - self.reach)
        return -(-(self.size + 2 * self.padding) // self.stride)

    @property
    def phases(self) -> list[int]:
        """The phases that outputs read, in the order of their rows."""
        return sorted({self.dilation * kappa % self.stride for kappa in range(self.kernel)})

    def taps(self) -> tuple[Integers, Integers]:
        """Row and shift of each position in the kernel."""
        steps = self.dilation * np.arange(self.kernel)
        shift = steps - self.padding if self.stride == 1 else steps // self.stride
        return np.searchsorted(self.phases, steps % self.stride).astype(np.int32), shift.astype(np.int32)

    def places(self) -> tuple[Integers, Integers]:
        """Row (-1: none, as no output reads it) and position of each input."""
        if self.stride == 1:
            return np.zeros(self.size, np.int32), np.arange(self.size, dtype=np.int32)
        at = np.arange(self.size) + self.padding
        row = np.full(self.stride, -1)
        row[self.phases] = np.arange(len(self.phases))
        return row[at % self.stride].astype(np.int32), (at // self.stride).astype(np.int32)


@dataclass(frozen=True, eq=False)
class Grid:
    """The layout for one layer and one shape of inputs; `plan` is what the kernels are given."""

    plan: NDArray[np.int64]
    tables: tuple[Integers, Integers]  # the plan points to them
    outputs: tuple[int, ...]  # shape of a row of the outputs
    rows: tuple[int, int]  # of the inputs' and the outputs' grid
    taps: tuple[Integers, Integers]  # row within a channel, and shift, of each position in the kernel
    key: tuple[int, ...]  # equal for grids that share their structures

    @functools.cached_property
    def address(self) -> int:
        """The address of the plan, as the kernels take it."""
        return int(self.plan.ctypes.data)

    @staticmethod
    @functools.lru_cache(maxsize=256)
    def of(
        shape: tuple[int, ...], stride: tuple[int, ...], padding: tuple[int, ...], dilation: tuple[int, ...],
        groups: int, inputs: tuple[int, ...],
    ) -> "Grid | None":  # fmt: skip
        """Of a layer's weight shape and settings and its inputs' shape [batch, ...]; None if it is too large."""
        if len(shape) == 2:
            return _linear(shape, inputs[0])
        # A 1-D convolution is a 2-D one of height 1.
        settings = ((1, *inputs[2:]), (1, *shape[2:]), (1, *stride), (0, *padding), (1, *dilation))
        across = [Axis(*values) for values in zip(*(s[-2:] for s in settings), strict=True)]
        return _convolution(shape, across[0], across[1], groups * shape[1], inputs)


@dataclass(frozen=True)
class Structure:
    """Non-zeros by the rows of one side: `start` of each row, `offset` of each in the other side's grid, `order`."""

    start: Integers
    offset: Integers
    order: Integers | None = None  # which non-zero each is, where that is not its own number

    @functools.cached_property
    def addresses(self) -> tuple[int, int, int | None]:
        """The addresses of the three arrays, as the kernels take them."""
        return self.start.ctypes.data, self.offset.ctypes.data, None if self.order is None else self.order.ctypes.data

    @staticmethod
    def forward(shape: tuple[int, ...], groups: int, indices: Integers, grid: Grid) -> "Structure":
        """The non-zeros by the outputs that they contribute to."""
        row, shift, _ = _parts(shape, groups, indices, grid)
        per_output = int(np.prod(shape[1:]))
        start = np.searchsorted(indices, np.arange(grid.rows[1] + 1) * per_output)
        return Structure(start.astype(np.int32), row * np.int32(_length(grid)) + shift)

    @staticmethod
    def backward(shape: tuple[int, ...], groups: int, indices: Integers, grid: Grid) -> "Structure":
        """The non-zeros by the rows of the inputs' grid that they read."""
        row, shift, output = _parts(shape, groups, indices, grid)
        # Sixteen bits are sorted by counting, which is many times faster.
        order = np.argsort(row.astype(np.uint16) if grid.rows[0] < 2**16 else row, kind="stable").astype(np.int32)
        start = np.zeros(grid.rows[0] + 1, np.int32)
        np.cumsum(np.bincount(row, minlength=grid.rows[0]), out=start[1:])
        return Structure(start, (output * np.int32(_length(grid)) - shift)[order], order)


def _parts(shape: tuple[int, ...], groups: int, indices: Integers, grid: Grid) -> tuple[Integers, Integers, Integers]:
    """Of each non-zero: the row it reads, its shift, its output."""
    row_of, shift_of = grid.taps
    taps, channels = len(row_of), np.int32(shape[1])
    channel, tap = np.divmod(indices, np.int32(taps)) if taps > 1 else (indices, np.zeros_like(indices))
    output, channel = np.divmod(channel, channels)
    if groups > 1:
        channel = channel + output // np.int32(shape[0] // groups) * channels
    rows = np.int32(1 if len(shape) == 2 else grid.rows[0] // (groups * shape[1]))
    return channel * rows + row_of[tap], shift_of[tap], output


def _length(grid: Grid) -> int:
    return int(grid.plan[4])


def _linear(shape: tuple[int, ...], batch: int) -> Grid | None:
    outputs, features = shape[0], shape[1]
    units = [-(-n // LANES) for n in (features, outputs)]
    chunk = max(1, min(16, CACHE // (max(units) * LANES * LANES)))
    length = _row_length(chunk * LANES)
    table = (np.arange(LANES) * length).astype(np.int32)
    sides = [(unit, LANES, LANES, LANES, 1, n, 1) for unit, n in zip(units, (features, outputs), strict=True)]
    none = np.zeros(1, np.int32)
    head = (batch, LANES, chunk, 1, length, 0)
    return _grid(head, sides, (table, table), (outputs,), (none, none), ())


def _convolution(shape: tuple[int, ...], high: Axis, wide: Axis, channels: int, inputs: tuple[int, ...]) -> Grid | None:
    batch, area = inputs[0], high.pitch * wide.pitch
    if batch < 1 or min(high.size, wide.size, high.outputs, wide.outputs) < 1:
        return None
    phases = len(high.phases) * len(wide.phases)
    positions = area * max(channels * phases, shape[0])
    lanes = LANES if batch >= LANES and positions * LANES <= 3 * CACHE else 1
    chunk = max(1, CACHE // (positions * lanes))
    row_of, shift_of = _outer(high.taps(), wide.taps(), len(wide.phases), wide.pitch)
    slack = -(-int(np.abs(shift_of).max()) * lanes // LANES) * LANES
    length = _row_length(2 * slack + chunk * area * lanes + LANES)
    row, place = _outer(high.places(), wide.places(), len(wide.phases), wide.pitch)
    table = np.where(row < 0, -1, row * length + place * lanes).astype(np.int32)
    table_out = np.add.outer(np.arange(high.outputs) * wide.pitch, np.arange(wide.outputs)).ravel() * lanes
    span, span_out = int(place.max()) + 1, int(table_out[-1]) // lanes + 1
    sides = [
        (channels, phases, table.size, wide.size, wide.stride, channels * table.size, span),
        (shape[0], 1, table_out.size, wide.outputs, 1, shape[0] * table_out.size, span_out),
    ]
    outputs = (shape[0], high.outputs, wide.outputs) if len(shape) == 4 else (shape[0], wide.outputs)
    head = (batch, lanes, chunk, area, length, slack)
    return _grid(
        head, sides, (table, table_out.astype(np.int32)), outputs, (row_of, shift_of * np.int32(lanes)), inputs[2:]
    )


def _outer(
    high: tuple[Integers, Integers], wide: tuple[Integers, Integers], rows: int, pitch: int
) -> tuple[Integers, Integers]:
    """Row and place in two dimensions, from those in each."""
    row = np.add.outer(high[0] * rows, wide[0])
    row[np.logical_or.outer(high[0] < 0, wide[0] < 0)] = -1
    return row.ravel(), np.add.outer(high[1] * pitch, wide[1]).ravel().astype(np.int32)


def _row_length(least: int) -> int:
    """An odd number of cache lines, so that the same place in many rows is not the same place in the cache."""
    return (-(-least // LANES) | 1) * LANES


def _grid(
    head: tuple[int, ...], sides: Sequence[tuple[int, ...]], tables: tuple[Integers, Integers],
    outputs: tuple[int, ...], taps: tuple[Integers, Integers], sizes: tuple[int, ...],
) -> Grid | None:  # fmt: skip
    rows = (sides[0][0] * sides[0][1], sides[1][0] * sides[1][1])
    if max(rows) * head[4] >= 2**31:
        return None
    plan = [*head]
    for side, table in zip(sides, tables, strict=True):
        plan += [*side, table.ctypes.data]
    return Grid(np.array(plan, np.int64), tables, outputs, rows, taps, (head[1], head[4], *sizes))
