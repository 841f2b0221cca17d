"""Reports from saved files: tables for the terminal, a tidy csv, and one self-contained HTML page."""

from caveat.report.page import newest, write
from caveat.report.runs import Run, read
from caveat.report.tables import Table, format_text, table, write_csv

__all__ = ["Run", "Table", "format_text", "newest", "read", "table", "write", "write_csv"]
