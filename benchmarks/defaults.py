"""What a user gets who changes no knob: every method with its defaults, beside scikit-learn's models and the marginals.

    python benchmarks/defaults.py --quick                        # 200 training rows, one seed
    python benchmarks/defaults.py                                # 500 training rows, three seeds
    python benchmarks/defaults.py --methods swag map --sets concrete boston-gap --seeds 0 1 --csv mine.csv
    python benchmarks/defaults.py --table mine.csv other.csv     # only the tables, of one file or several

The network is `models.for_data("mlp")`, one hidden layer of 50 units; the task is the command line's: standardised
inputs and targets, the default prior, a tenth of the training rows for validation. Methods that start from a trained
network start from `MAP()`, whose seconds are added to theirs. `NAME-gap` are the gap splits of a UCI set. A seed is the
number of the split, and seeds the choice of rows, the first weights and the fit. `hmc`, whose default is minutes a set,
is run only where `--methods` names it.

**Which sets choose, which report.** Defaults are chosen on `CHOOSE`: concrete, kin8nm and wine, standard and gap
splits. The scored rows of these are a fifth of their *training* rows, so that their test rows are never looked at.
`REPORT` are the other ten data sets, scored on test rows: boston, energy, naval, power, protein, yacht, diabetes,
breast_cancer, digits and mnist1d; and the gap splits of the UCI sets among them. No default is to be changed because of
a number of theirs; where that was not kept to, `benchmarks/README.md` says so.

Scores are in units of the training targets' standard deviation: `nll`, mean negative log density; `crps`; `coverage` of
the central 90% interval; `error`, root mean square (1 - accuracy for classes). `seconds` are of the processor (of all
threads), `warnings` the fit's, `evaluation` what `caveat.evaluate` says of the scored rows.

scikit-learn's gradient boosting predicts a mean alone: its noise is that of its residuals on the validation rows. Every
other model of scikit-learn trains on the validation rows as well, since it has no use for them. Its Gaussian process is
an ARD squared-exponential kernel with white noise, tuned by marginal likelihood (isotropic for classes).

The csv is resumable: a line that is there for a set, seed, method and number of rows is not made again.
"""

import argparse
import csv
import math
import os
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import TensorDataset

import caveat
from caveat import models
from caveat.data import DataSet, load
from caveat.data.uci import TABLES
from caveat.methods import built_in
from caveat.predictive import GaussianPredictive
from caveat.randomness import seeded

try:
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
    from sklearn.gaussian_process import GaussianProcessClassifier, GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
    from sklearn.linear_model import BayesianRidge, LogisticRegression
except ImportError as error:
    raise SystemExit("benchmarks/defaults.py needs scikit-learn: pip install 'caveat[data]'") from error

Array = NDArray[Any]

CHOOSE = ["concrete", "kin8nm", "wine"]
CHOOSE += [f"{name}-gap" for name in CHOOSE]
REPORT = ["boston", "energy", "naval", "power", "protein", "yacht", "diabetes", "breast_cancer", "digits", "mnist1d"]
GAPS = [f"{name}-gap" for name in REPORT if name in TABLES]
SETS = [*CHOOSE, *REPORT, *GAPS]
VALIDATION = 0.1  # share of the training rows: the command line's default
TEST_ROWS = 1000  # at most
SLOW = ("hmc",)  # run only if named
LEVEL = 0.9
OTHERS = ["marginals", "gp", "bayesian_ridge", "logistic_regression", "gradient_boosting"]
KEY = ("set", "seed", "method", "rows")
COLUMNS = [*KEY, "role", "nll", "crps", "coverage", "error", "seconds", "status", "warnings", "evaluation"]


