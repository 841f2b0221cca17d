"""Run an experiment: what is not done yet, cell by cell or side by side, and the tables of what is.

A folder of results holds

    experiment.toml   the file that was run              bench.json       every cell: what it is, where, how it went
    results.csv       every number                       summary.csv      means and standard errors over seeds
    comparisons.csv   paired intervals against MAP       ranks.csv        places of the methods
    inputs/<data>/    some inputs of each condition      cells/<name>/    see `caveat.bench.cells`

The tables are written when the run ends, also when it is stopped, from the cells that are done by then.
"""

import dataclasses
import platform
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from caveat.bench.cell_files import damage_of
from caveat.bench.cells import Outcome, Place, record_failure, run_cell
from caveat.bench.checks import check_fits
from caveat.bench.compare import comparisons, ranks
from caveat.bench.conditions import conditions_of, shown_inputs
from caveat.bench.estimate import seconds_left, seconds_of
from caveat.bench.groups import in_groups, run_group
from caveat.bench.guards import Guard, guards
from caveat.bench.plan import (
    MAP,
    Cell,
    Experiment,
    cells_of,
    evaluation_key,
    is_done,
    is_fitted,
    read_experiment,
    select,
)
from caveat.bench.results import Result, import_pyarrow, long_table, read_results, summary_table, write_table
from caveat.bench.workers import Died, in_processes
from caveat.data.condition_sets import shift_label
from caveat.engine.distributed import current_ranks
from caveat.evaluate.metrics import format_seconds
from caveat.evaluate.predictions import file_stem
from caveat.files import sole_use
from caveat.methods import method_name
from caveat.storage import FORMAT, CorruptFile, encode, read_json, write_arrays, write_json

__all__ = ["Bench", "run_bench"]


@dataclass(frozen=True)
class Bench:
    """What a run came to."""

    out: Path
    cells: int
    ran: int  # in this call
    failed: dict[str, str]  # cell -> error
    guards: list[Guard]


def run_bench(
    path: str | Path,
    place: Place,
    *,
    jobs: int = 1,
    parquet: bool = False,
    only: Sequence[str] = ("*",),
    say: Callable[[str], None] = print,
) -> Bench:
    """Run what is missing, then write the tables.

    Args:
        path: the experiment file.
        place: the folder of results, the device, and where data are.
        jobs: cells at a time, each in a process of its own with its share of the threads.
        parquet: write the tables as parquet files too.
        only: patterns of the cells to run, data/model/method/seed, as `digits/*/hmc*/0`; what they need is run too.
        say: told of every cell as it ends.
    """
    experiment = read_experiment(path)
    if parquet:
        import_pyarrow()  # says what to install before any work is done
    ranks_here = current_ranks(place.device)
    if jobs > 1 and ranks_here.size > 1:
        raise ValueError(f"--jobs {jobs}: under torchrun the ranks share each cell, so leave --jobs at 1")
    every = cells_of(experiment)
    cells = select(every, only)
    done = {cell.name for cell in every if is_done(place.out, cell, evaluation_key(experiment, cell))}
    damaged = {name: text for name in sorted(done) if (text := damage_of(place.out / "cells" / name))}
    pending = [cell for cell in cells if cell.name not in done or cell.name in damaged]
    check_fits(experiment, pending, place.data_dir)
    ranks_here.wait()  # all ranks have looked before one of them writes
    if not ranks_here.first:
        for cell in pending:
            run_cell(experiment, cell, place)
        return Bench(place.out, len(cells), len(pending), {}, [])
    with sole_use(place.out, place.out / ".lock"):
        for name, text in damaged.items():
            say(f"{text}: its cell is scored again")
            (place.out / "cells" / name / "result.json").unlink()
        shutil.copyfile(path, place.out / "experiment.toml")
        say(f"{experiment.title or experiment.name}: {len(cells)} cells, {len(cells) - len(pending)} done before")
        try:
            _run_all(experiment, pending, place, jobs, say, [c for c in cells if c not in pending])
        finally:
            verdicts, errors = _write_tables(experiment, every, place, parquet)
    failed = {str(cell): errors[cell.name] for cell in cells if cell.name in errors}
    return Bench(place.out, len(cells), len(pending), failed, verdicts)


def _run_all(
    experiment: Experiment,
    pending: Sequence[Cell],
    place: Place,
    jobs: int,
    say: Callable[[str], None],
    before: Sequence[Cell],
) -> None:
    """Every pending cell, those that others start from first; says how each went and how long the rest will take."""
    known = [(cell, s) for cell in before if (s := seconds_of(place.out, cell)) is not None]
    left = list(pending)
    for done, (cell, outcome) in enumerate(_outcomes(experiment, pending, place, jobs), 1):
        left.remove(cell)
        seconds = seconds_of(place.out, cell)
        known += [(cell, seconds)] if seconds is not None and outcome.error is None else []
        text = f"failed, {outcome.error}" if outcome.error else f"NLL {outcome.nll:.4g}"
        rest = seconds_left(known, left, jobs)
        about = f"; about {format_seconds(max(rest, 1.0))} left" if left and rest is not None else ""
        say(f"[{done}/{len(pending)}] {cell}: {text}, {format_seconds(outcome.seconds)}{about}")


