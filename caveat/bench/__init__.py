"""Benchmarks: an experiment file, its grid of cells, tables of the results, and what they say against tempered MAP."""

from caveat.bench.cell_files import CellFiles, read_cell
from caveat.bench.cells import Place
from caveat.bench.estimate import estimate_text, estimates
from caveat.bench.experiment import Experiment, read_experiment
from caveat.bench.grid import cells_of
from caveat.bench.guards import Guard, guard_text, guards
from caveat.bench.results import read_results
from caveat.bench.run import Bench, run_bench

__all__ = [
    "Bench",
    "CellFiles",
    "Experiment",
    "Guard",
    "Place",
    "cells_of",
    "estimate_text",
    "estimates",
    "guard_text",
    "guards",
    "read_cell",
    "read_experiment",
    "read_results",
    "run_bench",
]
