"""Saved results: what `caveat evaluate` and `caveat bench` wrote, read once and checked, so that pages can trust it.

    results/<run>/metrics.json, predictions/*.npz     -> SavedRun, with one SavedData a data set
    bench.json, cells/<cell>/, ranks.csv, inputs/     -> SavedBench, with one BenchGroup a data set and model

`common_data` says which data all runs of a folder share, and what a comparison leaves out. No model is loaded here.

Called by all other rooms of the report and, through `caveat.report.read`, by users and the command line.
"""

from caveat.report.saved.bench_folder import (
    COSTS,
    BenchCell,
    BenchGroup,
    SavedBench,
    is_bench,
    read_bench,
)
from caveat.report.saved.common_data import (
    clean_of,
    data_by_title,
    left_out_notes,
    marginal_notes,
    ood_sets,
    reference_notes,
    shared_names,
    shared_shifts,
    shift_families,
)
from caveat.report.saved.run_folder import Arrays, SavedData, SavedRun, matched, mean_over_data, read

__all__ = [
    "COSTS",
    "Arrays",
    "BenchCell",
    "BenchGroup",
    "SavedBench",
    "SavedData",
    "SavedRun",
    "clean_of",
    "data_by_title",
    "is_bench",
    "left_out_notes",
    "marginal_notes",
    "matched",
    "mean_over_data",
    "ood_sets",
    "read",
    "read_bench",
    "reference_notes",
    "shared_names",
    "shared_shifts",
    "shift_families",
]
