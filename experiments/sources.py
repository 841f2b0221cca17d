"""Which csv holds each number of the READMEs of the experiments.

    python experiments/sources.py            # the numbers that nothing holds, by page and line; 1 where there are some
    python experiments/sources.py --all      # every number, and where it is found

A number is held by a csv of its page's folder when a cell of it rounds to the number as it is written, as it is or in
another unit (a share as percent, bytes as MiB), or when the mean of a column does, or its standard error, over rows
that differ in up to three names such as the seed, the kind of a shift and its severity, with or without the unshifted
ones. Numbers may also be settings of a script or an experiment file of the folder, or counts of weights
(`network_sizes.csv`). Those in code, links, headings and names (ResNet-18) claim nothing. A line with ‡ says that some
of its numbers are in no csv as they are: measured once and not kept, rounded counts, or worked out from several cells
by the page's script.

It finds numbers that cannot be right or have no source. That a number of two digits is held does not show that it
is the one that was meant.
"""

import argparse
import csv
import itertools
import math
import re
import sys
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
MARK = "‡"
NUMBER = re.compile(
    r"(?<![\w.])[+-]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d*\.\d+|\d+)(?:e[+-]?\d+)?(?![\w])", re.IGNORECASE
)
IGNORED = re.compile(
    r"`[^`]*`|\$[^$]*\$|\]\([^)]*\)|https?://\S+|\b[A-Za-z][\w.]*-\d[\w-]*|\b(?:19|20)\d\d\b|\b\d+-\d+(?:-\d+)*\b"
    r"|\d+ x \d+|\d+ × \d+|torch \d[\d.]*|\d+(?:st|nd|rd|th)\b"
)
UNITS = (1.0, 100.0, 1e-3, 1e-6, 1e-9, 1e-12, 1e3, 1 / 60, 1 / 2**10, 1 / 2**20, 1 / 2**30, 8.0, -1.0)
KEYS = 8  # columns of names, at most, by which rows are told apart
BASES = ("clean", "0", "0.0", "none")  # that a mean over shifts leaves out
MEASURED = ("value", "nll", "accuracy", "seconds", "ece")  # even where they take few values


def numbers_of(line: str) -> Iterator[str]:
    """The numbers of a line that claim something."""
    if line.startswith(("#", "    ", "!")):
        return
    yield from NUMBER.findall(IGNORED.sub(" ", line))


def lines_of(page: Path) -> Iterator[tuple[int, str]]:
    """Lines that are not in a block of code, with their numbers."""
    code = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            code = not code
        elif not code:
            yield number, line


def as_number(text: str) -> float:
    """A cell's value; nan where it is no number."""
    try:
        return float(text)
    except ValueError:
        return math.nan


