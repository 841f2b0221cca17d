"""Every method against the baseline, pair by pair, with intervals; and ranks over shifts.

Pairs are of the same data, model and training seed, scored on the same rows. A shift's severities are averaged row by
row first: they are the same inputs. Scores that are means over rows (NLL, Brier, accuracy, CRPS) and the AUROC have
intervals over seeds and rows, see `caveat.evaluate.comparison`; with one seed over rows, which is said. Calibration
errors and areas are no means over rows: theirs is a t over seeds, which speaks of these test rows; one seed gives none.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from caveat.bench.cell_files import SavedCell, read_cell
from caveat.bench.results import Result, Row, mean_over_seeds, role_of
from caveat.evaluate.comparison import Interval, crossed_interval, seeds_interval
from caveat.evaluate.metrics import METRICS, placements

__all__ = ["comparisons", "ranks"]

ROW_SCORES = {  # metric -> the array of scores/*.npz, and the factor that makes the metric of it
    "nll": ("log_prob", -1),
    "brier": ("brier", 1),
    "accuracy": ("correct", 1),
    "crps": ("crps", 1),
}
SEED_SCORES = ("joint_nll", "ece", "marginal_calibration_error", "risk_coverage_area", "rmse", "calibration_error")
OOD_SCORES = {"auroc_entropy": "entropy", "auroc_variance": "variance", "auroc_epistemic": "epistemic"}
COMPARED = {*ROW_SCORES, *SEED_SCORES, *OOD_SCORES}


Reader = Callable[[Path, str], dict[str, np.ndarray]]  # the numbers of every row of a part of a cell
_FILES = 256  # of rows that are in memory at a time


class Pair(NamedTuple):
    """A method's cell and the baseline's, of the same data, model and seed."""

    ours: SavedCell
    theirs: SavedCell


def comparisons(results: Sequence[Result], baseline: str) -> list[Row]:
    """Every method against the baseline: on each condition, and on each shift with its severities averaged."""
    groups: dict[tuple[str, str, str], dict[int, Result]] = {}
    for result in results:
        cell = result.cell
        groups.setdefault((cell.data.label, cell.model, cell.label), {})[cell.seed] = result
    table = []
    for (data, model, label), by_seed in groups.items():
        others = groups.get((data, model, baseline), {})
        pairs = [Pair(by_seed[seed].saved, others[seed].saved) for seed in by_seed if seed in others]
        if label == baseline or not pairs:
            continue
        redrawn = next(iter(by_seed.values())).cell.data.redraw
        read = lru_cache(maxsize=_FILES)(_read)  # the same files are read for every metric
        for names, where in _conditions(pairs[0].ours):
            for metric, interval, rows in _gains(pairs, names, where["role"], redrawn, read):
                who = {"data": data, "model": model, "method": label, "baseline": baseline}
                size = {"gain": interval.gain, "low": interval.low, "high": interval.high}
                counts = {"seeds": len(pairs), "rows": rows, "over": interval.over, "verdict": interval.verdict}
                table.append(who | where | {"metric": metric} | size | counts)
    return table


def _read(folder: Path, name: str) -> dict[str, np.ndarray]:
    return read_cell(folder).rows(name)


def _conditions(saved: SavedCell) -> list[tuple[list[str], Row]]:
    """The names of the parts that go together: each alone, and those of a shift at all severities."""
    groups: list[tuple[list[str], Row]] = []
    families: dict[str, list[str]] = {}
    for part in saved.parts:
        where = {"shift": part["family"], "severity": part["severity"], "severities": 1, "role": role_of(part)}
        groups.append(([part["name"]], where))
        if where["role"] == "shift":
            families.setdefault(part["family"], []).append(part["name"])
    for family, names in families.items():
        groups.append((names, {"shift": family, "severity": None, "severities": len(names), "role": "shift"}))
    return groups


def _gains(
    pairs: Sequence[Pair], names: Sequence[str], role: str, redrawn: bool, read: Reader
) -> list[tuple[str, Interval, int]]:
    """Every metric of some parts: its name, the interval, and how many rows it is over.

    Where each seed has rows of its own, rows and seeds are not crossed, and the interval is over seeds.
    """
    measured = pairs[0].ours.part(names[0])["metrics"]
    gains: list[tuple[str, Interval, int]] = []
    for metric in measured:
        if metric in ROW_SCORES and role != "ood":
            by_seed = [np.mean([_row_gain(pair, name, metric, read) for name in names], axis=0) for pair in pairs]
            gains.append((metric, _interval([by_seed], redrawn), len(by_seed[0])))
        elif metric in OOD_SCORES and role == "ood":
            sides = [_placement_gains(pair, names[0], OOD_SCORES[metric], read) for pair in pairs]
            layouts = [list(side) for side in zip(*sides, strict=True)]
            gains.append((metric, _interval(layouts, redrawn), sum(len(side[0]) for side in layouts)))
        elif metric in SEED_SCORES:
            each = [
                [_value(ours, name, metric) - _value(theirs, name, metric) for name in names] for ours, theirs in pairs
            ]
            interval = seeds_interval(METRICS[metric].sign * np.mean(each, axis=1))
            gains.append((metric, interval, pairs[0].ours.part(names[0])["rows"]))
    return gains


def _interval(layouts: Sequence[Sequence[np.ndarray]], redrawn: bool) -> Interval:
    """Of gains by seed and row; several layouts, of one mean, are several sets of rows."""
    if redrawn and len(layouts[0]) > 1:
        return seeds_interval(np.array([gains.mean() for gains in layouts[0]]))
    return crossed_interval([np.stack(list(gains)) for gains in layouts])


def _row_gain(pair: Pair, name: str, metric: str, read: Reader) -> np.ndarray:
    """Gains of each row, [N]; the decisions of one row are averaged."""
    array, factor = ROW_SCORES[metric]
    ours, theirs = (read(saved.folder, name) for saved in pair)
    if not np.array_equal(ours["rows"], theirs["rows"]):
        raise ValueError(f"{pair.ours.folder} and {pair.theirs.folder} were scored on different rows of {name!r}")
    with np.errstate(invalid="ignore"):  # two log probabilities of zero
        gain = METRICS[metric].sign * factor * (ours[array].astype(np.float64) - theirs[array].astype(np.float64))
    _, row = np.unique(ours["rows"], return_inverse=True)
    return np.bincount(row, gain) / np.bincount(row)


def _placement_gains(pair: Pair, name: str, array: str, read: Reader) -> tuple[np.ndarray, np.ndarray]:
    """Gains in placement of the clean rows, [N], and of the ood ones, [M]; each has the AUROC's gain as mean."""
    clean = next(part["name"] for part in pair.ours.parts if role_of(part) == "clean")
    ours, theirs = (
        placements(*(read(saved.folder, part)[array].astype(np.float64) for part in (clean, name))) for saved in pair
    )
    return ours[0] - theirs[0], ours[1] - theirs[1]


