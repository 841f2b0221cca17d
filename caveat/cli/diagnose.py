"""`caveat diagnose`: from a posterior with chains to a verdict on them."""

import contextlib
import dataclasses
from dataclasses import dataclass
from pathlib import Path

from caveat.cli.verb import Common, Verb
from caveat.knobs import Count, NonNegativeInt, check_knobs

__all__ = ["Diagnose"]


@dataclass(frozen=True)
class Diagnose(Verb):
    """Say whether the chains of a posterior may be trusted, and why; write one HTML page that shows it."""

    posterior: Path  # a folder that `caveat fit` wrote, of a method that runs chains
    out: Path = Path("diagnose.html")  # the page
    data: str | None = None  # a data set whose test rows are predicted; the posterior's own unless given
    data_dir: Path | None = None  # where named data sets are; else CAVEAT_DATA, else the user's cache
    model: str | None = None  # takes the place of the stored one: file.py:function, or a name
    rows: Count = 500  # test rows to predict, at most
    surface: NonNegativeInt = 25  # points on each side of the plot of the plane through three draws; 0 leaves it out

    def __post_init__(self) -> None:
        check_knobs(self)

    def run(self, common: Common) -> None:
        """Judge the chains, write the page."""
        from caveat.evaluate.diagnosis import gather_evidence, judge, posterior_surface
        from caveat.recipe import data_of, read_posterior
        from caveat.report.chains_page import write_chains

        posterior, recipe = read_posterior(self.posterior, common.place(), self.model)
        data = data_of(recipe, self.data, self.data_dir)
        common.show_data(self.data or recipe.data, data)
        evidence = gather_evidence(posterior, data.test, rows=self.rows, seed=common.seed)
        diagnosis = judge(evidence)
        surface = None
        with contextlib.suppress(ValueError):  # draws that do not move span no plane, and the verdict says so already
            if self.surface:
                surface = posterior_surface(posterior, data.train, points=self.surface, rows=1000)
        title = f"Chains of {self.posterior.resolve().name}"
        try:
            page = write_chains(evidence, diagnosis, self.out, surface=surface, title=title)
        except Exception:
            common.show(dataclasses.asdict(diagnosis), str(diagnosis))  # the verdict is not lost with the page
            raise
        common.show(dataclasses.asdict(diagnosis) | {"page": str(page)}, f"{diagnosis}\n\nThe page: {page}")
