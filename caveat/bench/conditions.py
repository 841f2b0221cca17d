"""What a cell is scored on: the test rows of a data set, clean, shifted, and inputs from outside.

Shifts and outside data are drawn by a fixed seed, whatever the seed of the training: every cell sees the same rows, so
that methods can be compared row by row.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from caveat import data as sets
from caveat.data.ood import MADE_FOR_IMAGES, MADE_FOR_TABLES, OTHER_IMAGES
from caveat.data.shifts import known_shift, shifted

__all__ = [
    "Conditions",
    "Source",
    "check_shift",
    "condition_bytes",
    "conditions",
    "outside_names",
    "plane",
    "shown_inputs",
    "spread",
]

_SEED = 0
_KEPT_BYTES = 1 << 30  # of shifted rows that stay in memory; more of them are made anew for each cell
_SHOWN = 200  # inputs of a condition that are kept to be looked at


@dataclass(frozen=True)
class Source:
    """A data set and the choices that `caveat.data.load` offers."""

    label: str
    name: str
    split: int = 0
    gap: bool = False
    seed: int = 0

    def load(self, data_dir: Path | None) -> sets.DataSet:
        """The data set."""
        return sets.load(self.name, data_dir, split=self.split, gap=self.gap, seed=self.seed)


@dataclass(frozen=True)
class Conditions:
    """A data set, its test rows clean and shifted (as `evaluate` takes them), and inputs from outside."""

    data: sets.DataSet
    inside: dict[str, Any]
    outside: dict[str, TensorDataset]


@lru_cache(maxsize=2)
def conditions(
    source: Source,
    shifts: tuple[tuple[str, tuple[float, ...]], ...],
    ood: tuple[str, ...],
    test_rows: int | None,
    data_dir: Path | None,
) -> Conditions:
    """All that the cells of a data set are scored on; kept for the next cell of this process."""
    data = source.load(data_dir)
    rows = spread(len(data.test), test_rows)
    data = dataclasses.replace(data, test=TensorDataset(*(tensor[rows] for tensor in data.test.tensors)))
    inside: dict[str, Any] = {"clean": data.test}
    small = condition_bytes(data, shifts) < _KEPT_BYTES
    for name, severities in shifts:
        family = shifted(data, name, severities, _SEED)
        inside[name] = {severity: _made(rows) if small else rows for severity, rows in family.items()}
    outside = {name: sets.out_of_distribution(name, data, data_dir, seed=_SEED) for name in ood}
    for name, found in outside.items():
        (inputs,) = found.tensors
        outside[name] = TensorDataset(inputs[spread(len(inputs), test_rows)])
    return Conditions(data, inside, outside)


def spread(count: int, wanted: int | None) -> Tensor:
    """At most `wanted` of `count` rows, evenly spread: the same ones wherever this is asked."""
    if wanted is None or wanted >= count:
        return torch.arange(count)
    return torch.linspace(0, count - 1, wanted, dtype=torch.float64).round().long()


def outside_names() -> list[str]:
    """Every name that inputs from outside may have."""
    return list(dict.fromkeys([*MADE_FOR_IMAGES, *MADE_FOR_TABLES, *OTHER_IMAGES]))


def check_shift(name: str, severities: Sequence[Any]) -> None:
    """Refuse a shift that there is not, or a severity that it does not have."""
    found = known_shift(name)
    if not severities or len(set(severities)) < len(severities):
        raise ValueError(f"must be different severities, as in {list(found.severities)}; got {severities}")
    for severity in severities:
        if isinstance(severity, bool) or not isinstance(severity, int | float):
            raise ValueError(f"severities are numbers ({found.unit}), got {severity!r}")
        found.check(severity)


def condition_bytes(data: sets.DataSet, shifts: tuple[tuple[str, tuple[float, ...]], ...]) -> int:
    """The memory of the test rows at all severities of all shifts, once they are made."""
    x = data.test.tensors[0]
    return x.numel() * x.element_size() * sum(len(severities) for _, severities in shifts)


def _made(rows: Any) -> TensorDataset:
    """Shifted rows made at once, for all cells of this process."""
    x, y = zip(*rows.__getitems__(list(range(len(rows)))), strict=True)
    return TensorDataset(torch.stack(x), torch.stack(y))


def plane(data: sets.DataSet) -> Tensor | None:
    """A grid of inputs to draw predictions over, half a range beyond the training rows; None for more than two numbers.

    [200, 1] along a line, or [3600, 2], 60 by 60, of which the first number changes last.
    """
    x = data.train.tensors[0]
    if x.ndim != 2 or x.shape[1] > 2:
        return None
    low, high = x.amin(0), x.amax(0)
    beyond, points = (high - low) / 2, 200 if x.shape[1] == 1 else 60
    axes = [torch.linspace(float(a), float(b), points) for a, b in zip(low - beyond, high + beyond, strict=True)]
    return torch.cartesian_prod(*axes).reshape(-1, x.shape[1])


def shown_inputs(found: Conditions, kept_rows: int) -> dict[str, dict[str, np.ndarray]]:
    """Some inputs of each condition by name, to be looked at: `rows`, and `images` as bytes or `x` as numbers.

    Of a shift only the most severe is kept. They are among the `kept_rows` whose whole predictions are kept.
    """
    parts: dict[str, Any] = {"clean": found.data.test}
    for name, by_severity in found.inside.items():
        if name != "clean":
            severity = max(by_severity)
            parts[f"{name} {severity:g}"] = by_severity[severity]
    shown = parts | found.outside
    return {name: _shown(part, found.data.preprocessing, kept_rows) for name, part in shown.items()}


def _shown(part: Any, preprocessing: dict[str, Any], kept_rows: int) -> dict[str, np.ndarray]:
    kept = spread(len(part), kept_rows)
    rows = kept[spread(len(kept), _SHOWN)]
    inputs = torch.stack([part[i][0] for i in rows.tolist()])
    if inputs.ndim != 4:
        return {"rows": rows.numpy(), "x": inputs.float().numpy()}
    mean, std = (torch.tensor(preprocessing[key]).view(1, -1, 1, 1) for key in ("mean", "std"))
    pixels = ((inputs * std + mean).clamp(0, 1) * 255).round().to(torch.uint8)  # [K, C, H, W]
    return {"rows": rows.numpy(), "images": pixels.permute(0, 2, 3, 1).numpy()}
