"""The report: one HTML file that needs no network, made from saved files only.

plotly.js rides inside, packed with gzip (a third of its size) and unpacked by the browser; a content-security policy
forbids the page to fetch anything at all. The same results give the same file, byte for byte.
"""

from __future__ import annotations

import base64
import gzip
import re
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

from caveat.files import whole_file
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


def write(folder: str | Path, path: str | Path | None = None, title: str = "How far to trust these networks") -> Path:
    """Writes the report of a results folder, by default to `report.html` inside it, and says where."""
    runs = read(folder)
    graph_objects()  # says what to install before any work is done
    by_kind = {
        "classification": lambda: classification_sections(runs) + gallery_section(runs),
        "regression": lambda: regression_sections(runs),
    }
    first = summary_section(runs) + table_section(runs) + shift_section(runs)
    body = first + by_kind[runs[0].kind]() + cost_section(runs) + configuration_section(runs)
    page = Template(_asset("page.html")).substitute(
        title=escape(title),
        style=_asset("page.css"),
        script=_asset("page.js"),
        plotly=_packed_plotly(),
        contents=_contents(body),
        legend=legend(runs),
        body=body,
    )
    target = Path(path) if path is not None else Path(folder) / "report.html"
    with whole_file(target) as temporary:
        temporary.write_text(page, encoding="utf-8", newline="")
    return target


def _asset(name: str) -> str:
    return resources.files("caveat.report").joinpath(name).read_text(encoding="utf-8")


def _packed_plotly() -> str:
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode()


def _contents(body: str) -> str:
    """Links to the sections there are."""
    found = re.findall(r'<h2 id="(\w+)-title">(.*?)</h2>', body)
    return "".join(f'<li><a href="#{identity}">{title}</a></li>' for identity, title in found)
