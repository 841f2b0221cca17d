"""Tables and figures of the README, from what the csv holds. Numbers are means over seeds, ± one standard error."""

import argparse
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

import torch
from cells import FACTORS, METHODS, SETTINGS, TEMPERATURES, TRAJECTORIES
from problems import PROBLEMS, STRENGTHS

REFERENCE = ("reference", "HMC")
SHIFTED = ("HMC", "EmpCov", "MAP", "MAP tempered", "ensemble of 5", "ensemble of 50", "MC dropout", "SWAG", "SGHMC")
COLOURS = {"digits": "#14406b", "mnist1d": "#c1440e", "mnist": "#2e8b57"}
LINES = {
    "HMC": "#14406b",
    "EmpCov": "#4a90d9",
    "MAP": "#000000",
    "ensemble of 5": "#2e8b57",
    "SGHMC": "#c1440e",
}


@dataclass(frozen=True)
class Results:
    """Rows of the csv by (kind, setting), problem, seed and (data, strength)."""

    rows: dict[tuple[tuple[str, str], str, int, tuple[str, str]], dict[str, str]]

    @staticmethod
    def of(found: Iterable[dict[str, str]]) -> "Results":
        """From the csv."""
        rows = {}
        for row in found:
            kind, name, setting, seed = row["cell"].split("/")
            rows[(kind, setting), name, int(seed), (row["data"], row["strength"])] = row
        return Results(rows)

    def values(self, what: tuple[str, str], name: str, metric: str, data: str = "clean") -> dict[int, float]:
        """A metric by seed; over all strengths of a corruption, or all corruptions ("corrupted"), their mean."""
        by_seed: dict[int, list[float]] = {}
        for (kind, problem, seed, (part, _)), row in self.rows.items():
            wanted = part != "clean" if data == "corrupted" else part == data
            if kind == what and problem == name and wanted and row[metric]:
                by_seed.setdefault(seed, []).append(float(row[metric]))
        return {seed: mean(values) for seed, values in by_seed.items()}

    def at(self, what: tuple[str, str], name: str, metric: str, data: str, strength: float) -> dict[int, float]:
        """A metric by seed at one strength."""
        return {
            seed: float(row[metric])
            for (kind, problem, seed, (part, own)), row in self.rows.items()
            if kind == what and problem == name and part == data and own and float(own) == strength
        }


def shown(values: dict[int, float], form: str = ".3f") -> str:
    """Mean and standard error over seeds."""
    if not values:
        return ""
    numbers = list(values.values())
    error = f" ±{stdev(numbers) / len(numbers) ** 0.5:{form}}" if len(numbers) > 1 else ""
    return f"{mean(numbers):{form}}{error}"


def less(values: dict[int, float], base: dict[int, float]) -> dict[int, float]:
    """Differences, paired by seed."""
    return {seed: value - base[seed] for seed, value in values.items() if seed in base}


