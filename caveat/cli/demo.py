"""`caveat demo`: what a posterior is worth on a small problem, in one table and one page."""

from dataclasses import dataclass
from pathlib import Path

from caveat.cli.verb import Common, Verb

__all__ = ["Demo"]


@dataclass(frozen=True)
class Demo(Verb):
    """Fit a network's posterior in eight ways, three times each; print what each is worth and costs; write a page."""

    out: Path = Path("caveat-demo")  # folder for the results; one that the demo made before is replaced

    def run(self, common: Common) -> None:
        """Do it."""
        from caveat.demo import run_demo

        table = run_demo(self.out, seed=common.seed, device=common.place(), progress=not common.quiet)
        page = self.out / "report.html"
        common.show({"report": str(page), "csv": str(self.out / "results.csv")}, f"{table}\n\nThe page: {page}")
