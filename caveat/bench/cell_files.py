"""What a finished cell has on disk, read back: for the tables here, and for pages.

cells/<name>/metrics.json    what `caveat evaluate` wrote: scores of every part, and what the fit says of itself
cells/<name>/result.json     what the cell cost, and which candidate was chosen
cells/<name>/scores/*.npz    a few numbers for every row, see `caveat.bench.rows`
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from caveat.bench.rows import COLUMNS
from caveat.storage import CorruptFile, read_arrays, read_json

__all__ = ["SavedCell", "damage_of", "read_cell"]


@dataclass(frozen=True)
class SavedCell:
    """A finished cell, as its folder has it."""

    folder: Path
    kind: str  # classification or regression
    parts: tuple[dict[str, Any], ...]  # the entries of metrics.json: test sets with their scores
    info: dict[str, Any]  # what the fit says of itself
    cost: dict[str, float | None]
    chosen: str  # the candidate with the lowest validation NLL, in words; nothing where there was one
    notes: tuple[str, ...]  # what beside the method differs from the reference
    metrics: dict[str, Any] = field(default_factory=dict, repr=False)  # all of metrics.json, which a page needs

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the fit warned of."""
        return tuple(self.info.get("warnings", ()))

    def part(self, name: str) -> dict[str, Any]:
        """The test set of that name."""
        return next(part for part in self.parts if part["name"] == name)

    def rows(self, name: str) -> dict[str, np.ndarray]:
        """The numbers of every row of a test set; a file that is damaged is refused by name."""
        part = self.part(name)
        file = self.folder / "scores" / Path(part["file"]).name
        columns = COLUMNS[self.kind, part["role"]]
        arrays = read_arrays(file, columns)
        for column in columns:
            if arrays[column].shape != (part["rows"],):
                raise CorruptFile(f"{file}: {column} has shape {arrays[column].shape}, not one for {part['rows']} rows")
        return arrays


def read_cell(folder: Path) -> SavedCell:
    """The finished cell in a folder."""
    metrics, result = read_json(folder / "metrics.json"), read_json(folder / "result.json")
    try:
        notes = tuple(metrics.get("reference", {}).get("notes", ()))
        chosen = result.get("chosen", "")
        parts, info = tuple(metrics["data"]), metrics["info"]
        for part in parts:
            if (metrics["kind"], part["role"]) not in COLUMNS or not {"name", "file", "rows", "metrics"} <= part.keys():
                raise KeyError(f"a whole entry of {part.get('name')!r}")
        return SavedCell(folder, metrics["kind"], parts, info, dict(result["cost"]), chosen, notes, metrics)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CorruptFile(f"metrics.json or result.json in {folder} lacks something ({error})") from error


def damage_of(folder: Path) -> str | None:
    """What is damaged among the files of a finished cell, in words that name the file; None where all are whole."""
    try:
        cell = read_cell(folder)
        for part in cell.parts:
            cell.rows(part["name"])
            read_arrays(folder / part["file"])
    except (CorruptFile, FileNotFoundError) as error:
        return str(error)
    return None
