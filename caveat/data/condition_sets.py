"""What a posterior is scored on: the test rows of a data set, clean and shifted, and out-of-distribution inputs.

The command line, the demo and the benchmarks all build their test sets here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import TensorDataset

from caveat.data.dataset import DataSet
from caveat.data.ood import out_of_distribution
from caveat.data.shifts import rotate, shifted
from caveat.files import named_function, names_function

__all__ = ["Conditions", "check_shift_labels", "conditions", "shift_label"]


@dataclass(frozen=True)
class Conditions:
    """A data set, its test rows clean and shifted (as `evaluate` takes them), and out-of-distribution inputs."""

    data: DataSet
    inside: dict[str, Any]
    ood: dict[str, TensorDataset]


def conditions(
    data: DataSet,
    *,
    angles: Sequence[float] = (),
    shifts: Mapping[str, Sequence[float] | None] | None = None,
    ood: Sequence[str] = (),
    data_dir: Path | None = None,
    seed: int = 0,
) -> Conditions:
    """The test sets that are asked for, the clean rows first.

    Args:
        data: the data set whose test rows are shifted.
        angles: degrees to rotate test images by, as the family `rotated`; pixels from beyond the edge are black.
        shifts: names of shifts and their severities; None stands for all severities of a shift. A name may be
            `file.py:function`, where `function(data, severity, seed)` returns the test inputs under that shift.
        ood: names of out-of-distribution inputs, see `out_of_distribution`.
        data_dir: where the data sets of `ood` are.
        seed: draws whatever is random in shifts and out-of-distribution inputs.
    """
    inside: dict[str, Any] = {"clean": data.test}
    x, y = data.test.tensors
    if angles:
        black = data.preprocessing.get("black", 0.0)
        inside["rotated"] = {angle: (rotate(x, angle, fill=black), y) for angle in angles}
    check_shift_labels(list(shifts or {}), ["rotated"] if angles else [])
    for name, severities in (shifts or {}).items():
        if names_function(name):
            if severities is None:
                raise ValueError(f"{name}: a shift of your own has no severities unless they are given")
            change = named_function(name)
            inside[shift_label(name)] = {s: TensorDataset(change(data, s, seed), y) for s in severities}
        else:
            inside[name] = shifted(data, name, None if severities is None else tuple(severities), seed)
    ood_sets = {name: out_of_distribution(name, data, data_dir, seed=seed) for name in ood}
    return Conditions(data, inside, ood_sets)


def shift_label(name: str) -> str:
    """What a shift is called in tables: its name, or that of the function in a file of your own."""
    return name.rpartition(":")[2] if names_function(name) else name


def check_shift_labels(names: Sequence[str], taken: Sequence[str] = ()) -> None:
    """Refuse shifts that would be called the same, or as the clean rows are: one would take the place of the other."""
    by_label = {"clean": "the clean rows"} | {label: f"those that are {label}" for label in taken}
    for name in names:
        other = by_label.setdefault(shift_label(name), name)
        if other != name:
            raise ValueError(
                f"shifts: {name} and {other} would both be called {shift_label(name)!r}: give the function another name"
            )