@dataclass(frozen=True)
class Problem:
    """Training rows and the rows that are scored, of one set and seed."""

    data: DataSet
    x: Tensor  # [N, ...]
    y: Tensor
    x_scored: Tensor  # [M, ...]
    y_scored: Tensor

    @property
    def regression(self) -> bool:
        """Whether targets are numbers."""
        return self.data.likelihood == "gaussian"

    @property
    def target_mean(self) -> float:
        """Of the training targets."""
        return float(self.y.double().mean())

    @property
    def unit(self) -> float:
        """The standard deviation of the training targets, in which scores are given; 1 for classes."""
        return float(self.y.double().std(correction=0)) if self.regression else 1.0

    @property
    def labels(self) -> Array:
        """Training targets as scikit-learn takes them: standardised numbers, or classes, [N]."""
        if self.regression:
            return ((self.y.double().flatten() - self.target_mean) / self.unit).numpy()
        return self.y.flatten().long().numpy()

    def flat(self, scored: bool) -> Array:
        """Inputs [N, D] in float64: the scored rows', or the training rows'."""
        return (self.x_scored if scored else self.x).flatten(1).double().numpy()

    def task(self, seed: int) -> caveat.Task:
        """The task as `caveat fit` would build it."""
        shape, width = tuple(self.x.shape[1:]), self.data.n_outputs
        with seeded(seed):
            model = models.for_data("mlp", shape, width)
        kinds = {"gaussian": caveat.Gaussian(standardise=True), "bernoulli": caveat.Bernoulli()}
        likelihood = kinds.get(self.data.likelihood, caveat.Categorical())
        return caveat.Task(model, TensorDataset(self.x, self.y), likelihood, validation=VALIDATION)


def problem_of(name: str, seed: int, rows: int) -> Problem:
    """At most `rows` training rows of a set, and the rows to score: test rows, or training rows of sets that choose."""
    table = name.removesuffix("-gap")
    if table in TABLES:
        gap = name.endswith("-gap")
        splits = TABLES[table].n_features if gap else TABLES[table].n_splits
        data = load(f"uci/{table}", split=seed % splits, gap=gap)
    else:
        data = load(name, seed=seed)
    order = torch.Generator().manual_seed(seed)
    (x, y), (x_scored, y_scored) = (_shuffled(part, order) for part in (data.train, data.test))
    if name in CHOOSE:
        held_out = len(x) // 5
        (x_scored, y_scored), (x, y) = (x[:held_out], y[:held_out]), (x[held_out:], y[held_out:])
    return Problem(data, x[:rows], y[:rows], x_scored[:TEST_ROWS], y_scored[:TEST_ROWS])


def _shuffled(part: TensorDataset, order: torch.Generator) -> tuple[Tensor, Tensor]:
    x, y = part.tensors
    permutation = torch.randperm(len(x), generator=order)
    return x[permutation], y[permutation]


def of_gaussian(problem: Problem, centre: Array, deviation: Array) -> dict[str, float]:
    """Scores of a Gaussian prediction in standard units, [M] each."""
    shape = problem.y_scored.shape
    means, variances = (torch.as_tensor(a, dtype=torch.float64).expand(shape[0]) for a in (centre, deviation**2))
    predictive = GaussianPredictive(means.reshape(1, *shape), variances.reshape(1, *shape), variances.reshape(shape))
    return regression_scores(problem, predictive, 1.0, (problem.y_scored.double() - problem.target_mean) / problem.unit)


def regression_scores(problem: Problem, predictive: Any, unit: float, y: Tensor) -> dict[str, float]:
    """Scores of a predictive whose targets `y` are in units of which one standard deviation has `unit`."""
    lower, upper = predictive.interval(LEVEL)
    inside = (lower <= y) & (y <= upper)
    return {
        "nll": -float(predictive.log_prob(y).double().mean()) - math.log(unit),
        "crps": float(predictive.crps(y).double().mean()) / unit,
        "coverage": float(inside.double().mean()),
        "error": float((predictive.mean - y).double().square().mean().sqrt()) / unit,
    }


def of_probabilities(problem: Problem, probs: Array, classes: Array) -> dict[str, float]:
    """Scores of class probabilities [M, C], whose columns are these classes; one never trained on has probability 0."""
    y = problem.y_scored.flatten().long().numpy()
    every = np.zeros((len(y), max(int(y.max()), int(classes.max())) + 1))
    every[:, classes] = probs
    chosen = np.clip(every[np.arange(len(y)), y], 1e-12, None)  # a log probability of minus infinity ends an average
    return {"nll": float(-np.log(chosen).mean()), "error": float((every.argmax(1) != y).mean())}


def of_caveat(problem: Problem, prediction: Any) -> dict[str, float]:
    """Scores of a prediction of ours."""
    if problem.regression:
        return regression_scores(problem, prediction, problem.unit, problem.y_scored)
    probs = prediction.probs.double()
    if problem.data.likelihood == "bernoulli":
        probs = torch.cat([1 - probs, probs], 1)
    return of_probabilities(problem, probs.numpy(), np.arange(probs.shape[1]))


