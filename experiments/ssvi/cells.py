"""The cells of the experiment: each is one posterior, scored once.

A cell's name is question/problem/method/setting/seed. `choose` cells try settings and are scored on validation rows;
all others are scored on test rows, with the setting of lowest validation NLL. `sweep` cells have everything else at its
base (95% sparse for SSVI and RigL, and all sparsities); the other questions change one thing of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from problems import PROBLEMS, QUICK, Problem, Source, problem

import caveat
from caveat import MAP, SSVI, MeanFieldVI, RigL, Training
from caveat.engine.sparse import CRITERIA, Allocation, Scheme, network_account

SPARSITIES = ("95", "50", "80", "90", "98", "99")  # percent, the most wanted first
STARTS = ("0.0001", "0.001", "0.03", "0.1", "0.3")  # of the standard deviations; the base is 0.01
BASE_START = 0.01
CHANGED = {"criterion": tuple(c for c in CRITERIA if c != SSVI().criterion), "addition": ("mean", "batches")}
CHOSEN_ON = {"mnist": "fashion_mnist"}  # a problem that takes the settings of another
CHOSEN_WITH = {"channel": "ssvi"}  # a method that takes those of another


@dataclass(frozen=True)
class Settings:
    """What is chosen on validation rows."""

    learning_rate: float
    precision: float  # of the prior
    kl_weight: float | None = None
    allocation: Allocation | None = None

    def __str__(self) -> str:
        words = [f"rate {self.learning_rate:g}", f"precision {self.precision:g}"]
        words += [] if self.kl_weight is None else [f"KL {self.kl_weight:g}"]
        return " ".join(words + ([] if self.allocation is None else [self.allocation]))


RATES = {"fashion_mnist": (1e-2,), "digits": (3e-3, 1e-2)}  # one where a trial on 8,000 training rows had settled it
PRECISIONS = (3.0, 30.0)
KL_WEIGHTS = {"fashion_mnist": (0.03, 0.1, 0.3), "digits": (0.003, 0.01, 0.03, 0.1)}
ALLOCATIONS: dict[str, tuple[Allocation, ...]] = {"fashion_mnist": ("erk",), "digits": ("erk", "uniform")}
TUNED = ("dense", "ssvi", "rigl", "map")


def candidates(name: str, method: str) -> list[Settings]:
    """What is tried for a method on a problem: the same rates, precisions and KL weights for all that have them."""
    kl_weights = KL_WEIGHTS[name] if method in ("dense", "ssvi") else (None,)
    allocations = ALLOCATIONS[name] if method in ("ssvi", "rigl") else (None,)
    return [Settings(*values) for values in product(RATES[name], PRECISIONS, kl_weights, allocations)]


@dataclass(frozen=True)
class Cell:
    """What one cell is about."""

    question: str
    problem: str
    method: str
    setting: str
    seed: int

    @property
    def name(self) -> str:
        """As the csv has it."""
        return f"{self.question}/{self.problem}/{self.method}/{self.setting}/{self.seed}"

    @property
    def needs(self) -> list["Cell"]:
        """The cells that choose its settings."""
        if self.question == "choose":
            return []
        name, method = CHOSEN_ON.get(self.problem, self.problem), CHOSEN_WITH.get(self.method, self.method)
        return [Cell("choose", name, method, str(candidate), 0) for candidate in candidates(name, method)]


def cells(seeds: int) -> Iterator[Cell]:
    """All of them, the most wanted first."""
    for name in PROBLEMS:
        if name not in CHOSEN_ON:
            yield from (Cell("choose", name, method, str(c), 0) for method in TUNED for c in candidates(name, method))
        yield from _sweep(name, seeds)
        yield from (
            Cell(question, name, "ssvi", setting, seed)
            for question, settings in CHANGED.items()
            for setting in settings
            for seed in range(seeds)
        )
        for setting, method, seed in product(STARTS, ("ssvi", "dense"), range(seeds)):
            yield Cell("start", name, method, setting, seed)


def _sweep(name: str, seeds: int) -> Iterator[Cell]:
    first = [("dense", "0"), ("ssvi", "95"), ("map", "0"), ("rigl", "95"), ("channel", "95")]
    rest = [(method, s) for s in SPARSITIES[1:] for method in ("ssvi", "rigl", "channel")]
    yield from (Cell("sweep", name, method, s, seed) for method, s in first + rest for seed in range(seeds))


@dataclass(frozen=True)
class Place:
    """Where things are."""

    source: Source
    device: str
    quick: bool


def method_of(cell: Cell, settings: Settings, quick: bool = False) -> caveat.Method:
    """The method of a cell, with its knobs."""
    size = QUICK if quick else PROBLEMS[cell.problem]
    training = Training(epochs=size.epochs, batch_size=size.batch_size, learning_rate=settings.learning_rate)
    sparsity = float(cell.setting) if cell.question == "sweep" else 95.0
    density = round(1 - sparsity / 100, 4)
    if cell.method == "map":
        return MAP(training=training)
    if cell.method == "rigl":
        return RigL(density, settings.allocation, interval=size.interval, training=training)
    start = float(cell.setting) if cell.question == "start" else BASE_START
    if cell.method == "dense":
        return MeanFieldVI(initial_std=start, kl_weight=settings.kl_weight, training=training)
    method = SSVI(
        density=density,
        interval=size.interval,
        initial_std=start,
        kl_weight=settings.kl_weight,
        training=training,
    )
    if cell.method == "channel":
        return replace(method, structure="channel")
    method = replace(method, allocation=settings.allocation)
    return replace(method, **{cell.question: cell.setting}) if cell.question in CHANGED else method


def run_cell(cell: Cell, settings: Settings, place: Place) -> dict[str, Any]:
    """Fit and score: one row of the csv. A training that diverges is a row without scores."""
    found = problem(cell.problem, cell.seed, place.source, place.quick)
    task = caveat.Task(found.model(), found.train, caveat.Categorical(), caveat.GaussianPrior(settings.precision))
    rows = "validation" if cell.question == "choose" else "test"
    row: dict[str, Any] = {"cell": cell.name, "rows": rows, "settings": str(settings), "device": place.device}
    method = method_of(cell, settings, place.quick)
    try:
        posterior = caveat.fit(task, method, seed=cell.seed, device=place.device, progress=False)
    except FloatingPointError:
        return row
    scores = caveat.evaluate(posterior, {rows: getattr(found, rows)}, seed=cell.seed, progress=False)[rows]
    row |= {"accuracy": scores["accuracy"].mean, "nll": scores["nll"].mean, "ece": scores["ece"].mean}
    row["marginal"] = scores["marginal_calibration_error"].mean
    row |= costs(posterior, task, found)
    diagnostics = posterior.info.diagnostics
    row |= {key: diagnostics[key] for key in ("median_std_change", "median_std") if key in diagnostics}
    return {key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()}


def costs(posterior: caveat.Posterior, task: caveat.Task, found: Problem) -> dict[str, Any]:
    """What it takes: counted for sparse layers by the fit itself, for a MAP here."""
    info = posterior.info
    if "account" in info.diagnostics:
        counted = info.diagnostics["account"]
        total, density = counted["total"], counted["density"]
    else:
        made = network_account(task.network, found.train.tensors[0][:2].to(task.network.device), Scheme(gaussian=False))
        total, density = made.as_json()["total"], 1.0
    return {
        "sparsity": 1 - density,
        "parameters": total["parameters"],
        "stored_bytes": info.stored_bytes,
        "training_flops": info.flops,
        "inference_flops": total["inference_flops"],
        "seconds": info.seconds,
    }


def chosen(cell: Cell, scored: dict[str, float]) -> Settings | None:
    """A cell's settings, given the validation NLL of all `choose` cells so far; None while some are missing."""
    if cell.question == "choose":
        return next(c for c in candidates(cell.problem, cell.method) if str(c) == cell.setting)
    if any(need.name not in scored for need in cell.needs):
        return None
    best = min(cell.needs, key=lambda need: scored[need.name])
    return chosen(best, scored)


def one_thread() -> None:
    """For a process that is one of several."""
    torch.set_num_threads(1)
