"""Formulas become MathML while the site is built, so that its pages need no script and nothing from elsewhere to show them.

`pymdownx.arithmatex` finds `$...$` and `$$...$$` and wraps them; here what it wrapped is converted.
"""

import html
import re
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
FUNCTION = re.compile(r"(<mi>(?:log|exp|max|min)</mi>)(?!<mo stretchy=\"false\">&#x00028;|</)")


def on_page_content(content: str, page: Any, **_: Any) -> str:
    """Replace every formula of a page."""

    def replace(match: re.Match[str]) -> str:
        tag, bracket, latex = match.groups()
        return _mathml(html.unescape(latex).strip(), bracket == "[", page.file.src_path)

    return FORMULA.sub(replace, content)


def _mathml(latex: str, block: bool, where: str) -> str:
    converted = convert(latex, display="block" if block else "inline")
    if "\\" in converted:  # an unknown command is passed through as text
        raise PluginError(f"{where}: latex2mathml does not know a command of ${latex}$")
    return FUNCTION.sub(r'\1<mspace width="0.17em"/>', converted)  # TeX sets a thin space between "log" and what follows
