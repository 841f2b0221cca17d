"""How each run was fitted: knobs, warnings, coverage of layers, diagnostics and versions, folded away."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from caveat.evaluate.metrics import METRICS, format_bytes, format_seconds
from caveat.report.draw.figures import Style
from caveat.report.draw.html_pieces import fit_anchor, fold, scrolling
from caveat.report.draw.names_explained import method_in_words
from caveat.report.saved import SavedRun
from caveat.report.wording import joined_by_and, plural

__all__ = ["fit_folds", "settings_list", "warning_note"]


def fit_folds(runs: Sequence[SavedRun], style: Mapping[str, Style], set_index: int = 0) -> str:
    """One folded part a run, with everything that its fit wrote down; its name in the table leads there."""
    body = ""
    for run in runs:
        count = len(run.info.get("warnings", []))
        note, identity = plural(count, "warning") if count else "", fit_anchor(style[run.label], set_index)
        body += fold(run.label, note, _fit_facts(run), is_open=False, identity=identity)
    return body


def warning_note(runs: Sequence[SavedRun], addition: str = "") -> str:
    """Say which fits warned and how often, followed by `addition` (HTML); nothing where none warned."""
    counts = [f"{run.label} ({len(run.info['warnings'])})" for run in runs if run.info.get("warnings")]
    if not counts:
        return ""
    link = '<a href="#configuration">how they were fitted</a>'
    return f'<p class="note">Fits with warnings: {escape(joined_by_and(counts))}; see {link}.{addition}</p>'


def _fit_facts(run: SavedRun) -> str:
    info, flops = run.info, run.info.get("flops")
    warnings = "".join(f"<li>{escape(str(text))}</li>" for text in info.get("warnings", []))
    cost = {
        "time": format_seconds(info.get("seconds")),
        "of it the start": format_seconds(info["start"]["seconds"]) if info.get("start") else "",
        "a prediction, a row": format_seconds(info.get("predict_seconds_per_row")),
        "stored": format_bytes(info.get("stored_bytes")),
        "peak memory": format_bytes(info.get("peak_bytes")),
        "gradient evaluations": METRICS["gradient_evaluations"].text(info.get("gradient_evaluations")),
        "floating-point operations": "–" if flops is None else f"{flops:.2e}",
        "seed": info.get("seed", "–"),
    }
    parts = {
        "Warnings": f'<ul class="warnings">{warnings}</ul>' if warnings else "",
        f"Method: {run.method}": settings_list(run.fields),
        "Cost": settings_list({name: value for name, value in cost.items() if value != ""}),
        "Diagnostics": settings_list(info.get("diagnostics") or {}),
        "Layers": _layers(info.get("coverage") or []),
        "Versions": settings_list(info.get("versions") or {}),
    }
    text = method_in_words(run.method)
    lead = f"<p>{escape(text)}</p>" if text else ""
    return lead + "".join(f"<h3>{escape(title)}</h3>{content}" for title, content in parts.items() if content)


def _layers(coverage: list[dict[str, Any]]) -> str:
    if not coverage:
        return ""
    heads = list(coverage[0])
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    lines = ([escape(str(layer.get(name, ""))) for name in heads] for layer in coverage)
    rows = "".join(f"<tr><td>{'</td><td>'.join(line)}</td></tr>" for line in lines)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return scrolling("Coverage of layers", table)


def settings_list(values: dict[str, Any]) -> str:
    """Names and values in columns; nested ones by their path, as in `training.epochs`."""
    items = "".join(f"<div><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>" for key, value in _flatten(values))
    return f'<dl class="pairs">{items}</dl>' if items else ""


def _flatten(values: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as pairs of a path, as in `training.epochs`, and its value as text."""
    flat: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, dict) and value:
            flat += _flatten(value, f"{prefix}{key}.")
        else:
            flat.append((f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)))
    return flat
