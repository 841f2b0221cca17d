"""The report: one HTML file that needs no network, made from saved files only.

A folder that `caveat evaluate` or `caveat demo` wrote gives the page of runs, one of `caveat bench` that of a bench.
"""

from __future__ import annotations

from pathlib import Path

from caveat.report.bench_page import write_bench
from caveat.report.runs_page import write_runs
from caveat.report.saved import is_bench

__all__ = ["newest", "write"]


def write(folder: str | Path, path: str | Path | None = None, title: str | None = None) -> Path:
    """Write the report of a results folder, by default to `report.html` inside it, and return where it is."""
    target = Path(path) if path is not None else Path(folder) / "report.html"
    return write_bench(folder, target, title) if is_bench(folder) else write_runs(folder, target, title)


def newest(here: str | Path = ".") -> Path:
    """Find the folder that `caveat bench`, `caveat evaluate` or `caveat demo` wrote last.

    They write to `results`, to folders in it, and to `caveat-demo` unless another folder is given.
    """
    here = Path(here)
    folders = [here / "results", *sorted((here / "results").glob("*/")), here / "caveat-demo"]
    files = {folder: [*folder.glob("bench.json"), *folder.glob("*/metrics.json")] for folder in folders}
    written = {folder: max(file.stat().st_mtime_ns for file in inside) for folder, inside in files.items() if inside}
    if not written:
        raise FileNotFoundError(
            f"there are no results in {here / 'results'}: run `caveat bench` or `caveat evaluate` first, or name their "
            "folder, as in caveat report --results FOLDER"
        )
    return max(written, key=lambda folder: written[folder])
