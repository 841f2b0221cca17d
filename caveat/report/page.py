"""The report: one HTML file that needs no network, made from saved files only.

A folder that `caveat evaluate` or `caveat demo` wrote gives the page below; one of `caveat bench` that of `bench_page`.
"""

from __future__ import annotations

from pathlib import Path

from caveat.report.bench_page import write_bench
from caveat.report.bench_runs import is_bench
from caveat.report.configuration import configuration_section
from caveat.report.drawing import graph_objects
from caveat.report.gallery import gallery_section
from caveat.report.markup import legend
from caveat.report.runs import read
from caveat.report.sections import (
    classification_sections,
    cost_section,
    regression_sections,
    shift_section,
    summary_section,
    table_section,
)
from caveat.report.shell import write_page

TITLE = "How far to trust these networks"


def write(folder: str | Path, path: str | Path | None = None, title: str | None = None) -> Path:
    """Writes the report of a results folder, by default to `report.html` inside it, and says where."""
    target = Path(path) if path is not None else Path(folder) / "report.html"
    if is_bench(folder):
        return write_bench(folder, target, title)
    runs = read(folder)
    graph_objects()  # says what to install before any work is done
    by_kind = {
        "classification": lambda: classification_sections(runs) + gallery_section(runs),
        "regression": lambda: regression_sections(runs),
    }
    first = summary_section(runs) + table_section(runs) + shift_section(runs)
    body = first + by_kind[runs[0].kind]() + cost_section(runs) + configuration_section(runs)
    return write_page(target, title or TITLE, legend(runs), body)


def newest(here: str | Path = ".") -> Path:
    """The folder that `caveat bench`, `caveat evaluate` or `caveat demo` wrote last.

    Looked for where they write unless told otherwise: `results`, the folders in it, and `caveat-demo`.
    """
    here = Path(here)
    places = [here / "results", *sorted((here / "results").glob("*/")), here / "caveat-demo"]
    written = {place: [*place.glob("bench.json"), *place.glob("*/metrics.json")] for place in places}
    found = {place: max(file.stat().st_mtime_ns for file in files) for place, files in written.items() if files}
    if not found:
        raise FileNotFoundError(
            f"there are no results in {here / 'results'}: run `caveat bench` or `caveat evaluate` first, or name their "
            "folder, as in caveat report --results FOLDER"
        )
    return max(found, key=lambda place: found[place])