def by_marginals(problem: Problem, seed: int) -> dict[str, float]:
    """Predict the training targets' mean and spread, or the frequencies of classes."""
    if problem.regression:
        return of_gaussian(problem, np.zeros(1), np.ones(1))
    classes, counts = np.unique(problem.labels, return_counts=True)
    return of_probabilities(problem, np.tile(counts / counts.sum(), (len(problem.y_scored), 1)), classes)


def by_gp(problem: Problem, seed: int) -> dict[str, float]:
    x, scored = problem.flat(False), problem.flat(True)
    if problem.regression:
        kernel = ConstantKernel(1.0, (1e-3, 1e3)) * RBF(np.ones(x.shape[1]), (1e-2, 1e4)) + WhiteKernel(0.1, (1e-6, 10))
        gp = GaussianProcessRegressor(kernel, random_state=seed).fit(x, problem.labels)
        return of_gaussian(problem, *gp.predict(scored, return_std=True))
    kernel = ConstantKernel(1.0, (1e-3, 1e4)) * RBF(math.sqrt(x.shape[1]), (1e-1, 1e3))
    classifier = GaussianProcessClassifier(kernel, random_state=seed, max_iter_predict=50).fit(x, problem.labels)
    return of_probabilities(problem, classifier.predict_proba(scored), classifier.classes_)


def by_bayesian_ridge(problem: Problem, seed: int) -> dict[str, float] | None:
    if not problem.regression:
        return None
    ridge = BayesianRidge().fit(problem.flat(False), problem.labels)
    return of_gaussian(problem, *ridge.predict(problem.flat(True), return_std=True))


def by_logistic_regression(problem: Problem, seed: int) -> dict[str, float] | None:
    if problem.regression:
        return None
    regression = LogisticRegression(max_iter=2000).fit(problem.flat(False), problem.labels)
    return of_probabilities(problem, regression.predict_proba(problem.flat(True)), regression.classes_)


def by_gradient_boosting(problem: Problem, seed: int) -> dict[str, float]:
    x, labels, scored = problem.flat(False), problem.labels, problem.flat(True)
    if not problem.regression:
        boosting = HistGradientBoostingClassifier(random_state=seed).fit(x, labels)
        return of_probabilities(problem, boosting.predict_proba(scored), boosting.classes_)
    held_out = np.random.default_rng(seed).permutation(len(x)) < max(round(VALIDATION * len(x)), 1)
    regressor = HistGradientBoostingRegressor(random_state=seed).fit(x[~held_out], labels[~held_out])
    noise = np.sqrt(np.mean((regressor.predict(x[held_out]) - labels[held_out]) ** 2))
    return of_gaussian(problem, regressor.predict(scored), np.full(1, max(noise, 1e-6)))


REFERENCES: dict[str, Callable[[Problem, int], dict[str, float] | None]] = {
    "marginals": by_marginals,
    "gp": by_gp,
    "bayesian_ridge": by_bayesian_ridge,
    "logistic_regression": by_logistic_regression,
    "gradient_boosting": by_gradient_boosting,
}


class Ours:
    """Our methods on one problem; the MAP that others start from is trained once."""

    def __init__(self, problem: Problem, seed: int) -> None:
        self.problem, self.seed = problem, seed
        self.point: caveat.Posterior | None = None
        self.seconds_of_point = 0.0

    def __call__(self, name: str) -> dict[str, Any]:
        """Fit a method with its default knobs and score it."""
        method, task = built_in()[name](), self.problem.task(self.seed)
        fit = partial(caveat.fit, task, seed=self.seed, progress=False)
        starts = method.starts_from == "trained"
        if (starts or name == "map") and self.point is None:
            clock = time.process_time()
            self.point = fit(caveat.MAP())
            self.seconds_of_point = time.process_time() - clock
        clock = time.process_time()
        posterior = self.point if name == "map" else fit(method, start=self.point if starts else None)
        seconds = time.process_time() - clock + (self.seconds_of_point if starts or name == "map" else 0)
        assert posterior is not None
        scored = self.problem.x_scored, self.problem.y_scored
        scores = of_caveat(self.problem, posterior.predict(scored[0], seed=self.seed))
        evaluated = caveat.evaluate(posterior, {"scored": scored}, seed=self.seed, progress=False)["scored"]
        notes = {"warnings": " | ".join(posterior.info.warnings), "evaluation": " | ".join(evaluated.warnings)}
        return scores | {"seconds": seconds} | notes


