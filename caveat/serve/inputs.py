"""What is sent to a service, as inputs of the network: rows of numbers, or of a table's cells by the names of columns.

A request's rows are checked and read as files of such rows are; what cannot be taken is an `InputFault` that says why.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from caveat.data import prepare
from caveat.data.tables import Encoding, Table, read_records, stored_encoding

__all__ = ["InputFault", "NumberRows", "Prepare", "RowReader", "RowsRead", "TableRows"]

Prepare = Callable[[np.ndarray], Tensor]


class InputFault(ValueError):  # noqa: N818 - the name says what it is
    """Inputs that the service cannot take, with what was wrong and what it takes."""


class RowsRead(NamedTuple):
    """Rows of a request as the network takes them, [B, ...], and what is worth saying of how they were read."""

    inputs: Tensor
    notes: tuple[str, ...] = ()


class RowReader(Protocol):
    """How the rows of a request are read."""

    @property
    def expected(self) -> str:
        """What is to be sent, in words."""

    def read(self, rows: Any) -> RowsRead:
        """The inputs of a request's rows; raises an InputFault or a ValueError that says what is wrong with them."""

    def described(self) -> dict[str, Any]:
        """What a row is, as json: its shape or columns, and a made-up example."""


@dataclass(frozen=True)
class NumberRows:
    """Rows of numbers of one shape, `example` is one; `prepare` scales them as the training rows were."""

    shape: tuple[int, ...]
    prepare: Prepare
    example: Any

    @property
    def expected(self) -> str:
        """The shape of the rows."""
        return f"a list of rows, each of shape {list(self.shape)}"

    def read(self, rows: Any) -> RowsRead:
        """Numbers [B, ...], of which none is text, missing or infinite."""
        try:
            given = np.array(rows)
            if given.dtype.kind in "USb":  # numpy would read numbers out of text
                raise ValueError("text, or yes and no")
            numbers = given.astype(np.float64)
        except (ValueError, TypeError, OverflowError) as error:
            raise InputFault(f"inputs are not numbers in rows of one length: {self.expected}") from error
        if numbers.shape[1:] != self.shape or numbers.ndim != 1 + len(self.shape):
            raise InputFault(f"inputs have the shape {list(numbers.shape)}: {self.expected}")
        finite = np.isfinite(numbers).reshape(len(numbers), -1).all(1)
        if not finite.all():
            raise InputFault(f"row {int(np.argmin(finite))} holds NaN or infinity: clean it first")
        return RowsRead(self.prepare(numbers))

    def described(self) -> dict[str, Any]:
        """The shape and the example."""
        return {"input_shape": list(self.shape), "example": self.example}


@dataclass(frozen=True)
class TableRows:
    """Rows of a table: cells by the names of their columns, or in their order; text, dates and blanks as in a file."""

    encoding: Encoding
    preprocessing: dict[str, Any]

    @classmethod
    def of(cls, preprocessing: dict[str, Any]) -> "TableRows | None":
        """The reader of rows like those of a data set, by its preprocessing; None where that is not of a table."""
        encoding = stored_encoding(preprocessing)
        return None if encoding is None else cls(encoding, preprocessing)

    @property
    def expected(self) -> str:
        """The columns, of which a few are named."""
        columns = self.encoding.columns
        named = ", ".join(columns[:5]) + (f" and {len(columns) - 5} more" if len(columns) > 5 else "")
        return f"a list of rows, each an object with the columns {named}"

    def read(self, rows: Any) -> RowsRead:
        """Cells, encoded and scaled as the training rows were."""
        if not isinstance(rows, list) or not all(isinstance(row, dict | list) for row in rows):
            raise InputFault(f"inputs are not rows of a table: send {self.expected}")
        encoded = self.encoding.encode(_table(rows, self.encoding.columns))
        return RowsRead(prepare(encoded.x, self.preprocessing), encoded.notes)

    def described(self) -> dict[str, Any]:
        """The columns, what each takes, and a row of means and first categories."""
        means = iter(self.preprocessing.get("mean", [0.0] * len(self.encoding.inputs)))
        takes, example = {}, {}
        for column in self.encoding.in_order():
            first, *_ = (float(next(means)) for _ in column.inputs)
            takes[column.name], example[column.name] = column.takes, column.typical(first)
        return {"input_shape": [len(takes)], "columns": takes, "example": example}


def _table(rows: Sequence[dict[str, Any] | list[Any]], columns: Sequence[str]) -> Table:
    try:
        return read_records(rows, columns, "the request")
    except ValueError as error:
        raise InputFault(str(error)) from error
