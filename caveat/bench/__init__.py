"""Benchmarks: an experiment file, its grid of cells, tables of the results, and what they say against tempered MAP.

    plan/       the file and the grid           checks.py  estimate.py    before a run: does it fit, how long is it
    run.py      all cells, and the tables       workers.py                several cells at a time
    cells.py    one cell: fit, score, keep      tuning.py  conditions.py  its candidates, and what it is scored on
    cell_files.py   a finished cell, read back  results.py  rows.py       tables, and the numbers of single rows
    guards.py   the verdicts                    compare.py                what they rest on

`caveat bench` runs an experiment; pages read its folder.
"""

from caveat.bench.cell_files import SavedCell, read_cell
from caveat.bench.cells import Place
from caveat.bench.estimate import estimate_text, estimates
from caveat.bench.guards import Guard, guard_text, guards
from caveat.bench.plan import Experiment, cells_of, read_experiment, select
from caveat.bench.results import read_results
from caveat.bench.run import Bench, run_bench

__all__ = [
    "Bench",
    "Experiment",
    "Guard",
    "Place",
    "SavedCell",
    "cells_of",
    "estimate_text",
    "estimates",
    "guard_text",
    "guards",
    "read_cell",
    "read_experiment",
    "read_results",
    "run_bench",
    "select",
]
