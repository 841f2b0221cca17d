"""Fills README.md here and docs/adapters.md with what language.csv and vit.csv have.

    python experiments/adapters/pages.py            # writes the parts again
    python experiments/adapters/pages.py --check    # says which of them are not those of the csv files

A part stands between `<!-- NAME -->` and `<!-- end -->`. Numbers are means over seeds with standard errors; a method is
called better or worse than the tempered point where the 95% interval of the mean difference (Student's t over the
differences, seed by seed) leaves zero out, which is asked of three seeds or more.
"""

import argparse
import csv
import re
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from caveat.evaluate.comparison.crossed_intervals import student_quantile

HERE = Path(__file__).resolve().parent
PAGES = (HERE / "README.md", HERE.parents[1] / "docs" / "adapters.md")
PART = re.compile(r"<!-- (?P<name>[a-z_]+) -->\n.*?<!-- end -->", re.DOTALL)
ENOUGH = 3  # seeds for a verdict
POINT, TEMPERED = "map", "map, temperature"
FEW = "too few seeds"


@dataclass(frozen=True)
class Column:
    """A score of a table: which lines it is read from, and how it is written."""

    head: str
    on: str
    score: str
    digits: int = 3


LANGUAGE = (
    Column("accuracy", "test", "accuracy"),
    Column("NLL", "test", "nll"),
    Column("ECE", "test", "ece"),
    Column("joint NLL", "test", "joint_nll"),
    Column("NLL, 60% of words left out", "words left out 0.6", "nll"),
    Column("NLL, other modules", "other modules", "nll"),
    Column("AUROC, reference paragraphs", "reference paragraphs", "auroc_entropy"),
    Column("fit, s", "test", "fit_seconds", 0),
    Column("stored MB", "test", "stored_mb", 2),
)
NLL, ECE, JOINT, COSTS = LANGUAGE[1], LANGUAGE[2], LANGUAGE[3], LANGUAGE[-2:]
MEASURES = (
    ("NLL of single rows", NLL),
    ("ECE of single rows", ECE),
    ("NLL with 60% of words left out", LANGUAGE[4]),
    ("NLL on modules that training has not seen", LANGUAGE[5]),
    ("NLL of ten labels of two rows together", JOINT),
)
STRANGERS = ("cifar100", "mnist", "svhn")
Scores = dict[str, dict[str, float]]  # method -> seed -> score


def read(name: str) -> list[dict[str, str]]:
    """The lines of a csv file here; none where it is not there."""
    if not (HERE / name).exists():
        return []
    with (HERE / name).open(newline="") as file:
        return list(csv.DictReader(file))


def scores(lines: list[dict[str, str]], column: Column) -> Scores:
    """A column's score of every method and seed."""
    found: Scores = {}
    for line in lines:
        if line["on"] == column.on and line[column.score]:
            found.setdefault(line["method"], {})[line["seed"]] = float(line[column.score])
    return found


def with_error(values: list[float], digits: int) -> str:
    """A mean, and its standard error where there are several values."""
    text = f"{statistics.mean(values):.{digits}f}"
    return text if len(values) < 2 else f"{text} ± {_error(values):.{digits}f}"


