"""Tables of one's own as data sets, and new rows of such tables as inputs of a posterior.

What is learned of the columns is learned from the training rows and kept in `DataSet.preprocessing`, by which new rows
are read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from caveat.data.dataset import Array, Arrays, DataSet, Likelihood, assemble, listed, prepare, rows_for_testing
from caveat.data.tables import (
    TABLES,
    Encoded,
    Encoding,
    Kind,
    Table,
    learn_encoding,
    plain_numbers,
    read_frame,
    read_table,
    read_target,
    stored_encoding,
)

__all__ = [
    "UNKNOWN",
    "Known",
    "TableInputs",
    "from_frame",
    "is_table",
    "known_of",
    "prepare_table",
    "table_data",
    "table_inputs",
]


class Known(NamedTuple):
    """What is known of data before they are read, as a posterior knows what it was fitted to."""

    target: str | None = None  # the target of a table; else the last column
    kind: Kind | None = None  # of the targets; else by their values
    unit: str | None = None  # that numbers of the target are in; else by their cells
    id: str | None = None  # the column that names the rows, which is no input
    text: tuple[str, ...] = ()  # columns that are categories, whatever they hold
    encoding: Encoding | None = None  # of the inputs of a table; else learned from its training rows
    prepared: Callable[[Array], Tensor] | None = None  # raw inputs as the posterior takes them; else standardised anew


UNKNOWN = Known()


class TableInputs(NamedTuple):
    """Raw inputs [N, K], the names of the rows where they have some, and what is worth saying of how they were read."""

    x: Array
    ids: tuple[str, ...]
    notes: tuple[str, ...]


def known_of(preprocessing: dict[str, Any]) -> Known:
    """What a posterior's preprocessing says of its table."""
    return Known(
        target=preprocessing.get("target"),
        unit=preprocessing.get("target_unit"),
        id=preprocessing.get("id"),
        encoding=stored_encoding(preprocessing),
    )


def from_frame(
    frame: Any,
    *,
    target: str | None = None,
    id: str | None = None,
    text: Sequence[str] = (),
    seed: int = 0,
    name: str = "frame",
) -> DataSet:
    """A data set from a frame of pandas or polars, or from a table of pyarrow, read as a csv of the same cells is.

    Args:
        frame: the rows; the index of a pandas frame is not read.
        target: the column to predict; the last one unless given.
        id: the column that names the rows, which is no input.
        text: columns that are categories although they hold numbers, such as postcodes.
        seed: draws the fifth of the rows that is for testing.
        name: what the data set is called.
    """
    return table_data(
        read_frame(frame, f"the frame {name!r}"), name, name, seed, Known(target, id=id, text=tuple(text))
    )


def prepare_table(rows: Any, preprocessing: dict[str, Any]) -> Tensor:
    """New rows, [N, K], as those of a table were prepared: `posterior.predict(prepare_table(new, data.preprocessing))`.

    The rows are a frame, or the path of a csv or parquet file; columns are found by name, a target need not be there.
    """
    table = read_table(Path(rows)) if isinstance(rows, str | Path) else read_frame(rows)
    known = known_of(preprocessing)
    if known.encoding is None:
        raise ValueError("preprocessing without columns is not of a table: give the preprocessing of its data set")
    return prepare(known.encoding.encode(table).x, preprocessing)


def table_data(table: Table, name: str, source: str, seed: int, known: Known) -> DataSet:
    """The training and test rows of a table, one in five for testing, drawn by `seed`."""
    target = table.header[-1] if known.target is None else known.target
    read = read_target(table.cells((target,))[target], known.kind, known.unit)
    columns = () if known.encoding else _inputs(table, target, known)
    without = len(table) - len(read.rows)
    table = table.rows(read.rows) if without else table
    try:
        is_test = rows_for_testing(read.y, seed, stratify=bool(read.class_names))
    except ValueError as error:
        raise ValueError(f"{table.where}: {error}") from error
    encoding = known.encoding or _learned(table.rows(np.flatnonzero(~is_test).tolist()), columns, known.text)
    x, notes = encoding.encode(table)
    repeated = _repeated(table)
    blank = (f"{without} row{'s' * (without > 1)} without a target left out",) if without else ()
    provenance = {
        "source": source,
        "split": f"random, seed {seed}",
        "columns": list(encoding.columns),
        "inputs": encoding.inputs,
        "target": target,
        "target_unit": read.unit,
        "id": known.id,
        "encoding": dataclasses.asdict(encoding),
        "notes": [*table.notes, *repeated, *blank, *notes],
    }
    likelihood: Likelihood = "categorical" if read.class_names else "gaussian"
    arrays = Arrays(x[~is_test], read.y[~is_test], x[is_test], read.y[is_test])
    return assemble(name, arrays, likelihood, read.class_names, provenance, prepared=known.prepared)


def table_inputs(path: Path, known: Known, width: int) -> TableInputs:
    """Every row of a table without its target: by the names of columns or, where none are known, the first `width`."""
    table = read_table(path)
    if known.encoding is None:
        if len(table.header) not in (width, width + 1):
            raise ValueError(f"{path} has {len(table.header)} columns, the posterior's data have {width} inputs")
        encoded = plain_numbers(table.header[:width]).encode(table)
    else:
        encoded = known.encoding.encode(table)
    ids, notes = _ids(table, known.id, encoded)
    return TableInputs(encoded.x, ids, (*table.notes, *notes))


def is_table(path: Path) -> bool:
    """Whether a path is, by its ending, one of a table."""
    return path.suffix in TABLES


def _ids(table: Table, name: str | None, encoded: Encoded) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if name is None:
        return (), encoded.notes
    if name not in table.header:
        return (), (*encoded.notes, f"{table.where} has no column {name}, so its rows are numbered")
    return tuple(table.cells((name,))[name].texts), encoded.notes


def _inputs(table: Table, target: str, known: Known) -> tuple[str, ...]:
    """The columns that may be inputs: all but the target, the id and those without a name."""
    if known.id == target:
        raise ValueError(f"{table.where}: the column {target} cannot be both the target and the id")
    columns = tuple(name for name in table.header if name not in (target, known.id, ""))
    if not columns:
        raise ValueError(f"{table.where} needs a header with at least one column besides the target")
    table.cells([*columns, *(name for name in (known.id, *known.text) if name is not None)])  # which there must be
    return columns


def _repeated(table: Table) -> tuple[str, ...]:
    """A note on rows that stand more than once: some are trained on and tested on alike."""
    count = len(table) - len(set(zip(*table.columns, strict=True)))
    if not count:
        return ()
    repeats = "1 row repeats another" if count == 1 else f"{count} rows repeat others"
    return (f"{repeats} cell by cell; where one is trained on and the other tested on, scores flatter",)


def _learned(training_rows: Table, columns: tuple[str, ...], text: tuple[str, ...]) -> Encoding:
    encoding = learn_encoding(training_rows, columns, text)
    if not encoding.columns:
        why = [f"{name}: {reason}" for name, reason in encoding.left_out.items()]
        raise ValueError(f"{training_rows.where}: no column can be an input ({listed(why)})")
    nameless = {"": "a column without a name"} if "" in training_rows.header else {}
    return dataclasses.replace(encoding, left_out=nameless | encoding.left_out)
