"""Tables as people have them: text, blanks, dates, sums of money, in csv and parquet files and in frames.

    cells       what a cell says: a number with its unit, a date, nothing
    separators  what stands between cells, and before decimals
    sources     files and frames as columns of text
    targets     classes or numbers
    columns     numbers, dates and categories: what their cells are, and the inputs that they become
    encoding    how columns become inputs: learned from training rows, kept as json, applied to new rows

    table -> columns of text -> Encoding, learned once -> inputs [N, K] -> standardised as all inputs are

Called by `data.own`, which reads people's files, and by the recipe that a posterior keeps.
"""

from caveat.data.tables.cells import whole_number
from caveat.data.tables.encoding import Encoded, Encoding, learn_encoding, plain_numbers, stored_encoding
from caveat.data.tables.sources import TABLES, Table, read_frame, read_records, read_table
from caveat.data.tables.targets import MAX_CLASSES, Kind, Target, read_target

__all__ = [
    "MAX_CLASSES",
    "TABLES",
    "Encoded",
    "Encoding",
    "Kind",
    "Table",
    "Target",
    "learn_encoding",
    "plain_numbers",
    "read_frame",
    "read_records",
    "read_table",
    "read_target",
    "stored_encoding",
    "whole_number",
]
