"""Tables and figures of the README, from what the csv holds. Numbers are means over seeds, ± one standard error."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

from cells import BASE_START, CHANGED, CHOSEN_ON, SPARSITIES, STARTS, TUNED, candidates
from problems import PROBLEMS

from caveat import SSVI
from caveat.engine.sparse import CRITERIA

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
What = tuple[str, str, str]  # question, method, setting
BASE: What = ("sweep", "ssvi", "95")
DENSE: What = ("sweep", "dense", "0")
ALIKE = [DENSE, ("sweep", "map", "0"), BASE, ("sweep", "rigl", "95"), ("sweep", "channel", "95")]


@dataclass(frozen=True)
class Results:
    """Rows of the csv by (question, method, setting), problem and seed."""

    rows: dict[tuple[What, str, int], dict[str, str]]

    @staticmethod
    def of(found: Iterable[dict[str, str]]) -> "Results":
        """From the csv."""
        rows = {}
        for row in found:
            question, name, method, setting, seed = row["cell"].split("/")
            rows[(question, method, setting), name, int(seed)] = row
        return Results(rows)

    def values(self, what: What, name: str, column: str) -> dict[int, float]:
        """A column by seed."""
        return {
            seed: float(row[column])
            for (which, problem, seed), row in self.rows.items()
            if which == what and problem == name and row[column]
        }

    def less(self, what: What, base: What, name: str, column: str) -> dict[int, float]:
        """Differences, paired by seed."""
        own, other = self.values(what, name, column), self.values(base, name, column)
        return {seed: value - other[seed] for seed, value in own.items() if seed in other}

    def settings(self, what: What, name: str) -> str:
        """With which a cell was run."""
        return next((row["settings"] for (w, n, _), row in self.rows.items() if (w, n) == (what, name)), "")


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
    sweep = [("sweep", m, s) for m in ("ssvi", "rigl", "channel") for s in sorted(SPARSITIES, key=int)]
    table(["", *heads, *(head for head, _, _ in COSTS.values())], [
        (label(what), scores(found, what, name) + costs(found, what, name)) for what in [*ALIKE[:2], *sweep]
    ])  # fmt: skip
    print("### Criterion of removal, then of addition (SSVI 95%)\n")
    for question, settings in (("criterion", CRITERIA), ("addition", ("noisy", *CHANGED["addition"]))):
        own = [(s, BASE if s == getattr(SSVI(), question) else (question, "ssvi", s)) for s in settings]
        nll = [shown(found.less(what, BASE, name, "nll"), "+.3f") for _, what in own]
        rows = [(s, [*scores(found, what, name), less]) for (s, what), less in zip(own, nll, strict=True)]
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
    if name not in CHOSEN_ON:
        _summarise_choice(found, name)


def _summarise_choice(found: Results, name: str) -> None:
    print("### Settings, on validation rows (chosen: the lowest NLL)\n")
    for method in TUNED:
        what: dict[str, What] = {str(c): ("choose", method, str(c)) for c in candidates(name, method)}
        nll = {c: found.values(w, name, "nll").get(0, float("inf")) for c, w in what.items()}
        best = min(nll, key=nll.__getitem__)
        rows = [(f"**{c}**" if c == best else c, scores(found, w, name)) for c, w in what.items()]
        table([LABELS[method], *SCORES.values()], rows)


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
    ticks = sorted(SPARSITIES, key=int)
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
