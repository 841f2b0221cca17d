"""What a grid will take, before it runs: time and memory of every kind of cell.

The time is that of finished cells of the same data, model and method, where there are some. Else it is the epochs of
the method's training (times its members) at the measured speed of plain training on some of the rows: a lower end for
methods that do more in a step. Methods without epochs (Laplace, HMC) are not known before their first cell is done.
The memory is what the method says of itself, and the test rows under all shifts.
"""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from caveat.bench.cells import Place, task_of
from caveat.bench.checks import check_fits
from caveat.bench.conditions import condition_bytes
from caveat.bench.plan import Cell, Experiment, evaluation_key, is_done
from caveat.data import DataSet
from caveat.engine.cost import words
from caveat.engine.training import Training, steps_per_epoch
from caveat.evaluate.metrics import format_seconds
from caveat.fitting import fit
from caveat.methods import Method, discover
from caveat.storage import CorruptFile, read_json
from caveat.task import Task

__all__ = ["Estimate", "estimate_text", "estimates", "seconds_left", "seconds_of"]

_TIMED_ROWS = 1024


@dataclass(frozen=True)
class Estimate:
    """The cells of one data set, model and method: how many, how long each, how much memory."""

    data: str
    model: str
    method: str
    cells: int
    done: int
    seconds: float | None  # of one cell; None where nothing is known
    source: str  # where that is from
    memory: int | None


def estimates(experiment: Experiment, cells: Sequence[Cell], place: Place) -> list[Estimate]:
    """One estimate for each data set, model and method."""
    check_fits(experiment, cells, place.data_dir)
    groups: dict[tuple[str, str, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.data.label, cell.model, cell.label), []).append(cell)
    loaded: dict[str, DataSet] = {}
    speeds: dict[tuple[str, str], tuple[Task, float]] = {}
    table = []
    for (data, model, method), members in groups.items():
        cell = members[0]
        done = sum(is_done(place.out, c, evaluation_key(experiment, c)) for c in members)
        try:
            if data not in loaded:
                loaded[data] = cell.data.load(place.data_dir)
            if (data, model) not in speeds:
                speeds[data, model] = _speed(cell, loaded[data], place.device)
            task, epoch = speeds[data, model]
            memory = cell.method.memory(task.network) + condition_bytes(loaded[data], cell.problem.shifts)
        except (ValueError, OSError, ImportError) as error:
            table.append(Estimate(data, model, method, len(members), done, None, f"cannot run: {error}", None))
            continue
        measured = [s for c in members if (s := seconds_of(place.out, c)) is not None]
        each = [_epochs(choice.method, task) for choice in cell.candidates]
        epochs = None if None in each else sum(filter(None, each))
        if measured:
            seconds, source = sum(measured) / len(measured), "finished cells"
        elif epochs is not None:
            seconds, source = epochs * epoch, f"{epochs:,} epochs of plain training"
        else:
            seconds, source = None, "not known before its first cell is done"
        table.append(Estimate(data, model, method, len(members), done, seconds, source, memory))
    return table


def estimate_text(table: Sequence[Estimate], jobs: int) -> str:
    """The grid as a table, and its sum."""
    heads = ("data", "model", "method", "cells", "done", "time of each", "memory", "from")
    lines = [
        (e.data, e.model, e.method, str(e.cells), str(e.done), format_seconds(e.seconds), _bytes(e.memory), e.source)
        for e in table
    ]
    widths = [max(len(line[i]) for line in (heads, *lines)) for i in range(len(heads))]
    body = [
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in (heads, *lines)
    ]
    total, done = sum(e.cells for e in table), sum(e.done for e in table)
    left = sum((e.cells - e.done) * (e.seconds or 0.0) for e in table) / jobs
    unknown = sum(e.cells - e.done for e in table if e.seconds is None)
    more = f", and {unknown} cells of unknown time" if unknown else ""
    return "\n".join(
        [*body, "", f"{total} cells, {done} done; about {format_seconds(left)} left{more} ({jobs} at a time)"]
    )


def seconds_of(out: Path, cell: Cell) -> float | None:
    """What a finished cell took, whatever it was scored on."""
    try:
        seconds = read_json(out / "cells" / cell.name / "result.json").get("seconds")
    except (FileNotFoundError, CorruptFile):
        return None
    return float(seconds) if isinstance(seconds, int | float) else None


def seconds_left(known: Sequence[tuple[Cell, float]], left: Sequence[Cell], jobs: int) -> float | None:
    """From the times of finished cells: those of the same kind where there are some, else all of them."""
    if not known:
        return None
    every = [seconds for _, seconds in known]

    def expected(cell: Cell) -> float:
        same = [s for c, s in known if (c.data, c.model, c.label) == (cell.data, cell.model, cell.label)] or every
        return sum(same) / len(same)

    return sum(map(expected, left)) / jobs


def _speed(cell: Cell, data: DataSet, device: torch.device) -> tuple[Task, float]:
    """The task, and the seconds of an epoch of training over all of its rows."""
    _, task = task_of(cell, data, cell.candidates[0])
    some = TensorDataset(*(tensor[:_TIMED_ROWS] for tensor in data.train.tensors))
    _, part = task_of(cell, dataclasses.replace(data, train=some), cell.candidates[0])
    method = discover()["map"](training=Training(epochs=1))
    times = []
    for _ in range(2):  # the first warms up
        began = time.perf_counter()
        fit(part, method, device=device, progress=False)
        times.append(time.perf_counter() - began)
    return task, min(times) * task.n / part.n


def _epochs(method: Method, task: Task) -> int | None:
    """Passes of training over the data that a method's knobs ask for."""
    knobs = {f.name: getattr(method, f.name) for f in dataclasses.fields(method)}  # type: ignore[arg-type]
    training = knobs.get("training")
    if not isinstance(training, Training):
        return None
    steps = steps_per_epoch(task.n, training.batch_size or task.train.batch_size)
    return training.epochs_for(steps) * int(knobs.get("members", 1))


def _bytes(count: int | None) -> str:
    return "–" if count is None else words(count)