def table(lines: list[dict[str, str]], columns: tuple[Column, ...]) -> str:
    """All methods, in the order of the file."""
    by_column = [scores(lines, column) for column in columns]
    rows = ["| method | seeds | " + " | ".join(column.head for column in columns) + " |"]
    rows.append("|---" * (len(columns) + 2) + "|")
    for method, seeds in by_column[0].items():
        cells = [
            with_error([*found[method].values()], column.digits)
            for column, found in zip(columns, by_column, strict=True)
        ]
        rows.append(f"| {method} | {len(seeds)} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def verdicts(found: Scores, point: str = TEMPERED) -> dict[str, list[str]]:
    """Methods by whether their score is lower than the tempered point's, higher, or cannot be told from it."""
    sides: dict[str, list[str]] = {"better": [], "worse": [], "not told apart": [], FEW: []}
    beside = found.get(point, {})
    for method, seeds in found.items():
        if method == point:
            continue
        differences = [value - beside[seed] for seed, value in seeds.items() if seed in beside]
        if len(differences) < ENOUGH:
            side = FEW
        elif abs(mean := statistics.mean(differences)) <= student_quantile(len(differences) - 1) * _error(differences):
            side = "not told apart"
        else:
            side = "better" if mean < 0 else "worse"
        sides[side].append(f"`{method}`" + (f" ({statistics.mean(differences):+.2f})" if differences else ""))
    return sides


def language_table() -> str:
    """The table of the experiment on a language model."""
    return table(read("language.csv"), LANGUAGE)


def language_verdicts() -> str:
    """What can be told from the tempered point, by measure, and what was not run often enough to be."""
    lines = read("language.csv")
    said = [f"Differences to the tempered point, of methods that have {ENOUGH} seeds or more in common with it:", ""]
    for what, column in MEASURES:
        sides = verdicts(scores(lines, column))
        parts = [f"{side}: {', '.join(methods)}" for side, methods in sides.items() if methods and side != FEW]
        said.append(f"- **{what}**. {'. '.join(parts) or 'No method'}.")
    if few := verdicts(scores(lines, NLL))[FEW]:
        names = ", ".join(name.partition(" (")[0] for name in few)
        said.append(f"- Run with fewer seeds, so that nothing is said of them: {names}.")
    return "\n".join(said)


def language_in_short() -> str:
    """In plain words: which posteriors are ahead of the tempered point, and in what."""
    lines = read("language.csv")
    count = len(scores(lines, NLL)[TEMPERED])
    said = [f"Over {count} seeds, ahead of the tempered point by more than chance:", ""]
    for what, column in MEASURES:
        found = scores(lines, column)
        ahead = verdicts(found)["better"]
        lowest = min(found, key=lambda name: statistics.mean(found[name].values()))
        said.append(f"- {what}: {', '.join(ahead) or f'**none**; the lowest mean is that of {lowest}'}.")
    return "\n".join(said)


def vit_state() -> str:
    """Whether the experiment on a vision transformer has been run, and what it has."""
    lines = read("vit.csv")
    if not lines:
        return (
            "The experiment on a vision transformer needs a GPU and is **not yet run**: nothing is claimed of adapters "
            "under corruption of images."
        )
    parts = []
    for rows in sorted({line["rows"] for line in lines}, key=int):
        part = [line for line in lines if line["rows"] == rows]
        places = [*dict.fromkeys(line["on"] for line in part)]
        hardest = [Column(f"NLL, {on}", on, "nll") for on in places if on.endswith(" 5")]
        strange = [Column(f"AUROC, {on}", on, "auroc_entropy") for on in places if on in STRANGERS]
        shown = table(part, (*LANGUAGE[:4], *hardest, *strange, *COSTS))
        parts.append(f"{int(rows):,} training images:\n\n{shown}\n\n{_under_shift(part)}")
    return "\n\n".join(parts)


def _under_shift(lines: list[dict[str, str]]) -> str:
    """Whether a posterior is ahead of the tempered point on corrupted images."""
    places = {line["on"] for line in lines if line["nll"]} - {"test"}
    each = [scores(lines, Column("", on, "nll")) for on in sorted(places)]
    mean: Scores = {
        method: {seed: statistics.mean(found[method][seed] for found in each) for seed in seeds}
        for method, seeds in each[0].items()
        if method != POINT
    }
    sides = verdicts(mean)
    said = [f"{side}: {', '.join(methods)}" for side, methods in sides.items() if methods]
    ahead = "some posteriors are ahead of the tempered point"
    if not sides["better"]:
        few = all(side == FEW for side, methods in sides.items() if methods)
        ahead = "too few seeds tell" if few else "**no posterior is seen to be ahead of the tempered point**"
    return (
        f"Under shift, by the mean NLL of {len(each)} corruptions and severities, {ahead}. Differences to it in nats: "
        f"{'. '.join(said) or 'none yet'}."
    )


PARTS: dict[str, Callable[[], str]] = {
    "language_table": language_table,
    "language_verdicts": language_verdicts,
    "language_in_short": language_in_short,
    "vit_state": vit_state,
}


def filled(page: str) -> str:
    """The page with its parts as they are now."""
    return PART.sub(lambda match: f"<!-- {match['name']} -->\n{PARTS[match['name']]()}\n<!-- end -->", page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    stale = [page for page in PAGES if (text := page.read_text(encoding="utf-8")) != filled(text)]
    for page in stale:
        print(f"{page.name} is not what the csv files give" if check else f"{page.name} is written again")
        if not check:
            page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
    sys.exit(bool(check and stale))


def _error(values: list[float]) -> float:
    return statistics.stdev(values) / len(values) ** 0.5


if __name__ == "__main__":
    main()
