"""How objects look in a notebook: small HTML tables in the page's own colours, so that they suit light and dark ones.

Called by the `_repr_html_` of posteriors, predictions, scores and infos. All text is escaped.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

__all__ = ["facts_html", "notes_html", "table_html"]

_TABLE = "border-collapse:collapse;color:inherit"
_LINE = "border:0;border-bottom:1px solid rgba(128,128,128,.35)"
_CELL = f"{_LINE};padding:.2em .8em;color:inherit;background:none;text-align:"


def table_html(title: str, heads: Sequence[str], rows: Sequence[Sequence[Any]], below: str = "") -> str:
    """A table under a title; numbers stand to the right. `below` is HTML that follows it."""
    sides = [_side([row[i] for row in rows]) for i in range(len(heads))]
    head = "".join(
        f'<th scope="col" style="{_CELL}{side}">{escape(name)}</th>' for name, side in zip(heads, sides, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f'<td style="{_CELL}{side}">{escape(_text(cell))}</td>' for cell, side in zip(row, sides, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    table = f'<table style="{_TABLE}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f"<div><p><b>{escape(title)}</b></p>{table if rows else ''}{below}</div>"


def facts_html(title: str, facts: Mapping[str, Any], below: str = "") -> str:
    """Names and what they are, one a line."""
    rows = "".join(
        f'<tr><th scope="row" style="{_CELL}left;font-weight:normal;opacity:.75">{escape(name)}</th>'
        f'<td style="{_CELL}left">{escape(_text(value))}</td></tr>'
        for name, value in facts.items()
    )
    table = f'<table style="{_TABLE}"><tbody>{rows}</tbody></table>'
    return f"<div><p><b>{escape(title)}</b></p>{table}{below}</div>"


def notes_html(notes: Sequence[str]) -> str:
    """Warnings and notes, one a line."""
    return "".join(f"<p>{escape(note)}</p>" for note in notes)


def _side(column: Sequence[Any]) -> str:
    """Numbers, and such with an error, stand to the right in one line; text to the left."""
    is_text = any(isinstance(cell, str) and cell[:1].isalpha() for cell in column)
    return "left" if is_text else "right;white-space:nowrap"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
