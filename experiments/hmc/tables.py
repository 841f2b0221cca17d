"""Tables and figures of the README. Numbers are means over seeds, ± one standard error.

    python experiments/hmc/tables.py                                # from results.csv
    python experiments/hmc/tables.py --results results/posteriors   # from what `caveat bench` measured
    python experiments/hmc/tables.py --figures FOLDER               # also sweeps.png, corruption.png and closeness.png

results.csv is of an earlier script, whose cells had names of their own (`EARLIER`).
"""

import argparse
import csv
import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

import torch

PROBLEMS = ("digits", "mnist1d", "mnist")
STRENGTHS = {
    "noise": (0.3, 0.6, 1.0),
    "brightness": (0.5, 1.0, 1.5),
    "contrast": (0.4, 0.6, 0.8),
    "blur": (1, 2, 3),
    "rotation": (15, 30, 45),
}
METHODS = {  # what a table calls a method: its label in posteriors.toml
    "HMC again": "hmc_again",
    "MAP": "map",
    "MAP tempered": "map_tempered",
    "ensemble of 5": "ensemble",
    "ensemble of 50": "large_ensemble",
    "MC dropout": "mc_dropout",
    "SWAG": "swag",
    "mean-field VI": "mean_field_vi",
    "mean-field VI, KL tuned": "tuned_mean_field_vi",
    "SSVI 30%, KL tuned": "tuned_ssvi",
    "Laplace full, given": "laplace_full_given",
    "Laplace Kronecker, given": "laplace_given",
    "Laplace diagonal, given": "laplace_diagonal_given",
    "Laplace Kronecker": "laplace",
    "last layer": "last_layer_laplace",
    "subnetwork 10%, given": "subnetwork_given",
    "subnetwork 10%": "subnetwork",
    "SGLD": "sgld",
    "SGHMC": "sghmc",
    "cyclical SGHMC": "cyclical_sghmc",
    "preconditioned cyclical SGHMC": "preconditioned_sghmc",
}
FAMILIES = {
    "Gaussian": "hmc",
    "Laplace": "laplace_prior",
    "Student-t": "student_t_prior",
    "logistic": "logistic_prior",
    "mixture": "mixture_prior",
}
EARLIER = {  # kind of a cell of results.csv: its label now, from its setting
    "reference": lambda setting: "hmc",
    "methods": METHODS.__getitem__,
    "family": FAMILIES.__getitem__,
    "empcov": lambda setting: "empcov_prior",
    "temperature": lambda setting: f"tempered_hmc, temperature {float(setting):g}",
    "wide": lambda setting: f"wide_hmc, temperature {float(setting):g}",
    "scale": lambda setting: f"scaled_hmc, prior_factor {float(setting):g}",
    "ensemble": lambda setting: f"scaled_ensemble, prior_factor {float(setting):g}",
}
SHIFTED = ("HMC", "EmpCov", "MAP", "MAP tempered", "ensemble of 5", "ensemble of 50", "MC dropout", "SWAG", "SGHMC")
COLOURS = {"digits": "#14406b", "mnist1d": "#c1440e", "mnist": "#2e8b57"}
LINES = {
    "HMC": "#14406b",
    "EmpCov": "#4a90d9",
    "MAP": "#000000",
    "ensemble of 5": "#2e8b57",
    "SGHMC": "#c1440e",
}
MIXED = 1.1  # the largest R-hat of predictions of chains that a table shows without a mark
UNMIXED = " †"
Key = tuple[str, str, int, str, float | None]  # label, problem, seed, shift, severity