@cache
def values_of(path: Path) -> tuple[float, ...]:
    """Every number of a csv, and the means of its columns over rows that differ in up to three names; sorted."""
    with path.open(newline="") as file:
        rows = list(csv.reader(file))
    found = {float(n) for row in rows for cell in row for n in re.findall(r"(?<![\w.])\d*\.?\d+(?:e-?\d+)?", cell)}
    body = [row for row in rows[1:] if len(row) == len(rows[0])]
    if not body:
        return tuple(sorted({value * unit for value in found for unit in UNITS}))
    columns = list(zip(*body, strict=True))
    most = [24 if any(as_number(cell) == as_number(cell) for cell in column) else len(body) // 8 for column in columns]
    few = {i for i, column in enumerate(columns) if 1 < len(set(column)) <= max(24, most[i])}
    numbers = np.array([[as_number(cell) for cell in column] for column in columns], float).reshape(len(columns), -1)
    counts = np.isfinite(numbers).sum(1)
    measured = [i for i in range(len(columns)) if counts[i] > 1 and (i not in few or rows[0][i] in MEASURED)]
    names = [i for i in sorted(few) if i not in measured][:KEYS]
    codes = {i: np.unique(columns[i], return_inverse=True)[1] for i in names}
    first = {i: [cell.partition(" ")[0] if " " in cell else "" for cell in columns[i]] for i in names}
    kinds = {i: np.unique(first[i], return_inverse=True)[1] for i in names}
    base = {i: np.array([cell in BASES for cell in columns[i]]) for i in names}
    for left_out in (c for count in (0, 1, 2, 3) for c in itertools.combinations(names, count)):
        for coarse in (False, True):
            keys = [codes[i] for i in names if i not in left_out] + [kinds[i] for i in left_out if coarse]
            group = _numbered(keys, len(body))
            without_base = ~np.any([base[i] for i in left_out] or [np.zeros(len(body), bool)], axis=0)
            for kept in (np.ones(len(body), bool), without_base):
                for i in measured:
                    found |= _summaries(numbers[i][kept], group[kept])
    return tuple(sorted({value * unit for value in found for unit in UNITS}))


def _numbered(keys: list[np.ndarray], rows: int) -> np.ndarray:
    """A number for every combination of the keys."""
    group = np.zeros(rows, dtype=np.int64)
    for key in keys:
        group = np.unique(group * (int(key.max()) + 1) + key, return_inverse=True)[1]
    return group


def _summaries(values: np.ndarray, group: np.ndarray) -> set[float]:
    """Means of the groups that have several values, and the standard errors of these."""
    there = np.isfinite(values)
    values, group = values[there], group[there]
    count = np.bincount(group)
    several = count > 1
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = np.bincount(group, values) / count
        spread = np.bincount(group, (values - mean[group]) ** 2) / (count - 1) / count
    return {*mean[several].tolist(), *np.sqrt(spread[several]).tolist()}


def holds(values: tuple[float, ...], text: str) -> bool:
    """Whether one of the values is written so, rounded to as many digits."""
    plain = text.replace(",", "").lstrip("+").lower()
    number = abs(float(plain))
    digits = len(plain.partition("e")[0].partition(".")[2])
    exponent = int(plain.partition("e")[2] or 0)
    half = 0.5000001 * 10.0 ** (exponent - digits)
    place = bisect_left(values, number - half)
    return place < len(values) and values[place] <= number + half


@cache
def settings_of(folder: Path) -> frozenset[float]:
    """Whole and other numbers that stand in scripts and experiment files."""
    text = "".join(file.read_text() for kind in ("py", "toml") for file in sorted(folder.glob(f"*.{kind}")))
    return frozenset(abs(float(n.replace("_", ""))) for n in re.findall(r"(?<![\w.])\d[\d_]*\.?\d*(?:e-?\d+)?", text))


def sources_of(page: Path) -> list[Path]:
    """The csv files that a page's numbers may come from."""
    own = sorted(HERE.rglob("*.csv")) if page.parent == HERE else sorted(page.parent.glob("*.csv"))
    return [
        *own,
        HERE / "papers.csv",
        HERE / "network_sizes.csv",
        HERE / "shift_digits.csv",
        *sorted((ROOT / "benchmarks").glob("*.csv")),
    ]


def source_of(page: Path, text: str) -> str | None:
    """Where a number is held, by the name of the file."""
    for file in sources_of(page):
        if holds(values_of(file), text):
            return str(file.relative_to(ROOT))
    value = abs(float(text.replace(",", "")))
    folders = [page.parent] if page.parent != HERE else [HERE, *(path for path in HERE.iterdir() if path.is_dir())]
    if value in set().union(*(settings_of(folder) for folder in folders)):
        return "a setting"
    whole = "." not in text and value <= 20
    return "a small count" if whole else None


def pages() -> Iterable[Path]:
    """The index, and the page of each folder."""
    return sorted(HERE.rglob("README.md"))


def missing(page: Path) -> list[tuple[int, str, str]]:
    """Line, number and text of what nothing holds and no mark explains."""
    found = []
    for number, line in lines_of(page):
        if MARK in line:
            continue
        found += [(number, text, line) for text in numbers_of(line) if source_of(page, text) is None]
    return found


def main(words: list[str] | None = None) -> int:
    """0 where every number is held or marked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every number, and where it is found")
    given = parser.parse_args(words)
    count = 0
    for page in pages():
        if given.all:
            for number, line in lines_of(page):
                for text in numbers_of(line):
                    print(
                        f"{page.relative_to(ROOT)}:{number}: {text}: {source_of(page, text) or MARK * (MARK in line)}"
                    )
        for number, text, line in missing(page):
            print(f"{page.relative_to(ROOT)}:{number}: {text} is in no csv: {line[:90]}")
            count += 1
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
