"""What are Bayesian neural network posteriors really like, at the scale of a laptop?

    python experiments/hmc/run.py --jobs 2               # results.csv, goes on where it stopped
    python experiments/hmc/run.py --cells 'temperature/*' 'methods/digits/*'
    python experiments/hmc/run.py --list                 # the names of the cells, those that are done marked
    python experiments/hmc/run.py --summary              # only the tables of the README
    python experiments/hmc/run.py --figures              # only its figures

The questions of Izmailov et al. 2021, on small problems (`problems.py`) where HMC takes a minute. Every cell of the
grid (`cells.py`) is independent of the others but for the reference of its problem and seed, which is made first and
kept in the folder --references.
"""

import argparse
import csv
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread a cell; before torch is loaded

from cells import Cell, Place, cells, reference_folder, run_cell
from problems import export

COLUMNS = ["cell", "data", "strength", "accuracy", "nll", "ece", "agreement", "total_variation", "chosen", "seconds"]
COLUMNS += ["acceptance", "leapfrog_steps", "divergences"]
COLUMNS += [f"{fact}_{space}" for space in ("function", "weights") for fact in ("rhat", "share", "null", "ess")]


def measure(path: Path, wanted: list[Cell], place: Place, jobs: int) -> int:
    """Every cell that the csv does not have yet, methods after their references; returns how many failed."""
    done = {row["cell"] for row in read(path)}
    missing = [cell for cell in wanted if cell.name not in done]
    needed = dict.fromkeys(cell.needs for cell in missing if cell.kind == "methods")
    first = [cell for cell in missing if cell.kind == "reference"]
    first += [cell for cell in needed if cell not in first and not reference_folder(cell, place).exists()]
    pending = first + [cell for cell in missing if cell.kind != "reference"]
    place.references.mkdir(parents=True, exist_ok=True)
    failed, running = 0, {}
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        while pending or running:
            ready = [c for c in pending if c.kind != "methods" or reference_folder(c, place).exists()]
            for cell in ready[: jobs - len(running)]:
                running[pool.submit(timed, cell, place)] = cell
                pending.remove(cell)
            if not running:
                print(f"{len(pending)} cells were not run, for want of their reference", file=sys.stderr)
                return failed + len(pending)
            for answer in wait(running, return_when=FIRST_COMPLETED).done:
                cell = running.pop(answer)
                if error := answer.exception():
                    print(f"{cell.name} failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                    failed += 1
                    continue
                rows, seconds = answer.result()
                if cell.name not in done:
                    write(path, rows)
                clean = rows[0]
                print(f"{cell.name}: accuracy {clean['accuracy']}, NLL {clean['nll']}, {seconds:.0f} s", flush=True)
    return failed


def timed(cell: Cell, place: Place) -> tuple[list[dict[str, Any]], float]:
    start = time.perf_counter()
    rows = run_cell(cell, place)
    return rows, time.perf_counter() - start


def write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Append the rows of a cell, all of them or none."""
    fresh = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        if fresh:
            writer.writeheader()
        writer.writerows(rows)


def read(path: Path) -> list[dict[str, str]]:
    """What has been measured."""
    if not path.exists():
        return []
    with path.open() as file:
        return list(csv.DictReader(file))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=["*"], metavar="PATTERN", help="only cells with such names")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time, each on one thread")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="tiny settings, to see that everything runs")
    parser.add_argument("--list", action="store_true", help="only the names of the cells")
    parser.add_argument("--summary", action="store_true", help="only the tables")
    parser.add_argument("--figures", action="store_true", help="only the figures")
    parser.add_argument("--export", type=Path, metavar="NPZ", help="only write all rows to one file, for --data")
    parser.add_argument("--data", type=Path, metavar="NPZ", help="take the rows from such a file")
    parser.add_argument("--references", type=Path, default=Path(tempfile.gettempdir()) / "caveat_hmc_references")
    parser.add_argument("--csv", type=Path, default=Path(__file__).with_name("results.csv"))
    arguments = parser.parse_args()
    wanted = [c for c in cells(arguments.seeds) if any(fnmatchcase(c.name, p) for p in arguments.cells)]
    if arguments.export:
        export(arguments.export, arguments.seeds)
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
        place = Place(arguments.references, arguments.data, arguments.device, arguments.quick)
        return 1 if measure(arguments.csv, wanted, place, arguments.jobs) else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
