"""`caveat evaluate`: from posteriors to their predictions and scores."""

from dataclasses import dataclass
from pathlib import Path

from caveat.cli.verb import Common, Verb

__all__ = ["Evaluate"]


@dataclass(frozen=True)
class Evaluate(Verb):
    """Score posteriors on clean, shifted and out-of-distribution data, a folder each of predictions and metrics."""

    posteriors: tuple[Path, ...]  # folders that `caveat fit` wrote
    out: Path = Path("results")  # one sub-folder a posterior goes here
    data: str | None = None  # a data set whose test rows are scored; the posterior's own unless given
    data_dir: Path | None = None  # where named data sets are; else CAVEAT_DATA, else the user's cache
    model: str | None = None  # takes the place of the stored one: file.py:function, or a name
    rotate: tuple[float, ...] = ()  # degrees by which test images are also rotated
    shift: tuple[str, ...] = ()  # shifts by name, each at all its severities: fog, translation, ...; or corruptions
    ood: tuple[str, ...] = ()  # out-of-distribution data: photographs, permuted, constant, noise, or another image set
    draws: int | None = None  # posterior draws a prediction; the method's own number unless given
    keep_samples: bool = False  # also keep every draw's prediction

    def run(self, common: Common) -> None:
        """Score one posterior after the other."""
        from caveat import data as sets
        from caveat import report
        from caveat.evaluate import evaluate
        from caveat.recipe import data_of, read_posterior

        names = [folder.resolve().name for folder in self.posteriors]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"--posteriors: name folders that `caveat fit` wrote, of different names, got {names}")
        kinds = [kind for name in self.shift for kind in (sets.CORRUPTIONS if name == "corruptions" else (name,))]
        shifts: dict[str, None] = dict.fromkeys(kinds)  # each at all of its severities
        shown: set[str] = set()
        for folder in self.posteriors:
            posterior, recipe = read_posterior(folder, common.place(), self.model)
            source = self.data or recipe.data
            data = data_of(recipe, self.data, self.data_dir)
            if source not in shown:
                common.show_data(source, data)
            shown.add(source)
            tests = sets.conditions(
                data, angles=self.rotate, shifts=shifts, ood=self.ood, data_dir=self.data_dir, seed=common.seed
            )
            evaluate(
                posterior,
                tests.inside,
                ood=tests.ood,
                folder=self.out / folder.resolve().name,
                label=folder.resolve().name,
                class_names=data.class_names,
                draws=self.draws,
                seed=common.seed,
                keep_samples=self.keep_samples,
                progress=not common.quiet,
            )
        runs = report.read(self.out)
        report.write_csv(runs, self.out / "results.csv")
        content = {run.label: {s.name: {k: v.mean for k, v in s.metrics.items()} for s in run.data} for run in runs}
        common.show(content, report.format_text(report.table(runs)))
