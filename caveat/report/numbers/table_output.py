"""The results as plain text for people, and as a csv with one line a number for machines."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Sequence
from pathlib import Path

from caveat.evaluate.metrics import METRICS, format_error
from caveat.files import whole_file
from caveat.report.numbers.metric_table import MetricTable
from caveat.report.saved import SavedRun

__all__ = ["format_text", "write_csv"]


def format_text(table: MetricTable, width: int = 100) -> str:
    """Write the table as aligned plain text, in blocks no wider than `width`; * marks the best of a column."""
    names = ["", "", *table.labels]
    label_width = max(map(len, names))
    blocks: list[list[str]] = []
    for index, column in enumerate(table.columns):
        best, metric = table.best(index), METRICS[column.metric]
        lines = [column.group, metric.title]
        for row, cells in enumerate(table.cells):
            score = cells[index]
            error = "" if score.stderr is None else f" ±{format_error(score.stderr)}"
            lines.append(f"{metric.text(score.mean)}{error}{'*' if row in best else ' '}")
        cell_width = max(map(len, lines))
        lines = [line.rjust(cell_width) for line in lines]
        if not blocks or len(blocks[-1][0]) + 2 + cell_width > width:
            blocks.append([name.ljust(label_width) for name in names])
        blocks[-1] = [f"{start}  {line}" for start, line in zip(blocks[-1], lines, strict=True)]
    shown = ["\n".join(line.rstrip() for line in block) for block in blocks]
    return "\n\n".join([*shown, *("\n".join(textwrap.wrap(note, width)) for note in table.notes)])


def write_csv(runs: Sequence[SavedRun], path: str | Path) -> Path:
    """Write one line for each number measured: label, method, data, family, severity, metric, mean, stderr."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["label", "method", "data", "family", "severity", "metric", "mean", "stderr"])
    for run in runs:
        for data in run.data:
            for metric, score in data.metrics.items():
                start = [run.label, run.method, data.name, data.family, data.severity]
                writer.writerow([*start, metric, score.mean, score.stderr])
    with whole_file(Path(path)) as temporary:
        temporary.write_text(text.getvalue(), encoding="utf-8", newline="")
    return Path(path)
