"""Tables and figures of the README. Numbers are means over seeds, ± one standard error.

    python experiments/ssvi/tables.py                                                # from results.csv
    python experiments/ssvi/tables.py --results results/digits results/choose        # from what `caveat bench` measured
    python experiments/ssvi/tables.py --figures FOLDER                               # also sparsity.png and start.png

results.csv is of an earlier script: a cell's name there is question/problem/method/setting/seed.
"""

import argparse
import csv
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from caveat import SSVI

PROBLEMS = ("fashion_mnist", "digits", "mnist")
SPARSITIES = ("50", "80", "90", "95", "98", "99")  # percent
STARTS = ("0.0001", "0.001", "0.03", "0.1", "0.3")  # of the standard deviations; the base is 0.01
BASE_START = 0.01
CRITERIA = ("magnitude", "snr", "expected_magnitude", "snr_magnitude", "exponential", "snr_exponential")
ADDITIONS = ("noisy", "mean", "batches")
TUNED = ("dense", "ssvi", "rigl", "map")
LABELS = {"dense": "dense VI", "map": "MAP", "ssvi": "SSVI", "rigl": "RigL", "channel": "SSVI, channels"}
COLOURS = {"dense": "#000000", "map": "#888888", "ssvi": "#14406b", "rigl": "#c1440e", "channel": "#2e8b57"}
SCORES = {"accuracy": "accuracy", "nll": "NLL", "ece": "top-label ECE", "marginal": "marginal calibration error"}
COSTS = {  # column of the csv: what to call it, its unit, its form
    "sparsity": ("sparsity, %", 100, ".1f"),
    "parameters": ("parameters", 1, ",.0f"),
    "stored_bytes": ("stored KiB", 1 / 1024, ",.1f"),
    "training_flops": ("training TFLOP", 1e-12, ".3g"),
    "inference_flops": ("a pass, MFLOP", 1e-6, ".3f"),
    "seconds": ("training seconds", 1, ".3g"),
    "median_std_change": ("change of log sigma", 1, ".2f"),
}
FORMS = {"accuracy": ".4f", "nll": ".3f", "ece": ".4f", "marginal": ".4f"}
METRICS = {"accuracy": "accuracy", "nll": "nll", "ece": "ece", "marginal": "marginal_calibration_error"}
What = tuple[str, str, str]  # question, method, setting
BASE: What = ("sweep", "ssvi", "95")
DENSE: What = ("sweep", "dense", "0")
ALIKE = [DENSE, ("sweep", "map", "0"), BASE, ("sweep", "rigl", "95"), ("sweep", "channel", "95")]


