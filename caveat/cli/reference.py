"""`caveat reference`: build a reference posterior by HMC, or list those that there are."""

from dataclasses import dataclass
from pathlib import Path

from caveat.cli.verb import Common, Verb

__all__ = ["Reference", "References"]


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
class References(Verb):
    """List the references: what is known, what is built, and where."""

    def run(self, common: Common) -> None:
        """Print the list."""
        from caveat.references import find_references, load_reference

        places = find_references()
        references = {name: load_reference(place) for name, place in places.items() if place is not None}
        lines = [
            f"{name:<9} "
            + (f"{references[name].summary()}; {place}" if place else f"not built: caveat reference build {name}")
            for name, place in places.items()
        ]
        content = {
            name: place and {"out": str(place), "facts": references[name].facts} for name, place in places.items()
        }
        common.show(content, "\n".join(lines))
