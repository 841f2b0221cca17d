"""Reports from saved files: tables for the terminal, a tidy csv, and one self-contained HTML page.

    saved         runs and benches as their folders have them
    numbers       the table of results, and the answers to a reader's questions
    draw          figures and pieces of HTML
    runs_page     the page of runs that `caveat evaluate` wrote
    bench_page    the page of a folder that `caveat bench` wrote
    chains_page   the page about the chains of a sampler

Each room imports only from those above it in this list, and no page from another. The report computes no statistics of
its own: it asks `caveat.evaluate`.

Called by the user and by the commands `evaluate`, `report`, `diagnose` and `demo`.
"""

from caveat.report.folders import newest, write
from caveat.report.numbers import MetricTable, format_text, table, write_csv
from caveat.report.saved import SavedRun, read

__all__ = ["MetricTable", "SavedRun", "format_text", "newest", "read", "table", "write", "write_csv"]
