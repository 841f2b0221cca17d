"""A table of what `pieces.py` wrote: a line a method, means over seeds with the lowest and highest.

    python experiments/pieces_table.py experiments/subnetwork/resnet18_mnist.csv

Columns that no method has are left out. "Shifted" is the mean over all corruptions and severities of a seed; AUROC, how
well inputs of another set are told by the entropy of predictions.
"""

import csv
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean

Row = dict[str, str]
CLEAN = {  # column of the csv: heading, unit, form
    "accuracy": ("accuracy", 100, ".2f"),
    "nll": ("NLL", 1, ".3f"),
    "joint_nll": ("joint NLL a label", 1, ".3f"),
    "ece": ("top-label ECE", 1, ".3f"),
    "marginal_calibration_error": ("marginal calibration error", 1, ".4f"),
    "agreement": ("agreement with HMC, %", 100, ".1f"),
    "total_variation": ("total variation", 1, ".3f"),
    "rhat_predictions": ("largest R-hat", 1, ".2f"),
}
SHIFTED = {"accuracy": ("accuracy, shifted", 100, ".1f"), "nll": ("NLL, shifted", 1, ".3f")}
SHIFTED |= {"joint_nll": ("joint NLL, shifted", 1, ".3f"), "ece": ("ECE, shifted", 1, ".3f")}
NOT_YET = "*Not yet run.*"


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; what nobody measured is an empty cell."""
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def several(values: Sequence[float], form: str) -> str:
    """The mean, and from two seeds on the lowest and highest."""
    if not values:
        return ""
    ends = f" ({min(values):{form}} to {max(values):{form}})" if len(values) > 1 else ""
    return f"{mean(values):{form}}{ends}"


def read(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def by_seed(rows: Iterable[Row], metric: str, times: float) -> list[float]:
    """The metric's mean over rows of each seed that has it."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row[metric]:
            found.setdefault(row["seed"], []).append(times * float(row[metric]))
    return [mean(values) for values in found.values()]


def pieces(path: Path, data: str) -> str:
    """The table of one data set of a csv; says so where there is none."""
    rows = [row for row in read(path) if row["data"] == data] if path.exists() else []
    if not rows:
        return NOT_YET
    others = sorted({row["shift"] for row in rows if row["auroc_entropy"]})
    heads = ["", *(head for part in (CLEAN, SHIFTED) for head, _, _ in part.values())]
    heads += [*(f"AUROC, {name}" for name in others), "seconds of the fit", "seeds"]
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method]
        clean = [row for row in own if row["shift"] == "clean"]
        shifted = [row for row in own if row["shift"] not in ("clean", *others)]
        line = [method.replace("_", " ")]
        for part, columns in ((clean, CLEAN), (shifted, SHIFTED)):
            line += [several(by_seed(part, metric, times), form) for metric, (_, times, form) in columns.items()]
        for name in others:
            line.append(several(by_seed([row for row in own if row["shift"] == name], "auroc_entropy", 1), ".3f"))
        lines.append([*line, several(by_seed(clean, "fit_seconds", 1)[:1], ".0f"), str(len(clean))])
    kept = [place for place, head in enumerate(heads) if not head or any(line[place] for line in lines)]
    return markdown([heads[place] for place in kept], [[line[place] for place in kept] for line in lines])


if __name__ == "__main__":
    for name in sys.argv[1:]:
        file = Path(name)
        for data in dict.fromkeys(row["data"] for row in read(file)):
            print(f"\n{name}, {data}\n\n{pieces(file, data)}")
