"""`caveat reference`: build a reference posterior by HMC, import or fetch a published one, or list them."""

from dataclasses import dataclass
from pathlib import Path

from caveat.cli.verb import Common, Verb

__all__ = ["FetchReference", "ImportReference", "Reference", "References"]


@dataclass(frozen=True)
class Reference(Verb):
    """Sample a reference posterior by HMC, check that its chains have mixed, and store what it predicts."""

    out: Path | None = None  # the folder to write; else <name> in CAVEAT_REFERENCES, else in the user's cache
    draws: int | None = None  # of each chain; 400 unless given

    def run(self, common: Common, name: str) -> None:
        """Build it."""
        from caveat.references import build_reference, load_reference

        place = build_reference(
            name,
            out=self.out,
            draws=self.draws,
            seed=common.seed,
            device=common.place(),
            progress=not common.quiet,
        )
        reference = load_reference(place)
        common.show({"out": str(place), "facts": reference.facts}, f"{name}: {reference.summary()} -> {place}")


@dataclass(frozen=True)
class ImportReference(Verb):
    """Store class probabilities that others published for a data set's test rows, to compare posteriors with."""

    data: str  # the data set, by name or path
    inputs: Path | None = (
        None  # the test inputs in the order of the predictions (csv, npy, npz with x), to find rows by
    )
    labels: Path | None = None  # the test labels in the order of the predictions (csv, npy, npz with y), to check it
    first: int | None = None  # they are about the test rows from this number on, in the data set's own order
    name: str | None = None  # of the reference; the file's name unless given
    model: str | None = None  # the network that was sampled: a name, or file.py:function
    prior_precision: float | None = None  # of its Gaussian prior
    draws: int = 1  # of each chain
    source: str = ""  # who made them, and where they were published
    out: Path | None = None  # the folder to write; else <name> in CAVEAT_REFERENCES, else in the user's cache
    data_dir: Path | None = None  # where named data sets are; else CAVEAT_DATA, else the user's cache

    def run(self, common: Common, predictions: Path) -> None:
        """Read, put in order, check and store it."""
        from caveat.references import Origin, import_reference, load_reference

        place = import_reference(
            predictions,
            Origin(self.data, self.model, self.prior_precision, self.draws, self.source),
            name=self.name,
            inputs=self.inputs,
            labels=self.labels,
            first=self.first,
            out=self.out,
            data_dir=self.data_dir,
        )
        reference = load_reference(place)
        common.show(
            {"out": str(place), "facts": reference.facts}, f"{reference.name}: {reference.summary()} -> {place}"
        )


@dataclass(frozen=True)
class FetchReference(Verb):
    """Download a published reference that is known by name."""

    out: Path | None = None  # the folder to write; else <name> in CAVEAT_REFERENCES, else in the user's cache
    data_dir: Path | None = None  # where named data sets are; else CAVEAT_DATA, else the user's cache
    base_url: str | None = None  # a mirror with the same file names

    def run(self, common: Common, name: str) -> None:
        """Download, put in order, check and store it."""
        from caveat.references import fetch_reference, load_reference

        place = fetch_reference(name, out=self.out, data_dir=self.data_dir, base_url=self.base_url)
        reference = load_reference(place)
        common.show({"out": str(place), "facts": reference.facts}, f"{name}: {reference.summary()} -> {place}")


@dataclass(frozen=True)
class References(Verb):
    """List the references: what is known, what is built, and where."""

    def run(self, common: Common) -> None:
        """Print the list."""
        from caveat.references import PUBLISHED, find_references, load_reference

        places = find_references()
        references = {name: load_reference(place) for name, place in places.items() if place is not None}
        width = max(map(len, places))
        lines = [
            f"{name:<{width}} "
            + (
                f"{references[name].summary()}; {place}"
                if place
                else f"not here: caveat reference {'fetch' if name in PUBLISHED else 'build'} {name}"
            )
            for name, place in places.items()
        ]
        content = {
            name: place and {"out": str(place), "facts": references[name].facts} for name, place in places.items()
        }
        common.show(content, "\n".join(lines))
