"""`caveat report`: from a folder of results to one HTML page."""

from dataclasses import dataclass
from pathlib import Path

from caveat.cli.verb import Common, Verb

__all__ = ["Report"]


@dataclass(frozen=True)
class Report(Verb):
    """Make one self-contained HTML page of a folder of results."""

    results: Path | None = None  # a folder of `caveat bench`, `evaluate` or `demo`; the newest below here unless given
    out: Path | None = None  # the page; report.html in that folder unless given
    title: str | None = None  # of the page; a bench has its own

    def run(self, common: Common) -> None:
        """Write the page."""
        from caveat import report

        page = report.write(self.results or report.newest(), self.out, title=self.title)
        common.show({"report": str(page)}, f"The page: {page}")
