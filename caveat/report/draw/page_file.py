"""The file of a page: one HTML file that needs no network.

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

__all__ = ["write_page"]


def write_page(path: str | Path, title: str, legend: str, body: str) -> Path:
    """Write a page from its sections and the bar of filters above them, and return where it is."""
    page = Template(_asset("page.html")).substitute(
        title=escape(title),
        style=_asset("page.css"),
        script=_asset("page.js"),
        plotly=_packed_plotly(),
        contents=_contents(body),
        legend=legend,
        body=body,
    )
    with whole_file(Path(path)) as temporary:
        temporary.write_text(page, encoding="utf-8", newline="")
    return Path(path)


def _asset(name: str) -> str:
    return resources.files("caveat.report.draw").joinpath(name).read_text(encoding="utf-8")


def _packed_plotly() -> str:
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode()


def _contents(body: str) -> str:
    """Links to the sections of a page."""
    headings = re.findall(r'<h2 id="(\w+)-title">(.*?)</h2>', body)
    return "".join(f'<li><a href="#{identity}">{title}</a></li>' for identity, title in headings)