def _outcomes(
    experiment: Experiment, pending: Sequence[Cell], place: Place, jobs: int
) -> Iterator[tuple[Cell, Outcome]]:
    if jobs == 1:
        for group in in_groups(pending, place):
            yield from run_group(experiment, group, place)
        return

    def ready(cell: Cell) -> bool:
        needed = [name for name in (cell.start, cell.reference) if name is not None]
        return all(is_fitted(place.out, name) or name in over for name in needed)

    over: set[str] = set()  # cells that ended, well or not
    work = partial(_work, experiment, dataclasses.replace(place, progress=False))
    for cell, answer in in_processes(work, pending, ready, jobs):
        over.add(cell.name)
        if isinstance(answer, Died):
            record_failure(place.out / "cells" / cell.name, cell, answer.reason, "")
            answer = Outcome(0.0, answer.reason)
        yield cell, answer


def _work(experiment: Experiment, place: Place, cell: Cell) -> Outcome:
    return run_cell(experiment, cell, place)


def _write_tables(
    experiment: Experiment, cells: Sequence[Cell], place: Place, parquet: bool
) -> tuple[list[Guard], dict[str, str]]:
    """Everything beside the cells, from the cells that are done; returns the guard rails, and errors by cell."""
    results = read_results(experiment, place.out)
    table = long_table(results)
    compared = comparisons(results, experiment.baseline)
    tables = {"results": table, "summary": summary_table(table), "comparisons": compared, "ranks": ranks(table)}
    for name, rows in tables.items():
        write_table(place.out / f"{name}.csv", rows, parquet=parquet)
    against = experiment.yardstick
    with_map = comparisons(results, MAP) if against != MAP else []
    compared = compared if against == experiment.baseline else comparisons(results, against)
    verdicts = guards(compared, with_map, results)
    done = {result.cell.name for result in results}
    failed = {cell.name: error for cell in cells if cell.name not in done and (error := _error(place.out, cell))}
    _write_index(experiment, cells, place, results, failed, verdicts)
    for label, cell in {result.cell.data.label: result.cell for result in reversed(results)}.items():
        tests = conditions_of(cell.problem, cell.data, place.data_dir)
        for name, arrays in shown_inputs(tests, experiment.kept_rows).items():
            write_arrays(place.out / "inputs" / file_stem(label) / f"{file_stem(name)}.npz", arrays)
    return verdicts, failed


def _write_index(
    experiment: Experiment,
    cells: Sequence[Cell],
    place: Place,
    results: Sequence[Result],
    failed: dict[str, str],
    verdicts: Sequence[Guard],
) -> None:
    """bench.json: what a page needs to know beside the tables."""
    chosen = {result.cell.name: result.saved.chosen for result in results}
    entries: list[dict[str, Any]] = [
        {
            "folder": f"cells/{cell.name}",
            "data": cell.data.label,
            "model": cell.model,
            "method": cell.label,
            "kind": method_name(cell.method),
            "knobs": encode(cell.method, {}, "method")["fields"],
            "chosen": chosen.get(cell.name, ""),
            "seed": cell.seed,
            "start": cell.start and f"cells/{cell.start}",
            "status": "done" if cell.name in chosen else "failed" if cell.name in failed else "missing",
            "error": failed.get(cell.name),
        }
        for cell in cells
    ]
    content = {
        "format": FORMAT,
        "name": experiment.name,
        "title": experiment.title,
        "baseline": experiment.baseline,
        "seeds": experiment.seeds,
        "shifts": {shift_label(name): severities for p in experiment.problems for name, severities in p.shifts},
        "ood": list(dict.fromkeys(name for problem in experiment.problems for name in problem.ood)),
        "reference": experiment.reference or experiment.reference_method or {},
        "kept_rows": experiment.kept_rows,
        "machine": {"system": platform.platform(), "processor": platform.machine(), "device": str(place.device)},
        "cells": entries,
        "guards": [dataclasses.asdict(guard) | {"sentence": guard.sentence()} for guard in verdicts],
    }
    write_json(place.out / "bench.json", content)


def _error(out: Path, cell: Cell) -> str | None:
    path = out / "cells" / cell.name / "failure.json"
    try:
        return str(read_json(path).get("error", "")) if path.exists() else None
    except CorruptFile as error:
        return str(error)