@dataclass(frozen=True)
class Results:
    """Rows of the csv by (question, method, setting), problem and seed."""

    rows: dict[tuple[What, str, int], dict[str, str]]

    @staticmethod
    def of_csv(path: Path) -> "Results":
        """From results.csv."""
        rows = {}
        for row in read(path):
            question, name, method, setting, seed = row["cell"].split("/")
            rows[(question, method, setting), name, int(seed)] = row
        return Results(rows)

    @staticmethod
    def of_bench(folders: Iterable[Path]) -> "Results":
        """From folders of `caveat bench`."""
        rows: dict[tuple[What, str, int], dict[str, str]] = {}
        for folder in folders:
            for cell in json.loads((folder / "bench.json").read_text())["cells"]:
                place, name, seed = folder / cell["folder"], cell["data"], cell["seed"]
                if cell["status"] == "done" and (place / "candidates.json").exists():
                    method = "map" if cell["method"] == "point" else cell["method"]
                    tried = json.loads((place / "candidates.json").read_text())["validation_nll"]
                    for words, nll in tried.items():
                        rows[("choose", method, words), name, seed] = {"nll": str(nll) if nll != str(nll) else ""}
                elif cell["status"] == "done" and cell["method"] != "map_tempered":
                    rows[what_of(cell["method"]), name, seed] = numbers(place)
        return Results(rows)

    def values(self, what: What, name: str, column: str) -> dict[int, float]:
        """A column by seed."""
        return {
            seed: float(row[column])
            for (which, problem, seed), row in self.rows.items()
            if which == what and problem == name and row.get(column)
        }

    def less(self, what: What, base: What, name: str, column: str) -> dict[int, float]:
        """Differences, paired by seed."""
        other = self.values(base, name, column)
        return {seed: value - other[seed] for seed, value in self.values(what, name, column).items() if seed in other}


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a csv; none where there is no file."""
    if not path.exists():
        return []
    with path.open() as file:
        return list(csv.DictReader(file))


def what_of(label: str) -> What:
    """The question, method and setting of a label of the experiment files."""
    method, _, swept = label.partition(", ")
    knob, _, value = swept.partition(" ")
    if knob == "density":
        return "sweep", method, f"{round(100 - 100 * float(value))}"
    if knob == "initial_std":
        return "start", method.removesuffix("_from"), next(s for s in STARTS if float(s) == float(value))
    return (knob, "ssvi", value) if knob else ("sweep", method, "0")


def numbers(cell: Path) -> dict[str, str]:
    """Scores and costs of a cell of the bench, by the columns of results.csv."""
    content = json.loads((cell / "metrics.json").read_text())
    info, scores = content["info"], content["data"][0]["metrics"]
    counted: dict[str, Any] = info["diagnostics"].get("account", {})
    total = counted.get("total", {})
    found = {column: scores[metric]["mean"] for column, metric in METRICS.items()}
    found |= {"stored_bytes": info["stored_bytes"], "training_flops": info["flops"], "seconds": info["seconds"]}
    found |= {key: total.get(key) for key in ("parameters", "inference_flops")}
    found |= {key: info["diagnostics"].get(key) for key in ("median_std_change", "median_std")}
    found["sparsity"] = 1 - counted["density"] if counted else None
    return {key: "" if value is None else str(value) for key, value in found.items()}


def shown(values: dict[int, float], form: str = ".3f", times: float = 1.0) -> str:
    """Mean and standard error over seeds."""
    numbers = [times * value for value in values.values()]
    if not numbers:
        return ""
    middle = f"{mean(numbers):{form}}"
    if len(numbers) < 2 or len(set(numbers)) < 2:
        return middle
    return f"{middle} ±{stdev(numbers) / len(numbers) ** 0.5:{form.removeprefix('+')}}"


def table(heads: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> None:
    """Markdown, without rows that have nothing."""
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
    for first, cells in rows:
        if any(cells):
            print(f"| {first} | " + " | ".join(cells) + " |")
    print()


def scores(found: Results, what: What, name: str) -> list[str]:
    """The four scores of a cell."""
    return [shown(found.values(what, name, column), FORMS[column]) for column in SCORES]


def costs(found: Results, what: What, name: str) -> list[str]:
    """What it takes; seconds are of single seeds and vary, so that their error says nothing."""
    cells = []
    for column, (_, times, form) in COSTS.items():
        values = found.values(what, name, column)
        cells.append(f"{times * mean(values.values()):{form}}" if values else "")
    return cells


def label(what: What) -> str:
    _, method, setting = what
    return LABELS[method] if setting == "0" else f"{LABELS[method]} {setting}%"


def starts(method: str) -> list[tuple[str, What]]:
    """The starts of the standard deviations with the base in its place."""
    base = DENSE if method == "dense" else BASE
    steps = [(float(s), ("start", method, s)) for s in STARTS] + [(BASE_START, base)]
    return [(f"{start:g}", what) for start, what in sorted(steps)]


def summarise(found: Results) -> None:
    """Every table, under a line that says what it is."""
    print(f"Seeds {sorted({seed for _, _, seed in found.rows})}, {len(found.rows)} cells\n")
    for name in PROBLEMS:
        if any(problem == name for _, problem, _ in found.rows):
            _summarise_problem(found, name)


def _summarise_problem(found: Results, name: str) -> None:
    print(f"## {name}\n\n### 95% sparse SSVI less dense VI, paired by seed\n")
    pairs = [(label(what), what) for what in ALIKE[1:]]
    heads = list(SCORES.values())
    differences = [
        (first, [shown(found.less(what, DENSE, name, c), "+" + FORMS[c]) for c in SCORES]) for first, what in pairs
    ]
    table(["less dense VI", *heads], differences)
    each = [[f"{v:+.4f}" for v in found.less(BASE, DENSE, name, column).values()] for column in SCORES]
    table(["seed by seed", *heads], [("SSVI 95%", [", ".join(values) for values in each])])
    print("### Scores and costs\n")
    table(["", *heads, *(head for head, _, _ in COSTS.values())], [
        (label(what), scores(found, what, name) + costs(found, what, name)) for what in ALIKE
    ])  # fmt: skip
    print("### By sparsity\n")
    sweep = [("sweep", m, s) for m in ("ssvi", "rigl", "channel") for s in SPARSITIES]
    table(["", *heads, *(head for head, _, _ in COSTS.values())], [
        (label(what), scores(found, what, name) + costs(found, what, name)) for what in [*ALIKE[:2], *sweep]
    ])  # fmt: skip
    print("### Criterion of removal, then of addition (SSVI 95%)\n")
    for question, settings in (("criterion", CRITERIA), ("addition", ADDITIONS)):
        whats = [(s, BASE if s == getattr(SSVI(), question) else (question, "ssvi", s)) for s in settings]
        nll = [shown(found.less(what, BASE, name, "nll"), "+.3f") for _, what in whats]
        rows = [(s, [*scores(found, what, name), less]) for (s, what), less in zip(whats, nll, strict=True)]
        table([question, *heads, "NLL less base"], [row for row in rows if row[1][0]])
    print("### Start of sigma\n")
    columns = [(method, column) for method in ("ssvi", "dense") for column in ("accuracy", "nll", "ece")]
    by_start = {method: dict(starts(method)) for method in ("ssvi", "dense")}
    rows = []
    for start in by_start["ssvi"]:
        cells = [shown(found.values(by_start[m][start], name, c), FORMS[c]) for m, c in columns]
        cells += [shown(found.values(by_start[m][start], name, "median_std"), ".3f") for m in by_start]
        rows.append((start, cells))
    heads = [f"{LABELS[m]} {SCORES[c]}" for m, c in columns] + [
        f"{LABELS[m]} median sigma at the end" for m in by_start
    ]
    table(["start", *heads], rows)
    _summarise_choice(found, name)


def _summarise_choice(found: Results, name: str) -> None:
    """What was tried for each method; of a bench the NLL alone is known."""
    if not any(what[0] == "choose" and problem == name for what, problem, _ in found.rows):
        return
    print("### Settings, on validation rows (chosen: the lowest NLL)\n")
    for method in TUNED:
        tried = [what for what, problem, _ in found.rows if what[:2] == ("choose", method) and problem == name]
        nll = {what: found.values(what, name, "nll").get(0, float("inf")) for what in sorted(tried, key=_order)}
        best = min(nll, key=nll.__getitem__)
        rows = [(f"**{what[2]}**" if what == best else what[2], scores(found, what, name)) for what in nll]
        table([LABELS[method], *SCORES.values()], rows)


def _order(what: What) -> list[float | str]:
    """Candidates by their numbers in order, then by their words."""
    words = what[2].split()
    return [*(float(word) for word in words if word[0].isdigit()), *(word for word in words if not word[0].isdigit())]


def draw(found: Results, folder: Path) -> None:
    """sparsity.png and start.png."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    mpl.rcParams |= {"axes.spines.top": False, "axes.spines.right": False}
    known = [name for name in PROBLEMS if found.values(BASE, name, "accuracy")]
    columns = ("accuracy", "nll", "ece")
    size = {"figsize": (12, 3.2 * len(known)), "layout": "constrained", "squeeze": False}
    figure, axes = plt.subplots(len(known), len(columns), sharex=True, **size)
    ticks = SPARSITIES
    for row, name in zip(axes, known, strict=True):
        for axis, column in zip(row, columns, strict=True):
            for method in ("ssvi", "rigl", "channel"):
                _line(axis, [(ticks.index(s), found.values(("sweep", method, s), name, column)) for s in ticks], method)
            for method in ("dense", "map"):
                if values := found.values(("sweep", method, "0"), name, column):
                    axis.axhline(mean(values.values()), color=COLOURS[method], linestyle="--", label=LABELS[method])
            axis.set_xticks(range(len(ticks)), [f"{s}%" for s in ticks])
            axis.set_title(f"{name}: {SCORES[column]}", fontsize=10)
    handles = axes[0][0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=len(LABELS), frameon=False)
    figure.savefig(folder / "sparsity.png", dpi=110)

    figure, axes = plt.subplots(len(known), len(columns), sharex=True, **size)
    for row, name in zip(axes, known, strict=True):
        for axis, column in zip(row, columns, strict=True):
            for method in ("ssvi", "dense"):
                points = [(float(start), found.values(what, name, column)) for start, what in starts(method)]
                _line(axis, points, method)
            axis.set_xscale("log")
            axis.set_title(f"{name}: {SCORES[column]}", fontsize=10)
    axes[0][0].legend(frameon=False)
    for axis in axes[-1]:
        axis.set_xlabel("sigma at the start")
    figure.savefig(folder / "start.png", dpi=110)


def _line(axis: object, points: list[tuple[float, dict[int, float]]], method: str) -> None:
    """Means, with a band from the lowest to the highest seed."""
    points = [(x, values) for x, values in points if values]
    x = [place for place, _ in points]
    every = [list(values.values()) for _, values in points]
    axis.plot(x, [mean(v) for v in every], color=COLOURS[method], label=LABELS[method], marker="o", ms=3)
    low, high = ([bound(v) for v in every] for bound in (min, max))
    axis.fill_between(x, low, high, color=COLOURS[method], alpha=0.15, linewidth=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, nargs="+", metavar="FOLDER", help="of `caveat bench`")
    parser.add_argument("--figures", type=Path, metavar="FOLDER", help="where figures are written; none unless given")
    arguments = parser.parse_args()
    earlier = Path(__file__).with_name("results.csv")
    found = Results.of_bench(arguments.results) if arguments.results else Results.of_csv(earlier)
    summarise(found)
    if arguments.figures is not None:
        draw(found, arguments.figures)


if __name__ == "__main__":
    main()
