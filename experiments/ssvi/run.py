"""What does sparse subspace variational inference lose, and what does it gain? On small problems.

    python experiments/ssvi/run.py --jobs 2              # results.csv, goes on where it stopped
    python experiments/ssvi/run.py --device cuda --jobs 8 --cpu-jobs 6 --minutes 8
    python experiments/ssvi/run.py --cells 'sweep/digits/*' 'criterion/*'
    python experiments/ssvi/run.py --list                # the names of the cells, those that are done marked
    python experiments/ssvi/run.py --summary --figures   # only the tables and figures of the README

Every cell of the grid (`cells.py`) is independent of the others but for those that choose its settings on validation
rows, which are run first. Networks for digits are always trained on the CPU. `cifar.py` is the paper's own scale.
"""

import argparse
import csv
import math
import multiprocessing
import os
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread a cell; before torch is loaded

from cells import Cell, Place, cells, chosen, one_thread, run_cell
from problems import Source, export

COLUMNS = ["cell", "rows", "accuracy", "nll", "ece", "marginal", "sparsity", "parameters", "stored_bytes"]
COLUMNS += ["training_flops", "inference_flops", "seconds", "median_std_change", "median_std", "settings", "device"]


def measure(path: Path, wanted: list[Cell], place: Place, jobs: dict[str, int], minutes: float) -> int:
    """Every cell that the csv does not have yet, after those that choose its settings; returns how many failed."""
    rows = read(path)
    scored = {row["cell"]: validation_nll(row) for row in rows}
    missing = [cell for cell in wanted if cell.name not in scored]
    choosing = dict.fromkeys(need for cell in missing for need in cell.needs if need.name not in scored)
    pending = [*choosing, *(cell for cell in missing if cell not in choosing)]
    failed, running, end = 0, {}, time.monotonic() + 60 * minutes
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        pools = {
            device: stack.enter_context(ProcessPoolExecutor(n, mp_context=context, initializer=one_thread))
            for device, n in jobs.items()
        }
        while pending or running:
            if time.monotonic() > end:
                pending.clear()
            for device, pool in pools.items():
                free = jobs[device] - sum(c.device == device for c in running.values())
                for cell, settings in ready(pending, device, place.device, scored, free):
                    answer = pool.submit(run_cell, cell, settings, replace(place, device=device))
                    running[answer] = Started(cell, device)
                    pending.remove(cell)
            if not running:
                if pending:
                    print(f"{len(pending)} cells were not run, for want of their settings", file=sys.stderr)
                return failed + len(pending)
            for answer in wait(running, return_when=FIRST_COMPLETED).done:
                failed += finish(path, running.pop(answer).cell, answer, scored)
    return failed


class Started:
    """A cell in progress."""

    def __init__(self, cell: Cell, device: str) -> None:
        self.cell, self.device = cell, device


def ready(pending: list[Cell], device: str, wanted: str, scored: dict[str, float], n: int) -> list[tuple[Cell, Any]]:
    """The first n cells that belong on a device and whose settings are known."""
    found = []
    for cell in pending:
        if len(found) >= n:
            break
        own = "cpu" if cell.problem == "digits" else wanted
        if own == device and (settings := chosen(cell, scored)) is not None:
            found.append((cell, settings))
    return found


def finish(path: Path, cell: Cell, answer: Future, scored: dict[str, float]) -> int:
    """Write a cell's row, or say that it failed."""
    if error := answer.exception():
        print(f"{cell.name} failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    row = answer.result()
    scored[cell.name] = validation_nll(row)
    write(path, row)
    shown = ", ".join(f"{key} {row.get(key, 'none')}" for key in ("accuracy", "nll", "ece", "seconds"))
    print(f"{cell.name}: {shown}", flush=True)
    return 0


def validation_nll(row: dict[str, Any]) -> float:
    """Infinite for a training that diverged."""
    return float(row.get("nll") or math.inf) if row["rows"] == "validation" else math.nan


def write(path: Path, row: dict[str, Any]) -> None:
    """Append the row of a cell."""
    fresh = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        if fresh:
            writer.writeheader()
        writer.writerow(row)


def read(path: Path) -> list[dict[str, str]]:
    """What has been measured."""
    if not path.exists():
        return []
    with path.open() as file:
        return list(csv.DictReader(file))


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=["*"], metavar="PATTERN", help="only cells with such names")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time on the device")
    parser.add_argument("--cpu-jobs", type=int, default=1, help="cells of digits at a time, beside those on a GPU")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start nothing after that")
    parser.add_argument("--quick", action="store_true", help="tiny settings, to see that everything runs")
    parser.add_argument("--list", action="store_true", help="only the names of the cells")
    parser.add_argument("--summary", action="store_true", help="only the tables")
    parser.add_argument("--figures", action="store_true", help="only the figures")
    parser.add_argument("--export", type=Path, metavar="NPZ", help="only write all rows to one file, for --data")
    parser.add_argument("--data", type=Path, metavar="NPZ", help="take the rows from such a file")
    parser.add_argument("--data-dir", type=Path, help="where data sets are looked for first")
    parser.add_argument("--csv", type=Path, default=Path(__file__).with_name("results.csv"))
    arguments = parser.parse_args(words)
    wanted = [c for c in cells(arguments.seeds) if any(fnmatchcase(c.name, p) for p in arguments.cells)]
    if arguments.export:
        export(arguments.export, arguments.seeds, arguments.data_dir)
    elif arguments.list:
        done = {row["cell"] for row in read(arguments.csv)}
        print("\n".join(f"{'done' if cell.name in done else '    '} {cell.name}" for cell in wanted))
    elif arguments.summary or arguments.figures:
        import tables

        found = tables.Results.of(read(arguments.csv))
        if arguments.summary:
            tables.summarise(found)
        if arguments.figures:
            tables.draw(found, arguments.csv.parent)
    else:
        place = Place(Source(arguments.data, arguments.data_dir), arguments.device, arguments.quick)
        jobs = {"cpu": arguments.cpu_jobs} | {arguments.device: arguments.jobs}
        return 1 if measure(arguments.csv, wanted, place, jobs, arguments.minutes) else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