@dataclass(frozen=True)
class Results:
    """Measured numbers."""

    scores: dict[Key, dict[str, float]]  # by metric
    chosen: dict[tuple[str, str], list[str]]  # candidates that validation rows chose, by label and problem

    @staticmethod
    def of_csv(path: Path) -> "Results":
        """From results.csv."""
        scores: dict[Key, dict[str, float]] = {}
        chosen: dict[tuple[str, str], list[str]] = {}
        for row in read(path):
            kind, name, setting, seed = row["cell"].split("/")
            label = EARLIER[kind](setting)
            strength = float(row["strength"]) if row["strength"] else None
            others = {"cell", "data", "strength", "chosen"}
            numbers = {key: float(value) for key, value in row.items() if key not in others and value}
            scores[label, name, int(seed), row["data"], strength] = numbers
            if row["chosen"]:
                chosen.setdefault((label, name), []).append(row["chosen"])
        return Results(scores, chosen)

    @staticmethod
    def of_bench(folder: Path) -> "Results":
        """From a folder of `caveat bench`."""
        scores: dict[Key, dict[str, float]] = {}
        for row in read(folder / "results.csv"):
            if row["role"] in ("clean", "shift") and row["value"]:
                severity = float(row["severity"]) if row["severity"] else None
                key = (row["method"], row["data"], int(row["seed"]), row["shift"], severity)
                scores.setdefault(key, {})[row["metric"]] = float(row["value"])
        chosen: dict[tuple[str, str], list[str]] = {}
        for cell in json.loads((folder / "bench.json").read_text())["cells"]:
            if cell["chosen"]:
                chosen.setdefault((cell["method"], cell["data"]), []).append(cell["chosen"])
        return Results(scores, chosen)

    def values(self, label: str, name: str, metric: str, shift: str = "clean") -> dict[int, float]:
        """A metric by seed; over all severities of a shift, or of all shifts ("corrupted"), their mean."""
        by_seed: dict[int, list[float]] = {}
        for (method, problem, seed, condition, _), numbers in self.scores.items():
            wanted = condition != "clean" if shift == "corrupted" else condition == shift
            if (method, problem) == (label, name) and wanted and metric in numbers:
                by_seed.setdefault(seed, []).append(numbers[metric])
        return {seed: mean(values) for seed, values in by_seed.items()}

    def at(self, label: str, name: str, metric: str, shift: str, severity: float) -> dict[int, float]:
        """A metric by seed at one severity."""
        return {
            seed: numbers[metric]
            for (method, problem, seed, condition, own), numbers in self.scores.items()
            if (method, problem, condition, own) == (label, name, shift, severity) and metric in numbers
        }


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a csv."""
    with path.open() as file:
        return list(csv.DictReader(file))


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


def method(name: str) -> str:
    """The label of what a table shows."""
    return {"HMC": "hmc", "EmpCov": "empcov_prior"}.get(name) or METHODS[name]


Sweep = tuple[str, list[tuple[str, str]]]  # the label at 1, and (setting, label) in order


def ladder(label: str, settings: Iterable[float], base: str = "hmc") -> Sweep:
    """The settings of a sweep with its base in its place."""
    steps = [(s, base if s == 1.0 else f"{label} {s:g}") for s in sorted([*settings, 1.0])]
    return base, [(str(s), name) for s, name in steps]


SWEEPS: dict[str, Sweep] = {
    "temperature": ladder("tempered_hmc, temperature", (0.03, 0.1, 0.3, 3.0, 10.0)),
    "wide": ladder("wide_hmc, temperature", (0.1, 0.3, 3.0), "scaled_hmc, prior_factor 10"),
    "scale": ladder("scaled_hmc, prior_factor", (0.01, 0.1, 0.3, 3.0, 10.0)),
    "family": ("hmc", [*FAMILIES.items()]),
}
TITLES = {
    "temperature": "temperature",
    "wide": "temperature, ten times the prior variance",
    "scale": "prior variance times",
    "family": "prior family",
}


def summarise(found: Results) -> None:
    """Every table, under a line that says what it is."""
    seeds = sorted({key[2] for key in found.scores})
    print(f"Seeds {seeds}, {len({key[:3] for key in found.scores})} cells\n")
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
    if not any("rhat_function" in numbers for numbers in found.scores.values()):
        return  # `caveat diagnose` says it of a cell of the bench
    print("### R-hat\n")
    heads = ["reference", "function: max", "share above 1.01", "limit of independent draws", "fewest effective draws"]
    heads += ["weights: max", "share above 1.01", "fewest effective draws", "acceptance", "leapfrog steps"]
    forms = dict.fromkeys(("rhat_function", "share_function", "null_function"), ".3f") | {"ess_function": ".0f"}
    forms |= {"rhat_weights": ".3f", "share_weights": ".3f", "ess_weights": ".0f"}
    forms |= {"acceptance": ".2f", "leapfrog_steps": ".0f"}
    rows = [(n, [shown(found.values("hmc", n, c), form) for c, form in forms.items()]) for n in PROBLEMS]
    table(heads, rows)


def _clean(found: Results, label: str, base: str) -> list[str]:
    cells = []
    for name in PROBLEMS:
        nll = found.values(label, name, "nll")
        mark = UNMIXED if max(found.values(label, name, "rhat_function").values(), default=1.0) > MIXED else ""
        cells += [shown(found.values(label, name, "accuracy")), shown(nll) + mark]
        cells += [shown(less(nll, found.values(base, name, "nll")), "+.3f").replace("±+", "±")]
    return cells if any(cells) else []


def _against_ensemble(found: Results, factor: str, label: str) -> list[str]:
    ensemble = "ensemble" if label == "hmc" else f"scaled_ensemble, prior_factor {float(factor):g}"
    return [shown(found.values(which, name, "nll")) for name in PROBLEMS for which in (label, ensemble)]


def _compared(found: Results, name: str) -> list[tuple[str, str]]:
    """One chain of the reference where it was measured, then the methods, the closest first."""
    variation = {m: found.values(label, name, "total_variation").values() for m, label in METHODS.items()}
    known = sorted((m for m in METHODS if variation[m]), key=lambda m: mean(variation[m]))
    return [("one HMC chain", "hmc"), *((m, METHODS[m]) for m in known)]


def _closeness(found: Results, label: str, name: str) -> list[str]:
    cells = [
        shown(found.values(label, name, metric, data))
        for data in ("clean", "corrupted")
        for metric in ("accuracy", "nll", "agreement", "total_variation")
    ]
    chosen = found.chosen.get((label, name), [])
    return [*cells, ", ".join(dict.fromkeys(map(_short, chosen)))]


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
            base = found.values("hmc", name, "nll")
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
    path: Path = arguments.csv
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="of `caveat bench`; results.csv unless given")
    parser.add_argument("--figures", type=Path, metavar="FOLDER", help="where figures are written; none unless given")
    arguments = parser.parse_args()
    earlier = Path(__file__).with_name("results.csv")
    found = Results.of_csv(earlier) if arguments.results is None else Results.of_bench(arguments.results)
    summarise(found)
    if arguments.figures is not None:
        draw(found, arguments.figures)


if __name__ == "__main__":
    main()
