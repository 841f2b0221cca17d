"""What the cells of a problem are scored on, made once for all cells of a process, and inputs to be looked at.

Shifts and out-of-distribution data are drawn by a fixed seed, whatever the seed of the training: every cell sees the
same rows, so that methods can be compared row by row. Only where each seed draws rows of its own, it draws their
shifts too.
"""

import dataclasses
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from caveat.bench.plan import Problem, Source
from caveat.data import Conditions, DataSet, conditions
from caveat.engine.cost import free_bytes

__all__ = ["condition_bytes", "conditions_of", "plane", "shown_inputs", "spread"]

_KEPT_BYTES = 1 << 30  # of shifted rows that stay in memory everywhere; more where a sixteenth of what is free has room
_SHOWN = 200  # inputs of a condition that are kept to be looked at
Shifts = tuple[tuple[str, tuple[float, ...]], ...]


def conditions_of(problem: Problem, source: Source, data_dir: Path | None) -> Conditions:
    """All that the cells of a problem are scored on, on the data set as a seed sees it."""
    return _conditions(source, problem.shifts, problem.ood, problem.test_rows, data_dir)


@lru_cache(maxsize=2)
def _conditions(
    source: Source, shifts: Shifts, ood: tuple[str, ...], test_rows: int | None, data_dir: Path | None
) -> Conditions:
    data = source.load(data_dir)
    rows = spread(len(data.test), test_rows)
    data = dataclasses.replace(data, test=TensorDataset(*(tensor[rows] for tensor in data.test.tensors)))
    seed = source.seed if source.redraw else 0
    tests = conditions(data, shifts=dict(shifts), ood=ood, data_dir=data_dir, seed=seed)
    inside = tests.inside
    if condition_bytes(data, shifts) < max(_KEPT_BYTES, (free_bytes(torch.device("cpu")) or 0) // 16):
        inside = {name: part if name == "clean" else _in_memory(part) for name, part in inside.items()}
    ood_inputs = {name: part.tensors[0] for name, part in tests.ood.items()}
    few = {name: TensorDataset(inputs[spread(len(inputs), test_rows)]) for name, inputs in ood_inputs.items()}
    return Conditions(data, inside, few)


def spread(count: int, wanted: int | None) -> Tensor:
    """At most `wanted` of `count` rows, evenly spread: the same ones wherever this is asked."""
    if wanted is None or wanted >= count:
        return torch.arange(count)
    return torch.linspace(0, count - 1, wanted, dtype=torch.float64).round().long()


def condition_bytes(data: DataSet, shifts: Shifts) -> int:
    """The memory of the test rows at all severities of all shifts, once they are made."""
    x = data.test.tensors[0]
    return x.numel() * x.element_size() * sum(len(severities) for _, severities in shifts)


def _in_memory(family: dict[float, Any]) -> dict[float, TensorDataset]:
    """The severities of a shift as tensors, for all cells of this process."""
    tensors = {}
    for severity, rows in family.items():
        if not isinstance(rows, TensorDataset):
            x, y = zip(*rows.__getitems__(list(range(len(rows)))), strict=True)
            rows = TensorDataset(torch.stack(x), torch.stack(y))
        tensors[severity] = rows
    return tensors


def plane(data: DataSet) -> Tensor | None:
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


def shown_inputs(tests: Conditions, kept_rows: int) -> dict[str, dict[str, np.ndarray]]:
    """Some inputs of each condition by name, to be looked at: `rows`, and `images` as bytes or `x` as numbers.

    Of a shift only the most severe is kept. They are among the `kept_rows` whose whole predictions are kept.
    """
    parts: dict[str, Any] = {"clean": tests.data.test}
    for name, by_severity in tests.inside.items():
        if name != "clean":
            severity = max(by_severity)
            parts[f"{name} {severity:g}"] = by_severity[severity]
    shown = parts | tests.ood
    return {name: _shown(part, tests.data.preprocessing, kept_rows) for name, part in shown.items()}


def _shown(part: Any, preprocessing: dict[str, Any], kept_rows: int) -> dict[str, np.ndarray]:
    among = spread(len(part), kept_rows)
    rows = among[spread(len(among), _SHOWN)]
    inputs = torch.stack([part[i][0] for i in rows.tolist()])
    if inputs.ndim != 4:
        return {"rows": rows.numpy(), "x": inputs.float().numpy()}
    mean, std = (torch.tensor(preprocessing[key]).view(1, -1, 1, 1) for key in ("mean", "std"))
    pixels = ((inputs * std + mean).clamp(0, 1) * 255).round().to(torch.uint8)  # [K, C, H, W]
    return {"rows": rows.numpy(), "images": pixels.permute(0, 2, 3, 1).numpy()}
