"""The rows in a csv file, and what a person wants to know of them: the grid, and refusals by what they say."""

import csv
import re
from collections import Counter
from pathlib import Path
from typing import Any

from .cell import FIELDS
from .settings import CORE

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


def page(rows: list[dict[str, Any]]) -> str:
    """What a page says of the rows: how many ended how, the grid of the core settings, and whatever was not well."""
    core = [row for row in rows if row["setting"] in CORE]
    others = [row for row in rows if row["setting"] not in CORE]
    settings = len({row["setting"] for row in others})
    whole = [name for name in dict.fromkeys(row["network"] for row in core)
             if sum(row["network"] == name for row in core) == len(CORE)]  # fmt: skip
    told = f"{summary(core)}; every setting was run on {len(whole)} networks."
    more = f" Of {settings} more settings, on some of the networks: {_ends(others)}." if others else ""
    legend = (
        "`+` fits, predicts, is saved, and loads bit-equal; `r` is refused; `F` is a fault; `t` over the time limit."
    )
    return f"{told}{more}\n\n{legend}\n\n{grid(core)}\n\nWhat did not end well, in all settings:\n\n{refusals(rows)}"


def grid(rows: list[dict[str, Any]]) -> str:
    """A markdown table, networks by settings."""
    names = [name for name in CORE if any(row["setting"] == name for row in rows)]
    names += [name for name in dict.fromkeys(row["setting"] for row in rows) if name not in CORE]
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
    justified = sum(bool(justification(row)) for row in rows)
    networks = len({row["network"] for row in rows})
    settings = len({row["setting"] for row in rows})
    return (
        f"{networks} networks x {settings} settings, {len(rows)} cells: {_ends(rows)}; "
        f"{justified} refusals are justified"
    )


def _ends(rows: list[dict[str, Any]]) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in Counter(row["outcome"] for row in rows).most_common())


def _without_particulars(text: str) -> str:
    """The text without numbers and names between quotes, so that like refusals count as one."""
    return re.sub(r"'[^']*'|\"[^\"]*\"|[\w.]*\.[\w.]+|\d[\d,.]*", "_", text)[:120]