def line_of(name: str, problem: Problem, ours: Ours, seed: int) -> dict[str, Any] | None:
    """The scores of one method; None where it is not for such a problem."""
    clock = time.process_time()
    try:
        if name in REFERENCES:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of convergence: the scores tell
                scores = REFERENCES[name](problem, seed)
            return None if scores is None else {"seconds": time.process_time() - clock, "status": "ok"} | scores
        return {"status": "ok"} | ours(name)
    except (ValueError, NotImplementedError) as error:
        message = " ".join(str(error).split())
        return {"seconds": time.process_time() - clock, "status": f"refused: {message}"}


def read(paths: Iterable[Path]) -> list[dict[str, str]]:
    lines: list[dict[str, str]] = []
    for path in paths:
        if path.exists():
            with path.open(newline="") as file:
                lines += list(csv.DictReader(file))
    return lines


def measure(path: Path, sets: list[str], methods: list[str], seeds: list[int], rows: int) -> None:
    """Make the lines that are not in the file, and append each as it is made."""
    there = {tuple(line[key] for key in KEY) for line in read([path])}
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if new:
            writer.writeheader()
        for seed in seeds:
            for name in sets:
                missing = [m for m in methods if (name, str(seed), m, str(rows)) not in there]
                if not missing:
                    continue
                problem = problem_of(name, seed, rows)
                ours = Ours(problem, seed)
                for method in missing:
                    line = line_of(method, problem, ours, seed)
                    if line is None:
                        continue
                    role = "choose" if name in CHOOSE else "report"
                    line = dict(zip(KEY, (name, seed, method, rows), strict=True)) | {"role": role} | line
                    writer.writerow({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in line.items()})
                    file.flush()
                    shown = [f"{k} {line[k]:.3f}" for k in ("nll", "crps", "coverage", "error") if k in line]
                    rest = line["status"] if line["status"] != "ok" else ""
                    print(f"{name:<14}{seed:>3} {method:<28}{'  '.join(shown)}  {line['seconds']:.1f} s {rest[:90]}")
                    sys.stdout.flush()


def averages(lines: list[dict[str, str]], score: str) -> dict[str, dict[str, float]]:
    """The mean over seeds of a score, by set and method; refusals and scores that are not numbers count as infinite."""
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        value = float(line[score]) if line[score] else math.nan
        if line["status"] == "ok" and line[score]:
            values[line["set"]][line["method"]].append(value if math.isfinite(value) else math.inf)
    return {name: {m: mean(v) for m, v in by_method.items()} for name, by_method in values.items()}


def table_of(lines: list[dict[str, str]], score: str, sets: list[str], methods: list[str]) -> list[str]:
    """The means over seeds of a score, a line a method, as `benchmarks/README.md` has them."""
    table = averages(lines, score)
    present = [m for m in methods if any(m in table.get(name, {}) for name in sets)]
    sets = [name for name in sets if name in table]
    if not present or not sets:
        return []
    head = "NLL" if score == "nll" else score
    shown = [f"| {head} | " + " | ".join(sets) + " |", "|" + "---|" * (len(sets) + 1)]
    for method in present:
        cells = [_short(table[name][method]) if method in table[name] else "" for name in sets]
        shown.append(f"| {method} | " + " | ".join(cells) + " |")
    return shown


def _short(value: float) -> str:
    """Two decimals, without the zero before them: -.05."""
    return f"{value:.2f}".replace("0.", ".", 1) if abs(value) < 0.995 else f"{value:.2f}"


