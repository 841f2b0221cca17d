"""How each run was fitted: knobs, warnings, coverage of layers, diagnostics and versions, folded away."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from caveat.report.markup import fold, plural, section
from caveat.report.runs import Run
from caveat.report.tables import format_bytes, format_seconds


def configuration_section(runs: Sequence[Run]) -> str:
    """One folded part a run."""
    return section(
        "configuration", "How they were fitted", "Every knob, warning and version, run by run.", run_folds(runs)
    )


def run_folds(runs: Sequence[Run]) -> str:
    """The folded parts alone."""
    body = ""
    for run in runs:
        count = len(run.info.get("warnings", []))
        body += fold(run.label, plural(count, "warning") if count else "", _configuration(run), is_open=False)
    return body


def _configuration(run: Run) -> str:
    info, flops, gradients = run.info, run.info.get("flops"), run.info.get("gradient_evaluations")
    warnings = "".join(f"<li>{escape(str(text))}</li>" for text in info.get("warnings", []))
    cost = {
        "time": format_seconds(info.get("seconds")),
        "stored": format_bytes(info.get("stored_bytes")),
        "peak memory": format_bytes(info.get("peak_bytes")),
        "gradient evaluations": "–" if gradients is None else f"{gradients:,.0f}",
        "floating-point operations": "–" if flops is None else f"{flops:.2e}",
        "seed": info.get("seed", "–"),
    }
    parts = {
        "Warnings": f'<ul class="warnings">{warnings}</ul>' if warnings else "",
        f"Method: {run.method}": pairs(run.fields),
        "Fit": pairs(cost),
        "Diagnostics": pairs(info.get("diagnostics") or {}),
        "Layers": _layers(info.get("coverage") or []),
        "Versions": pairs(info.get("versions") or {}),
    }
    return "".join(f"<h3>{escape(title)}</h3>{content}" for title, content in parts.items() if content)


def _layers(coverage: list[dict[str, Any]]) -> str:
    if not coverage:
        return ""
    heads = list(coverage[0])
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    lines = ([escape(str(layer.get(name, ""))) for name in heads] for layer in coverage)
    rows = "".join(f"<tr><td>{'</td><td>'.join(line)}</td></tr>" for line in lines)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<div class="scroll" tabindex="0" role="region" aria-label="Coverage of layers">{table}</div>'


def pairs(values: dict[str, Any]) -> str:
    """Names and values in columns."""
    items = "".join(f"<div><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>" for key, value in _flatten(values))
    return f'<dl class="pairs">{items}</dl>' if items else ""


def _flatten(values: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as (path, text): `training.epochs`."""
    flat: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, dict) and value:
            flat += _flatten(value, f"{prefix}{key}.")
        else:
            flat.append((f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)))
    return flat
