"""One cell: fit the posterior or go on with it, score it, and keep what tables and pages are made from.

cells/<name>/posterior/         what `caveat fit` writes; posterior.partial while it is not finished
cells/<name>/candidates/        the same of each candidate until one is chosen; their NLL stays in candidates.json
cells/<name>/metrics.json       what `caveat evaluate` writes, with predictions/*.npz (at most `kept_rows` rows)
cells/<name>/scores/*.npz       a few numbers for every row scored
cells/<name>/plane.npz          predictions over a grid, where inputs are one or two numbers
cells/<name>/result.json        written last: with it the cell is done
cells/<name>/failure.json       in its place where something went wrong
"""

import dataclasses
import shutil
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from caveat.bench.conditions import conditions_of, plane, spread
from caveat.bench.plan import AUGMENT, Cell, Choice, Experiment, evaluation_key, is_fitted, prior_of
from caveat.bench.rows import row_scores
from caveat.bench.tuning import chosen_candidate, fit_best
from caveat.data import Conditions, DataSet
from caveat.data.own import target_title
from caveat.engine.distributed import current_ranks
from caveat.engine.run import Beside, Info
from caveat.evaluate import ReferenceSet, evaluate
from caveat.evaluate.predictions import by_row, predict_rows
from caveat.files import names_function
from caveat.fitting import fit_beside, remove_leftovers
from caveat.posterior import Posterior
from caveat.recipe import Recipe, read_posterior
from caveat.references import load_reference
from caveat.rows import Rows
from caveat.storage import FORMAT, read_arrays, write_arrays, write_json
from caveat.task import Task

__all__ = ["Outcome", "Place", "record_failure", "run_cell", "task_of"]

_TIMED_ROWS = 512  # predicted to see how long a row takes


@dataclass(frozen=True)
class Place:
    """Where cells are computed and kept."""

    out: Path
    device: torch.device
    data_dir: Path | None = None
    progress: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a cell went."""

    seconds: float
    error: str | None = None
    nll: float | None = None  # on clean data


def run_cell(experiment: Experiment, cell: Cell, place: Place, beside: Beside | None = None) -> Outcome:
    """Fit and score; what goes wrong is written down, not raised. `beside` is where the fit may meet other cells'."""
    started = time.monotonic()
    folder = place.out / "cells" / cell.name
    try:
        result = _run(experiment, cell, place, folder, beside)
    except Exception as error:  # whatever a method or a data set does, the other cells go on
        text = f"{type(error).__name__}: {error}"
        outcome = Outcome(time.monotonic() - started, text)
        if current_ranks(place.device).first:
            record_failure(folder, cell, text, traceback.format_exc())
        return outcome
    return Outcome(time.monotonic() - started, None, result)


def record_failure(folder: Path, cell: Cell, error: str, trace: str) -> None:
    """Keep an error's text in the cell; the next call tries again."""
    write_json(folder / "failure.json", {"format": FORMAT, "cell": str(cell), "error": error, "traceback": trace})


def _run(experiment: Experiment, cell: Cell, place: Place, folder: Path, beside: Beside | None) -> float | None:
    tests = conditions_of(cell.problem, cell.data, place.data_dir)
    start = None
    if cell.start is not None:
        if not is_fitted(place.out, cell.start):
            raise RuntimeError(f"the MAP that it starts from was not fitted, see cells/{cell.start}/failure.json")
        start = _stored(cell, place, place.out / "cells" / cell.start / "posterior")
    if cell.reference is not None and not is_fitted(place.out, cell.reference):
        raise RuntimeError(f"the reference was not fitted, see cells/{cell.reference}/failure.json")
    posterior = _posterior(cell, place, folder, tests.data, start, beside)
    ranks = current_ranks(place.device)
    try:  # one rank scores, the others wait for it
        return _score(experiment, cell, place, folder, tests, posterior, start) if ranks.first else None
    finally:
        ranks.wait()


def _score(
    experiment: Experiment,
    cell: Cell,
    place: Place,
    folder: Path,
    tests: Conditions,
    posterior: Posterior,
    start: Posterior | None,
) -> float | None:
    """Everything that is kept of a cell beside its posterior; returns the NLL on clean data."""
    began = time.monotonic()
    (folder / "result.json").unlink(missing_ok=True)  # of an earlier evaluation, whose files are replaced now
    scores = evaluate(
        posterior,
        tests.inside,
        ood=tests.ood,
        reference=_reference(experiment, cell, place),
        folder=folder,
        label=f"{cell.label} seed {cell.seed}",
        class_names=tests.data.class_names,
        target=target_title(tests.data),
        seed=cell.seed,
        progress=place.progress,
    )
    for stale in (folder / "scores").glob("*.npz"):
        stale.unlink()
    for file in [scored.file for scored in scores.data if scored.file]:
        _keep_rows(folder, file, scores.kind, experiment.kept_rows)
    grid = plane(tests.data)
    if grid is not None:
        rows = Rows(TensorDataset(grid), needs_targets=False)
        predicted = predict_rows(posterior, rows, seed=cell.seed, progress=False)
        write_arrays(folder / "plane.npz", {"x": grid.numpy()} | predicted)
    result = {
        "format": FORMAT,
        "data": dataclasses.asdict(cell.data),
        "model": cell.problem.models[cell.model],
        "seed": cell.seed,
        "start": cell.start,
        "reference": cell.reference,
        "chosen": chosen_candidate(folder),
        "evaluation": evaluation_key(experiment, cell),
        "cost": _cost(posterior, start, tests),
        "seconds": posterior.info.seconds + time.monotonic() - began,  # what another such cell will take
    }
    (folder / "failure.json").unlink(missing_ok=True)  # before the cell counts as done: nobody looks into it then
    write_json(folder / "result.json", result)
    return scores.data[0].metrics["nll"].mean


