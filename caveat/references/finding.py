"""Stored references by name: those that were built, fetched or imported here, and that of the package."""

from pathlib import Path

from caveat.evaluate.fidelity import ReferenceSet, read_reference
from caveat.references.hmc_references import RECIPES
from caveat.references.places import folders
from caveat.references.published import PUBLISHED

__all__ = ["find_references", "load_reference"]


def load_reference(name: str | Path) -> ReferenceSet:
    """A stored reference by name ("digits"), or by the folder it lies in; refused where it was changed since."""
    if (Path(name) / "reference.json").is_file():
        return read_reference(name)
    places = [place / str(name) for place in folders()] if Path(name).name == str(name) else []
    for place in places:
        if (place / "reference.json").is_file():
            return read_reference(place)
    looked = ", ".join(map(str, places))
    for known, verb in ((RECIPES, "build"), (PUBLISHED, "fetch")):
        if name in known:
            raise FileNotFoundError(
                f"the reference {name} is not here (looked in {looked}): caveat reference {verb} {name}"
            )
    listed = ", ".join([*RECIPES, *PUBLISHED])
    raise ValueError(
        f"there is no reference {str(name)!r}, by name or as a folder: there are {listed}, and imported ones"
    )


def find_references() -> dict[str, Path | None]:
    """Where each known reference lies, and each that was imported; None where one is not here."""
    found: dict[str, Path | None] = dict.fromkeys([*RECIPES, *PUBLISHED])
    for folder in reversed([*folders()]):  # what stands first in the order is found
        found |= {file.parent.name: file.parent for file in sorted(folder.glob("*/reference.json"))}
    return found
