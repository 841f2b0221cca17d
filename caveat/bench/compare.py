"""Every method against the baseline, pair by pair, with intervals; and ranks over shifts.

Pairs are of the same data, model and training seed, scored on the same rows. A shift's severities are averaged row by
row first: they are the same inputs. Scores that are means over rows (NLL, Brier, accuracy, CRPS) and the AUROC have
intervals over seeds and rows, see `caveat.evaluate.comparison`; with one seed over rows, which is said. Calibration
errors and areas are no means over rows: theirs is a t over seeds, which speaks of these test rows; one seed gives none.
"""

import math
from collections.abc import Sequence

import numpy as np

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
SEED_SCORES = ("ece", "marginal_calibration_error", "risk_coverage_area", "rmse", "calibration_error")
OUTSIDE_SCORES = {"auroc_entropy": "entropy", "auroc_variance": "variance", "auroc_epistemic": "epistemic"}
COMPARED = {*ROW_SCORES, *SEED_SCORES, *OUTSIDE_SCORES}


def comparisons(results: Sequence[Result], baseline: str) -> list[Row]:
    """Every method against the baseline: on each condition, and on each shift with its severities averaged."""
    groups: dict[tuple[str, str, str], dict[int, Result]] = {}
    for result in results:
        cell = result.cell
        groups.setdefault((cell.data.label, cell.model, cell.label), {})[cell.seed] = result
    table = []
    for (data, model, label), by_seed in groups.items():
        others = groups.get((data, model, baseline), {})
        pairs = [(by_seed[seed], others[seed]) for seed in by_seed if seed in others]
        if label == baseline or not pairs:
            continue
        for names, where in _conditions(pairs[0][0]):
            for metric, interval, rows in _gains(pairs, names, where["role"]):
                who = {"data": data, "model": model, "method": label, "baseline": baseline}
                found = {"gain": interval.gain, "low": interval.low, "high": interval.high}
                counts = {"seeds": len(pairs), "rows": rows, "over": interval.over, "verdict": interval.verdict}
                table.append(who | where | {"metric": metric} | found | counts)
        for ours, _ in pairs:  # the baseline's are read again and again
            ours.forget()
    for result in results:
        result.forget()
    return table


def _conditions(result: Result) -> list[tuple[list[str], Row]]:
    """The names of the parts that go together: each alone, and those of a shift at all severities."""
    found = []
    families: dict[str, list[str]] = {}
    for part in result.parts:
        where = {"shift": part["family"], "severity": part["severity"], "severities": 1, "role": role_of(part)}
        found.append(([part["name"]], where))
        if where["role"] == "shift":
            families.setdefault(part["family"], []).append(part["name"])
    for family, names in families.items():
        found.append((names, {"shift": family, "severity": None, "severities": len(names), "role": "shift"}))
    return found


def _gains(pairs: Sequence[tuple[Result, Result]], names: Sequence[str], role: str) -> list[tuple[str, Interval, int]]:
    """Every metric of some parts: its name, the interval, and how many rows it is over."""
    found = []
    measured = _part(pairs[0][0], names[0])["metrics"]
    for metric in measured:
        if metric in ROW_SCORES and role != "ood":
            gains = np.stack([np.mean([_row_gain(p, name, metric) for name in names], axis=0) for p in pairs])
            found.append((metric, crossed_interval([gains]), gains.shape[1]))
        elif metric in OUTSIDE_SCORES and role == "ood":
            each = [_placement_gains(pair, names[0], OUTSIDE_SCORES[metric]) for pair in pairs]
            layouts = [np.stack(side) for side in zip(*each, strict=True)]
            found.append((metric, crossed_interval(layouts), sum(side.shape[1] for side in layouts)))
        elif metric in SEED_SCORES:
            gains = np.array([np.mean([_value(a, n, metric) - _value(b, n, metric) for n in names]) for a, b in pairs])
            found.append((metric, seeds_interval(METRICS[metric].sign * gains), _part(pairs[0][0], names[0])["rows"]))
    return found


def _row_gain(pair: tuple[Result, Result], name: str, metric: str) -> np.ndarray:
    """Gains of each row, [N]; the decisions of one row are averaged."""
    array, factor = ROW_SCORES[metric]
    ours, theirs = (result.rows(_part(result, name)) for result in pair)
    if not np.array_equal(ours["rows"], theirs["rows"]):
        raise ValueError(f"{pair[0].files.folder} and {pair[1].files.folder} were scored on different rows of {name!r}")
    with np.errstate(invalid="ignore"):  # two log probabilities of zero
        gain = METRICS[metric].sign * factor * (ours[array].astype(np.float64) - theirs[array].astype(np.float64))
    _, row = np.unique(ours["rows"], return_inverse=True)
    return np.bincount(row, gain) / np.bincount(row)


def _placement_gains(pair: tuple[Result, Result], name: str, array: str) -> tuple[np.ndarray, np.ndarray]:
    """Gains in placement of the clean rows, [N], and of those from outside, [M]; each has the AUROC's gain as mean."""
    clean = next(part["name"] for part in pair[0].parts if role_of(part) == "clean")
    ours, theirs = (
        placements(*(result.rows(_part(result, part))[array].astype(np.float64) for part in (clean, name)))
        for result in pair
    )
    return ours[0] - theirs[0], ours[1] - theirs[1]


def _part(result: Result, name: str) -> Row:
    return next(part for part in result.parts if part["name"] == name)


def _value(result: Result, name: str, metric: str) -> float:
    value = _part(result, name)["metrics"][metric]["mean"]
    return math.nan if value is None else float(value)


def ranks(table: Sequence[Row]) -> list[Row]:
    """The place of each method, 1 is best: on clean data, on each shift and set from outside, and its mean over shifts.

    A shift is ranked by the mean over its severities and over seeds, so that one with many severities counts no more
    than another. Methods that tie share the mean of their places.
    """
    values: dict[tuple[str, ...], dict[str, list[float | None]]] = {}
    for row in table:
        if row["metric"] in COMPARED and row["role"] != "cost":
            key = (row["data"], row["model"], row["metric"], row["shift"], row["role"])
            values.setdefault(key, {}).setdefault(row["method"], []).append(row["value"])
    found: list[Row] = []
    over_shifts: dict[tuple[str, str, str, str], list[float]] = {}
    for (data, model, metric, shift, role), by_method in values.items():
        means = {method: mean_over_seeds(of_method)[0] for method, of_method in by_method.items()}
        losses = {m: METRICS[metric].loss(v) for m, v in means.items() if v is not None}
        for method, loss in losses.items():
            below, same = (sum(test(other) for other in losses.values()) for test in (loss.__gt__, loss.__eq__))
            rank = below + (same + 1) / 2
            who = {"data": data, "model": model, "method": method, "metric": metric}
            found.append(who | {"shift": shift, "role": role, "rank": rank, "methods": len(losses)})
            if role == "shift":
                over_shifts.setdefault((data, model, method, metric), []).append(rank)
    for (data, model, method, metric), places in over_shifts.items():
        who = {"data": data, "model": model, "method": method, "metric": metric}
        mean = sum(places) / len(places)
        found.append(who | {"shift": "all shifts", "role": "shift", "rank": mean, "methods": None})
    return found
