"""Reads the files of a finished cell: the one reader that the bench's tables and the report's page share.

metrics.json     what `caveat evaluate` wrote        result.json    what the fit and a prediction cost
scores/*.npz     a few numbers for every row scored, see `caveat.bench.rows`
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from caveat.storage import read_json

__all__ = ["CellFiles", "read_cell"]


@dataclass(frozen=True)
class CellFiles:
    """A finished cell as its folder has it; the numbers of every row are read when they are asked for."""

    folder: Path
    metrics: dict[str, Any]  # metrics.json
    cost: dict[str, float | None]  # seconds, bytes, FLOPs and gradients, by name

    def row_scores(self, file: str | Path) -> dict[str, np.ndarray]:
        """The numbers of every row of a data set, [N] each, from the name of its prediction file."""
        with np.load(self.folder / "scores" / Path(file).name, allow_pickle=False) as content:
            return {name: content[name] for name in content.files}


def read_cell(folder: Path) -> CellFiles:
    """Read a cell that is done."""
    return CellFiles(folder, read_json(folder / "metrics.json"), read_json(folder / "result.json")["cost"])
