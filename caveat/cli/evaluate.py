"""`caveat evaluate` and `caveat calibrate`: scores, and intervals that hold, by rows that no fit has seen.

Posteriors of which one was calibrated with some test rows are all scored on the others.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from caveat.cli.verb import Common, Verb
from caveat.knobs import Range, check_knobs

__all__ = ["Calibrate", "Evaluate"]


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
    features: bool = False  # also tell --ood apart by distances from the training rows in feature space
    draws: int | None = None  # posterior draws a prediction; the method's own number unless given
    keep_samples: bool = False  # also keep every draw's prediction

    def run(self, common: Common) -> None:
        """Score one posterior after the other."""
        from caveat import data as sets
        from caveat import report
        from caveat.data.own import target_title
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
            data = _left_by_calibration(self.posteriors, source, data)
            tests = sets.conditions(
                data, angles=self.rotate, shifts=shifts, ood=self.ood, data_dir=self.data_dir, seed=common.seed
            )
            evaluate(
                posterior,
                tests.inside,
                ood=tests.ood,
                training=data.train if self.features else None,
                folder=self.out / folder.resolve().name,
                label=folder.resolve().name,
                class_names=data.class_names,
                target=target_title(data),
                draws=self.draws,
                seed=common.seed,
                keep_samples=self.keep_samples,
                progress=not common.quiet,
            )
        runs = report.read(self.out)
        report.write_csv(runs, self.out / "results.csv")
        content = {run.label: {s.name: {k: v.mean for k, v in s.metrics.items()} for s in run.data} for run in runs}
        common.show(content, report.format_text(report.table(runs)))


@dataclass(frozen=True)
class Calibrate(Verb):
    """Make a posterior's intervals and sets hold as often as they say, by rows that it was not fitted to."""

    posterior: Path  # a folder that `caveat fit` wrote
    out: Path  # the calibrated posterior's folder
    data: str | None = None  # a data set whose test rows are used; the posterior's own unless given
    data_dir: Path | None = None  # where named data sets are; else CAVEAT_DATA, else the user's cache
    model: str | None = None  # takes the place of the stored one: file.py:function, or a name
    share: Annotated[float, Range(0, 1, open_low=True)] = 0.5  # of the rows; `evaluate` scores the others
    score: Literal["auto", "deviation", "quantile", "aps", "raps", "probability"] = "auto"  # see docs/coverage.md

    def __post_init__(self) -> None:
        check_knobs(self)

    def run(self, common: Common) -> None:
        """Calibrate, and save with the recipe and with which rows it was."""
        from caveat.fitting import remove_leftovers
        from caveat.recipe import data_of, read_posterior
        from caveat.storage import read_json

        if self.out.exists():
            remove_leftovers(self.out)
            raise FileExistsError(f"--out {self.out} exists: choose another folder")
        posterior, recipe = read_posterior(self.posterior, common.place(), self.model)
        source = self.data or recipe.data
        data = data_of(recipe, self.data, self.data_dir)
        common.show_data(source, data)
        rows = _rows(data.test, _drawn(len(data.test), self.share, common.seed))
        calibrated = posterior.calibrate(rows, score=None if self.score == "auto" else self.score, seed=common.seed)
        note = read_json(self.posterior / "posterior.json")["note"]
        of_rows = {"data": source, "share": self.share, "seed": common.seed}
        calibrated.save(self.out, note=note | {"calibrated_with": of_rows})
        content = {"out": str(self.out), "rows": len(rows), "score": calibrated.calibration.conformity.score}  # type: ignore[union-attr]
        common.show(content, f"{content['score']} of {len(rows)} rows -> {self.out}")


def _left_by_calibration(folders: tuple[Path, ...], source: str, data: Any) -> Any:
    """The data without the test rows that any of some posteriors was calibrated with, so that all have the same."""
    import torch

    from caveat.storage import read_json

    left = torch.ones(len(data.test), dtype=torch.bool)
    for folder in folders:
        used = read_json(folder / "posterior.json")["note"].get("calibrated_with", {})
        if used.get("data") == source:
            left[_drawn(len(left), used["share"], used["seed"])] = False
    if not left.any():
        raise ValueError(f"every test row of {source} has calibrated one of the posteriors: none is left to score")
    return data if left.all() else dataclasses.replace(data, test=_rows(data.test, left))


def _drawn(count: int, share: float, seed: int) -> Any:
    """A share of that many rows, drawn by a seed."""
    import torch

    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return order[: round(share * count)].sort().values


def _rows(data: Any, chosen: Any) -> Any:
    """Some rows of a data set of tensors."""
    from torch.utils.data import TensorDataset

    return TensorDataset(*(tensor[chosen] for tensor in data.tensors))
