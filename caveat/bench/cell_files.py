"""What a finished cell has on disk, read back: for the tables here, and for pages.

cells/<name>/metrics.json    what `caveat evaluate` wrote: scores of every part, and what the fit says of itself
cells/<name>/result.json     what the cell cost, and which candidate was chosen
cells/<name>/scores/*.npz    a few numbers for every row, see `caveat.bench.rows`
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from caveat.storage import read_json

__all__ = ["SavedCell", "read_cell"]


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
        """The numbers of every row of a test set."""
        file = self.folder / "scores" / Path(self.part(name)["file"]).name
        with np.load(file, allow_pickle=False) as arrays:
            return {key: arrays[key] for key in arrays.files}


def read_cell(folder: Path) -> SavedCell:
    """The finished cell in a folder."""
    metrics, result = read_json(folder / "metrics.json"), read_json(folder / "result.json")
    notes = tuple(metrics.get("reference", {}).get("notes", ()))
    chosen = result.get("chosen", "")
    parts, info = tuple(metrics["data"]), metrics["info"]
    return SavedCell(folder, metrics["kind"], parts, info, result["cost"], chosen, notes, metrics)
