"""Tables of published predictions: read, checked, and put in the order of a data set's test rows."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from caveat import data
from caveat.data.readers import read_npz
from caveat.references.row_order import match_inputs, stretch_of_labels

__all__ = ["in_order", "probabilities"]

CLOSE_TO_ONE = 1e-3  # how far a row of published probabilities may be from a sum of one


def probabilities(file: Path, classes: int) -> Tensor:
    """The published probabilities, [chains, rows, classes], each row of them summing to one."""
    values = torch.from_numpy(_array(file, "probs")).double()
    values = values[None] if values.ndim == 2 else values
    if values.ndim != 3 or values.shape[-1] != classes:
        raise ValueError(
            f"{file} holds an array of shape {list(values.shape)}; for {classes} classes it is to be "
            f"[rows, {classes}] or [chains, rows, {classes}]"
        )
    if not bool(torch.isfinite(values).all()) or bool((values < 0).any()):
        raise ValueError(f"{file} holds numbers that are no probabilities: negative, NaN or infinite")
    off = float((values.sum(-1) - 1).abs().max())
    if off > CLOSE_TO_ONE:
        raise ValueError(f"{file} holds no probabilities: a row's sum is {off:.3g} away from 1 (logits, perhaps?)")
    return values / values.sum(-1, keepdim=True)


def in_order(
    probs: Tensor, rows: data.DataSet, inputs: str | Path | None, labels: str | Path | None, first: int | None = None
) -> tuple[Tensor, Tensor]:
    """The probabilities in the order of the data set's test rows, and which of these they are about."""
    if first is not None and (inputs is not None or first < 0):
        raise ValueError(f"first={first} says that rows are in the data set's order from there on: leave out inputs")
    x, y = rows.test.tensors
    published = None if labels is None else torch.from_numpy(_array(Path(labels), "y")).flatten().long()
    count = probs.shape[1]
    if published is not None and len(published) != count:
        raise ValueError(f"{labels} has {len(published)} labels for {count} rows of predictions")
    if inputs is not None:
        given = _array(Path(inputs), "x")
        if len(given) != count:
            raise ValueError(f"{inputs} has {len(given)} inputs for {count} rows of predictions")
        places = match_inputs(x, given)
        mine = (places >= 0).nonzero().flatten()
        if len(mine) < min(count, len(x)):
            raise ValueError(
                f"{len(mine)} of {min(count, len(x))} rows of {rows.name}'s test set were found among the inputs of "
                f"{inputs}: these are of another data set, or were changed by more than a scale and a shift a channel"
            )
        order = places[mine]
    else:
        start = first
        if start is None:
            start = 0 if count == len(y) else None if published is None else stretch_of_labels(y, published)
        if start is None or start + count > len(y):
            raise ValueError(
                f"the predictions are about {count} rows, {rows.name} has {len(y)} test rows, and nothing "
                "says which these are: give the inputs in the order of the predictions (inputs=, --inputs), or, where "
                "they are in the data set's own order, the number of the first (first=, --first)"
            )
        mine, order = torch.arange(start, start + count), torch.arange(count)
    if published is not None and not torch.equal(published[order], y[mine]):
        differ = int((published[order] != y[mine]).sum())
        raise ValueError(
            f"{differ} of {len(mine)} labels differ from {rows.name}'s: the predictions are in another order; give the "
            "inputs in the order of the predictions (inputs=, --inputs)"
        )
    return probs[:, order], mine


def _array(file: Path, key: str) -> np.ndarray:
    """The numbers of a csv or npy file, or those called `key` in an npz file; nothing is unpickled."""
    if not file.is_file():
        raise FileNotFoundError(f"{file} is not a file")
    if file.suffix == ".npz":
        return _numbers(file, read_npz(file, (key,))[key])
    try:
        if file.suffix == ".npy":
            return _numbers(file, np.load(file, allow_pickle=False))
        with file.open(encoding="utf-8") as lines:
            first = lines.readline()
        if not first.strip():
            raise ValueError("its first line is empty")
        comma = "," in first
        return np.loadtxt(file, delimiter="," if comma else None, ndmin=1 if key == "y" else 2)
    except (ValueError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{file} cannot be read as numbers ({error}): give a csv without a heading, npy or npz"
        ) from error


def _numbers(file: Path, values: np.ndarray) -> np.ndarray:
    if values.dtype.kind not in "biuf":
        raise ValueError(f"{file} holds {values.dtype}, not numbers")
    return values
