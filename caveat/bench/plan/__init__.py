"""The plan of a benchmark: an experiment file, read and checked, and the grid of cells that it asks for.

    experiment.py   the file as a whole                    choices.py   methods: knobs, sweeps, tuning, priors
    problem.py      a data set and all that goes for it    grid.py      cells, their names, and which of them are done
    priors.py       families of priors by name             keys.py      complaints that begin with the key

Cells are data x model x method x seed; `run_bench` computes them, `read_results` reads them. Called
by the rest of the bench and by `caveat bench`.
"""

from caveat.bench.plan.choices import MAP, TEMPERED, Choice
from caveat.bench.plan.experiment import Experiment, read_experiment
from caveat.bench.plan.grid import Cell, cells_of, evaluation_key, is_done, is_fitted, select
from caveat.bench.plan.priors import prior_of
from caveat.bench.plan.problem import AUGMENT, Problem, Source

__all__ = [
    "AUGMENT",
    "MAP",
    "TEMPERED",
    "Cell",
    "Choice",
    "Experiment",
    "Problem",
    "Source",
    "cells_of",
    "evaluation_key",
    "is_done",
    "is_fitted",
    "prior_of",
    "read_experiment",
    "select",
]
