"""Predictions as they are written down: the arrays of a prediction file, and the same as a table for people.

A data set is predicted in blocks of rows, because making a posterior draw costs more than using it on one row more.

Called by `evaluate.scoring` and `evaluate.fidelity`, by `caveat predict`, and by `bench` and `report`, which find a
data set's file by `file_stem` and rank its rows by `row_uncertainty`.
"""

from caveat.evaluate.predictions.blocks_of_rows import row_blocks
from caveat.evaluate.predictions.csv_table import write_prediction_csv
from caveat.evaluate.predictions.file_arrays import by_row, file_stem, predict_rows, prediction_arrays, row_uncertainty

__all__ = [
    "by_row",
    "file_stem",
    "predict_rows",
    "prediction_arrays",
    "row_blocks",
    "row_uncertainty",
    "write_prediction_csv",
]
