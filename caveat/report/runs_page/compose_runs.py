"""The page of runs that `caveat evaluate` or `caveat demo` wrote."""

from __future__ import annotations

from pathlib import Path

from caveat.report.draw import graph_objects, legend, write_page
from caveat.report.runs_page.class_tables import class_section
from caveat.report.runs_page.gallery import gallery_section
from caveat.report.runs_page.sections import (
    classification_sections,
    configuration_section,
    cost_section,
    regression_sections,
    shift_section,
    summary_section,
    table_section,
)
from caveat.report.saved import read

__all__ = ["write_runs"]

TITLE = "How far to trust these networks"


def write_runs(folder: str | Path, target: Path, title: str | None = None) -> Path:
    """Write the page of a folder that `caveat evaluate` wrote, and return where it is."""
    runs = read(folder)
    graph_objects()  # says what to install before any work is done
    body = summary_section(runs) + table_section(runs) + shift_section(runs)
    if runs[0].kind == "classification":
        body += class_section(runs) + classification_sections(runs) + gallery_section(runs)
    else:
        body += regression_sections(runs)
    body += cost_section(runs) + configuration_section(runs)
    return write_page(target, title or TITLE, legend(runs), body)