def table(heads: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> None:
    """Markdown."""
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
    for first, cells in rows:
        if any(cells):
            print(f"| {first} | " + " | ".join(cells) + " |")
    print()


def method(name: str) -> tuple[str, str]:
    """Where a method's rows are."""
    return {"HMC": REFERENCE, "EmpCov": ("empcov", "EmpCov")}.get(name, ("methods", name))


Sweep = tuple[tuple[str, str], list[tuple[str, tuple[str, str]]]]


def ladder(kind: str, settings: Iterable[float | str], base: tuple[str, str] = REFERENCE) -> Sweep:
    """The settings of a sweep with its base in its place: what to call it, where its rows are."""
    numbers = [s for s in settings if isinstance(s, float)]
    steps = [(s, base if s == 1.0 else (kind, str(s))) for s in sorted([*numbers, 1.0])]
    return base, [(str(s), what) for s, what in steps]


SWEEPS: dict[str, Sweep] = {
    "temperature": ladder("temperature", TEMPERATURES),
    "wide": ladder("wide", SETTINGS["wide"], ("scale", "10.0")),
    "scale": ladder("scale", FACTORS),
    "family": (REFERENCE, [("Gaussian", REFERENCE), *((f, ("family", f)) for f in TRAJECTORIES)]),
}
TITLES = {
    "temperature": "temperature",
    "wide": "temperature, ten times the prior variance",
    "scale": "prior variance times",
    "family": "prior family",
}


def summarise(found: Results) -> None:
    """Every table, under a line that says what it is."""
    seeds = sorted({seed for _, _, seed, _ in found.rows})
    print(f"Seeds {seeds}, {len({(key[0], key[1], key[2]) for key in found.rows})} cells\n")
    for kind, (base, steps) in SWEEPS.items():
        print(f"### {kind}: clean test rows\n")
        heads = [f"{name} {metric}" for name in PROBLEMS for metric in ("accuracy", "NLL", "less")]
        table([TITLES[kind], *heads], [(label, _clean(found, what, base)) for label, what in steps])
    print("### HMC and an ensemble of five by prior variance: clean test rows\n")
    table(
        ["prior variance times", *(f"{name} {m} NLL" for name in PROBLEMS for m in ("HMC", "ensemble"))],
        [(label, _against_ensemble(found, label, what)) for label, what in SWEEPS["scale"][1]],
    )
    for name in PROBLEMS:
        print(f"### corruption: {name}, mean over strengths\n")
        kinds = ("clean", *STRENGTHS, "corrupted")
        for metric in ("accuracy", "nll"):
            rows = [(m, [shown(found.values(method(m), name, metric, k)) for k in kinds]) for m in SHIFTED]
            table([metric, *kinds], rows)
        rows = [
            (
                f"{m} less {other}",
                [
                    shown(less(found.values(method(m), name, metric, k), found.values(method(other), name, metric, k)))
                    for k in kinds
                ],
            )
            for m, other in (("HMC", "MAP"), ("HMC", "ensemble of 5"), ("EmpCov", "HMC"))
            for metric in ("accuracy", "nll")
        ]
        table(["accuracy, then NLL", *kinds], rows)
    for name in PROBLEMS:
        print(f"### closeness to HMC: {name}\n")
        heads = ["", "accuracy", "NLL", "agreement", "total variation"]
        heads += [f"corrupted {head}" for head in ("accuracy", "NLL", "agreement", "total variation")] + ["chosen"]
        table(heads, [(label, _closeness(found, what, name)) for label, what in _compared(found, name)])
    print("### R-hat\n")
    heads = ["reference", "function: max", "share above 1.01", "limit of independent draws", "fewest effective draws"]
    heads += ["weights: max", "share above 1.01", "fewest effective draws", "acceptance", "leapfrog steps"]
    forms = dict.fromkeys(("rhat_function", "share_function", "null_function"), ".3f") | {"ess_function": ".0f"}
    forms |= {"rhat_weights": ".3f", "share_weights": ".3f", "ess_weights": ".0f"}
    forms |= {"acceptance": ".2f", "leapfrog_steps": ".0f"}
    rows = [(n, [shown(found.values(REFERENCE, n, c), form) for c, form in forms.items()]) for n in PROBLEMS]
    table(heads, rows)


def _clean(found: Results, what: tuple[str, str], base: tuple[str, str]) -> list[str]:
    cells = []
    for name in PROBLEMS:
        nll = found.values(what, name, "nll")
        cells += [shown(found.values(what, name, "accuracy")), shown(nll)]
        cells += [shown(less(nll, found.values(base, name, "nll")), "+.3f").replace("±+", "±")]
    return cells if any(cells) else []


def _against_ensemble(found: Results, label: str, what: tuple[str, str]) -> list[str]:
    ensemble = ("methods", "ensemble of 5") if what == REFERENCE else ("ensemble", label)
    return [shown(found.values(which, name, "nll")) for name in PROBLEMS for which in (what, ensemble)]


def _compared(found: Results, name: str) -> list[tuple[str, tuple[str, str]]]:
    """One chain of the reference, then the methods, the closest first."""
    known = [m for m in METHODS if found.values(("methods", m), name, "total_variation")]
    known.sort(key=lambda m: mean(found.values(("methods", m), name, "total_variation").values()))
    return [("one HMC chain", REFERENCE), *((m, ("methods", m)) for m in known)]


def _closeness(found: Results, what: tuple[str, str], name: str) -> list[str]:
    cells = [
        shown(found.values(what, name, metric, data))
        for data in ("clean", "corrupted")
        for metric in ("accuracy", "nll", "agreement", "total_variation")
    ]
    chosen = [row["chosen"] for (kind, problem, _, _), row in found.rows.items() if (kind, problem) == (what, name)]
    return [*cells, ", ".join(dict.fromkeys(map(_short, filter(None, chosen))))]


def _short(chosen: str) -> str:
    """A knob and its value in three digits."""
    words = [word for word in chosen.split() if word != "epochs"]
    number = f"{float(words[-1]):.3g}"
    return f"{number} epochs" if "epochs" in chosen else " ".join([*words[:-1], number])


def draw(found: Results, folder: Path) -> None:
    """sweeps.png, corruption.png and closeness.png."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    mpl.rcParams |= {"axes.spines.top": False, "axes.spines.right": False}
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    for axis, kind in zip(axes, ("temperature", "scale"), strict=True):
        for name, colour in COLOURS.items():
            base = found.values(REFERENCE, name, "nll")
            points = [(float(s), less(found.values(what, name, "nll"), base)) for s, what in SWEEPS[kind][1]]
            points = [(x, list(values.values())) for x, values in points if values]
            axis.plot([x for x, _ in points], [mean(v) for _, v in points], color=colour, label=name, marker="o", ms=3)
            if points:
                low, high = ([bound(v) for _, v in points] for bound in (min, max))
                axis.fill_between([x for x, _ in points], low, high, color=colour, alpha=0.15, linewidth=0)
        axis.axhline(0, color="#888888", linewidth=0.8)
        axis.axvline(1, color="#888888", linewidth=0.8)
        axis.set(xscale="log", xlabel=TITLES[kind], ylim=(-0.15, 0.8))
    axes[0].set_ylabel("test NLL less that at 1")
    axes[0].legend(frameon=False)
    figure.savefig(folder / "sweeps.png", dpi=110)

    figure, axes = plt.subplots(len(PROBLEMS), len(STRENGTHS), figsize=(14, 8), layout="constrained", sharey="row")
    for row, name in zip(axes, PROBLEMS, strict=True):
        for axis, (kind, strengths) in zip(row, STRENGTHS.items(), strict=True):
            for label, colour in LINES.items():
                start = found.values(method(label), name, "nll")
                points = [(0.0, start)] + [(s, found.at(method(label), name, "nll", kind, s)) for s in strengths]
                points = [(x, values) for x, values in points if values]
                if len(points) > 1:
                    y = [mean(values.values()) for _, values in points]
                    axis.plot([x for x, _ in points], y, color=colour, label=label, marker="o", ms=3)
            axis.set_title(f"{name}: {kind}", fontsize=10)
        row[0].set_ylabel("NLL")
    for axis in axes.flat:
        axis.set_visible(bool(axis.lines))
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=len(LINES), frameon=False)
    figure.savefig(folder / "corruption.png", dpi=110)

    figure, axes = plt.subplots(1, len(PROBLEMS), figsize=(14, 5), layout="constrained")
    for axis, name in zip(axes, PROBLEMS, strict=True):
        compared = _compared(found, name)[::-1]
        for data, colour, marker in (("clean", "#14406b", "o"), ("corrupted", "#c1440e", "s")):
            every = [found.values(what, name, "total_variation", data) for _, what in compared]
            places = [(i, mean(values.values())) for i, values in enumerate(every) if values]
            axis.plot([v for _, v in places], [i for i, _ in places], marker, color=colour, label=data, ms=5)
        axis.set_yticks(range(len(compared)), [label for label, _ in compared], fontsize=8)
        axis.set(title=name, xlabel="total variation from HMC", xlim=(0, None))
        axis.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes[0].legend(loc="upper right")
    figure.savefig(folder / "closeness.png", dpi=110)


def measured(script: str, doc: str | None, measure: Callable[[Path, Path], None]) -> Path:
    """A script's csv: `measure(csv, folder of references)` makes it now, with --summary it is the one that there is."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--summary", action="store_true", help="run nothing")
    parser.add_argument("--references", type=Path, default=Path(tempfile.gettempdir()) / "caveat_hmc_references")
    parser.add_argument("--csv", type=Path, default=Path(script).with_suffix(".csv"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.summary:
        arguments.references.mkdir(parents=True, exist_ok=True)
        measure(arguments.csv, arguments.references)
    found: Path = arguments.csv
    return found
