"""Formulas become MathML while the site is built, so that its pages need no script and no other site to show them.

`pymdownx.arithmatex` finds `$...$` and `$$...$$` and wraps them; here what it wrapped is converted.
"""

import html
import re
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
THIN_SPACE = '<mspace width="0.17em"/>'
MENDED = (
    # TeX sets thin spaces around the names of functions, which MathML leaves to the writer.
    (re.compile(r'(<mi>(?:log|exp)</mi>)(?!<mo stretchy="false">&#x00028;|</)'), rf"\1{THIN_SPACE}"),
    (re.compile(r"(</m(?:i|n|sub|sup|frac)>|&#x00029;</mo>)(?=<mi>(?:log|exp)</mi>)"), rf"\1{THIN_SPACE}"),
    # \sim comes out as a letter; as an operator it has space on both sides. Bars of a modulus have none.
    (re.compile("<mi>&#x0007E;</mi>"), "<mo>&#x0223C;</mo>"),
    (re.compile("<mo>&#x0007C;</mo>"), '<mo lspace="0" rspace="0" stretchy="false">&#x0007C;</mo>'),
    # Capital Greek letters are upright.
    (re.compile(r"<mi>(&#x003(?:9[3-9A-F]|A[0-9]);)</mi>"), r'<mi mathvariant="normal">\1</mi>'),
)


def on_page_content(content: str, page: Any, **_: Any) -> str:
    """Replace every formula of a page."""

    def replace(match: re.Match[str]) -> str:
        _, bracket, latex = match.groups()
        return _mathml(html.unescape(latex).strip(), bracket == "[", page.file.src_path)

    return FORMULA.sub(replace, content)


def _mathml(latex: str, block: bool, where: str) -> str:
    converted = convert(latex, display="block" if block else "inline")
    if "\\" in converted:  # an unknown command is passed through as text
        raise PluginError(f"{where}: latex2mathml does not know a command of ${latex}$")
    for pattern, replacement in MENDED:
        converted = pattern.sub(replacement, converted)
    return converted