def _posterior(
    cell: Cell, place: Place, folder: Path, data: DataSet, start: Posterior | None, beside: Beside | None
) -> Posterior:
    """The fit, gone on with where it was stopped; read where it was finished."""

    def fitted(choice: Choice, into: Path) -> tuple[Task, Posterior]:
        recipe, task = task_of(cell, data, choice)
        if into.exists():
            return task, _stored(cell, place, into)
        note = {"recipe": dataclasses.asdict(recipe)}
        posterior = fit_beside(beside, task, choice.method, start, cell.seed, place.device, into, note, place.progress)
        return task, posterior

    if (folder / "posterior").exists():
        if current_ranks(place.device).first:
            remove_leftovers(folder / "posterior")
            shutil.rmtree(folder / "candidates", ignore_errors=True)  # of which this one was chosen
        return _stored(cell, place, folder / "posterior")
    if len(cell.candidates) == 1:
        return fitted(cell.candidates[0], folder / "posterior")[1]
    fit_best(cell, folder, place.device, fitted)
    return _stored(cell, place, folder / "posterior")


def _stored(cell: Cell, place: Place, folder: Path) -> Posterior:
    """A posterior of the cell's model, which the experiment file names."""
    model = cell.problem.models[cell.model]
    return read_posterior(folder, place.device, model if names_function(model) else None)[0]


def task_of(cell: Cell, data: DataSet, choice: Choice) -> tuple[Recipe, Task]:
    """What a candidate of a cell is fitted to."""
    problem = cell.problem
    if problem.train_rows is not None:
        rows = spread(len(data.train), problem.train_rows)
        data = dataclasses.replace(data, train=TensorDataset(*(tensor[rows] for tensor in data.train.tensors)))
    source = cell.data
    choices = {"split": source.split, "gap": source.gap, "seed": source.seed}
    recipe = Recipe.of(data, source.name, problem.models[cell.model], problem.likelihood, choices)
    task = recipe.task(
        data,
        seed=cell.seed,
        prior=prior_of(choice.prior, choice.prior_precision, data),
        parameters=problem.parameters,
        validation=problem.validation,
        augment=None if problem.augment is None else AUGMENT[problem.augment],
    )
    return recipe, task


def _reference(experiment: Experiment, cell: Cell, place: Place) -> Posterior | ReferenceSet | None:
    if cell.reference is not None:
        return _stored(cell, place, place.out / "cells" / cell.reference / "posterior")
    name = experiment.reference.get(cell.data.label)
    return None if name is None else load_reference(name)


def _keep_rows(folder: Path, file: str, kind: str, count: int) -> None:
    """Write a few numbers for every row to scores/, and leave at most `count` rows of the whole predictions."""
    arrays = read_arrays(folder / file)
    write_arrays(folder / "scores" / Path(file).name, row_scores(kind, arrays))
    rows = len(arrays["rows"])
    if rows > count:
        chosen = spread(rows, count).numpy()
        cut = {name: array[chosen] for name, array in arrays.items() if by_row(name)}
        write_arrays(folder / file, cut)


def _cost(posterior: Posterior, start: Posterior | None, tests: Conditions) -> dict[str, float | None]:
    """What the fit cost, the MAP that it started from included, and a prediction; None where nobody counted."""
    infos: list[Info] = [posterior.info] + ([start.info] if start is not None else [])
    x = tests.inside["clean"].tensors[0][:_TIMED_ROWS]
    posterior.predict(x[:2])  # kernels are compiled and caches filled
    began = time.perf_counter()
    posterior.predict(x)
    if posterior.network.device.type == "cuda":
        torch.cuda.synchronize(posterior.network.device)
    seconds = time.perf_counter() - began
    return {
        "fit_seconds": sum(info.seconds for info in infos),
        "start_seconds": None if start is None else start.info.seconds,
        "predict_seconds_per_row": seconds / len(x),
        "peak_bytes": max(info.peak_bytes for info in infos) or None,
        "flops": sum(info.flops for info in infos) or None,
        "gradient_evaluations": sum(info.gradient_evaluations for info in infos) or None,
        "stored_bytes": posterior.info.stored_bytes,
    }