def wins_of(lines: list[dict[str, str]], sets: list[str], methods: list[str]) -> list[str]:
    """On how many sets each method's NLL is below that of others, a line a method.

    Two methods are compared over the seeds that both have. A fit is silent where neither it nor its evaluation warns.
    """
    lines = [line for line in lines if line["set"] in sets]
    rivals = ["map", *OTHERS]
    head = " | ".join(
        ["sets with a lower NLL than", *rivals, "fits that warn", "worse than marginals", "of them silent"]
    )
    shown = [f"| {head} |", "|" + "---|" * (len(rivals) + 4)]
    limit = {(x["set"], x["seed"]): float(x["nll"]) for x in lines if x["method"] == "marginals"}
    for method in [m for m in methods if m not in OTHERS]:
        fits = [x for x in lines if x["method"] == method and x["status"] == "ok" and x["nll"]]
        if not fits:
            continue
        cells = []
        for rival in rivals:
            pairs = averages(_with(lines, method, rival), "nll").values()
            wins = sum(pair[method] < pair[rival] for pair in pairs)
            cells.append(f"{wins} of {len(pairs)}" if pairs and rival != method else "")
        worse = [x for x in fits if float(x["nll"]) > limit.get((x["set"], x["seed"]), math.inf)]
        silent = [x for x in worse if not x["warnings"] and not x["evaluation"]]
        warned = sum(bool(x["warnings"]) for x in fits)
        counts = f"{warned} of {len(fits)} | {len(worse)} | {len(silent)}"
        shown.append(f"| {method} | " + " | ".join(cells) + f" | {counts} |")
    return shown


def _with(lines: list[dict[str, str]], *methods: str) -> list[dict[str, str]]:
    """The lines of these methods, for the sets and seeds that all of them have."""
    of_each = [
        {(x["set"], x["seed"]) for x in lines if x["method"] == m and x["status"] == "ok" and x["nll"]} for m in methods
    ]
    common = set.intersection(*of_each)
    return [x for x in lines if x["method"] in methods and (x["set"], x["seed"]) in common and x["nll"]]


def beside_the_gp(lines: list[dict[str, str]], sets: list[str], methods: list[str]) -> list[str]:
    """How the best of ours stands to the Gaussian process, over the seeds that this has."""
    has_gp = {(x["set"], x["seed"]) for x in lines if x["method"] == "gp" and x["nll"]}
    table = averages([x for x in lines if (x["set"], x["seed"]) in has_gp], "nll")
    shown = ["| NLL | best of ours | which | gp | within .1 |", "|---|---|---|---|---|"]
    for name in [s for s in sets if s in table]:
        ours = {m: v for m, v in table[name].items() if m in methods and m not in OTHERS}
        if not ours:
            continue
        best, gp = min(ours, key=lambda m: ours[m]), table[name]["gp"]
        close = "yes" if ours[best] <= gp + 0.1 else "no"
        shown.append(f"| {name} | {_short(ours[best])} | {best} | {_short(gp)} | {close} |")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [*built_in(), *OTHERS]
    parser.add_argument("--methods", nargs="+", choices=known, metavar="NAME", help="of " + ", ".join(known))
    parser.add_argument("--sets", nargs="+", choices=[*SETS, "choose", "report", "gaps"], metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int)
    parser.add_argument("--rows", type=int, help="training rows at most")
    parser.add_argument("--quick", action="store_true", help="200 rows, one seed")
    parser.add_argument("--csv", type=Path, help="lines are appended to it; benchmarks/defaults.csv unless given")
    parser.add_argument("--table", nargs="+", type=Path, metavar="CSV", help="only print the tables of these files")
    arguments = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    groups = {"choose": CHOOSE, "report": REPORT, "gaps": GAPS}
    sets = [s for given in arguments.sets or SETS for s in groups.get(given, [given])]
    methods = arguments.methods or [m for m in known if m not in SLOW]
    if arguments.table:
        lines = read(arguments.table)
    else:
        rows, seeds = (200, [0]) if arguments.quick else (500, [0, 1, 2])
        path = arguments.csv or Path(__file__).with_suffix(".csv")
        measure(path, sets, methods, arguments.seeds or seeds, arguments.rows or rows)
        lines = read([path])
        lines = [line for line in lines if line["rows"] == str(arguments.rows or rows)]
    lines = [line for line in lines if arguments.seeds is None or int(line["seed"]) in arguments.seeds]
    for title, group in (("choosing", CHOOSE), ("reporting", REPORT), ("gaps", GAPS)):
        wanted = [name for name in group if name in sets]
        if wanted:
            print(f"\n## {title}")
            for score in ("nll", "crps", "coverage", "error", "seconds"):
                print("\n".join(["", *table_of(lines, score, wanted, methods)]))
            print("\n".join(["", *wins_of(lines, wanted, methods)]))
            print("\n".join(["", *beside_the_gp(lines, wanted, methods)]))


if __name__ == "__main__":
    main()