def _value(saved: SavedCell, name: str, metric: str) -> float:
    value = saved.part(name)["metrics"][metric]["mean"]
    return math.nan if value is None else float(value)


def ranks(table: Sequence[Row]) -> list[Row]:
    """The place of each method, 1 is best: on clean data, on each shift and ood set, and its mean over shifts.

    A shift is ranked by the mean over its severities and over seeds, so that one with many severities counts no more
    than another. Methods that tie share the mean of their places.
    """
    values: dict[tuple[str, ...], dict[str, list[float | None]]] = {}
    for row in table:
        if row["metric"] in COMPARED and row["role"] != "cost":
            key = (row["data"], row["model"], row["metric"], row["shift"], row["role"])
            values.setdefault(key, {}).setdefault(row["method"], []).append(row["value"])
    table_of_ranks: list[Row] = []
    over_shifts: dict[tuple[str, str, str, str], list[float]] = {}
    for (data, model, metric, shift, role), by_method in values.items():
        means = {method: mean_over_seeds(of_method)[0] for method, of_method in by_method.items()}
        losses = {m: METRICS[metric].loss(v) for m, v in means.items() if v is not None}
        for method, loss in losses.items():
            below, same = (sum(test(other) for other in losses.values()) for test in (loss.__gt__, loss.__eq__))
            rank = below + (same + 1) / 2
            who = {"data": data, "model": model, "method": method, "metric": metric}
            table_of_ranks.append(who | {"shift": shift, "role": role, "rank": rank, "methods": len(losses)})
            if role == "shift":
                over_shifts.setdefault((data, model, method, metric), []).append(rank)
    for (data, model, method, metric), places in over_shifts.items():
        who = {"data": data, "model": model, "method": method, "metric": metric}
        mean = sum(places) / len(places)
        table_of_ranks.append(who | {"shift": "all shifts", "role": "shift", "rank": mean, "methods": None})
    return table_of_ranks
