"""The rows in a csv file, and what a person wants to know of them: the grid, and refusals by what they say."""

import csv
import re
from collections import Counter
from pathlib import Path
from typing import Any

from .cell import FIELDS

MARKS = {"ok": "+", "refused": "r", "over the time limit": "t", "fault": "F", "died": "F"}
JUSTIFIED = {
    "has no dropout": "MC dropout draws masks, and there is no place for one",
    "reached no layer": "MC dropout draws masks, and there is no place for one",
    "this network has fewer than two of them": "masks of nodes need two layers with nodes between them",
    "is more than the network has": "fewer weights than asked for",
}


class Rows:
    """Rows by network and setting; those of a file are read, and it is written anew with every row."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows: dict[tuple[str, str], dict[str, Any]] = {}
        if path.exists():
            with path.open(newline="") as file:
                self._rows = {(row["network"], row["setting"]): row for row in csv.DictReader(file)}

    def __contains__(self, key: tuple[str, str]) -> bool:
        return key in self._rows

    def all(self) -> list[dict[str, Any]]:
        """In the order in which they first came."""
        return [*self._rows.values()]

    def drop(self, outcomes: set[str]) -> None:
        """Forget cells that ended in one of these ways, so that they run again."""
        self._rows = {key: row for key, row in self._rows.items() if row["outcome"] not in outcomes}

    def keep(self, row: dict[str, Any]) -> None:
        """Put a row in the place of an older one of the same cell."""
        self._rows[row["network"], row["setting"]] = row
        part = self.path.with_suffix(".part")
        with part.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(self._rows.values())
        part.replace(self.path)


def grid(rows: list[dict[str, Any]]) -> str:
    """A markdown table, networks by settings."""
    names = list(dict.fromkeys(row["setting"] for row in rows))
    marks = {(row["network"], row["setting"]): MARKS.get(row["outcome"], "F") for row in rows}
    lines = ["| network | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    networks = dict.fromkeys(row["network"] for row in rows)
    lines += [f"| {one} | " + " | ".join(marks.get((one, name), "") for name in names) + " |" for one in networks]
    return "\n".join(lines)


def refusals(rows: list[dict[str, Any]]) -> str:
    """What was said where a cell did not end well, the commonest first, with where it was."""
    by_text: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if row["outcome"] != "ok":
            by_text.setdefault((row["outcome"], _without_particulars(row["said"])), []).append(row)
    lines = ["| cells | outcome | stage | settings | networks | said | justified |", "|---|---|---|---|---|---|---|"]
    for (outcome, _), group in sorted(by_text.items(), key=lambda item: -len(item[1])):
        settings = ", ".join(dict.fromkeys(row["setting"] for row in group))
        networks = list(dict.fromkeys(row["network"] for row in group))
        shown = ", ".join(networks[:4]) + (f" and {len(networks) - 4} more" if len(networks) > 4 else "")
        said = group[0]["said"][:300].replace("|", "/")
        cells = (len(group), outcome, group[0]["stage"], settings, shown, said, justification(group[0]) or "no")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def justification(row: dict[str, Any]) -> str:
    """Why a refusal is as it should be; nothing where it is not known to be."""
    if row["outcome"] != "refused":
        return ""
    return next((why for part, why in JUSTIFIED.items() if part in row["said"]), "")


def summary(rows: list[dict[str, Any]]) -> str:
    """How many cells ended how."""
    counts = Counter(row["outcome"] for row in rows)
    justified = sum(bool(justification(row)) for row in rows)
    networks = len({row["network"] for row in rows})
    settings = len({row["setting"] for row in rows})
    ends = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
    return f"{networks} networks x {settings} settings, {len(rows)} cells: {ends}; {justified} refusals are justified"


def _without_particulars(text: str) -> str:
    """The text without numbers and names between quotes, so that like refusals count as one."""
    return re.sub(r"'[^']*'|\"[^\"]*\"|[\w.]*\.[\w.]+|\d[\d,.]*", "_", text)[:120]
