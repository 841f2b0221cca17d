"""Where references lie: in the folder that CAVEAT_REFERENCES names, in the user's cache, and in the package.

New ones are written to the first of these.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from caveat.data.download import cache_folder

__all__ = ["PACKAGED", "folders", "new_place"]

PACKAGED = Path(__file__).parent


def folders() -> Iterator[Path]:
    """Where references are looked for, in this order."""
    if os.environ.get("CAVEAT_REFERENCES"):
        yield Path(os.environ["CAVEAT_REFERENCES"])
    with contextlib.suppress(ImportError):  # without the extra for data nothing can have been built there
        yield cache_folder() / "references"
    yield PACKAGED


def new_place(name: str, out: str | Path | None) -> Path:
    """The folder to write a reference to; one that exists is refused."""
    if out is None and Path(name).name != name:
        raise ValueError(f"{name!r} is no name of a reference: leave out what separates folders, or give out=")
    place = next(folders()) / name if out is None else Path(out)
    if place.exists():
        raise FileExistsError(f"{place} exists: remove it first, or choose another folder with out=")
    return place
