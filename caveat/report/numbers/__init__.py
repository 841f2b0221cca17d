"""The numbers that pages and terminals show, put together from saved runs; the statistics are in `caveat.evaluate`.

`metric_table` is the table of results, `table_output` the same as text and csv; `reader_questions` answers which run is
best, by how much, and whether that is more than chance, from the `run_gains` of one run over another:

    gain = mean over rows of log p(y) - log p'(y), or AUROC - AUROC', with a 95% interval over rows

Called by `draw` and the pages, and, through `caveat.report`, by users and the command line.
"""

from caveat.report.numbers.metric_table import CLEAN, CURVES, FIDELITY, OOD, Column, MetricTable, table
from caveat.report.numbers.reader_questions import Answer, answers, baseline, verdicts
from caveat.report.numbers.table_output import format_text, write_csv

__all__ = [
    "CLEAN",
    "CURVES",
    "FIDELITY",
    "OOD",
    "Answer",
    "Column",
    "MetricTable",
    "answers",
    "baseline",
    "format_text",
    "table",
    "verdicts",
    "write_csv",
]
