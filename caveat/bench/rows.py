"""A few numbers for every row that was scored: enough to compare methods row by row and to draw every curve.

    test, classes    rows, log_prob, brier, correct, confidence, entropy, epistemic; bin_confidence, bin_accuracy,
                     bin_count: the reliability diagram of the top label, 15 bins
    test, numbers    rows, log_prob, squared_error, crps, covered (by the 90% interval), variance, epistemic
    ood          rows, entropy or variance, epistemic

One entry a decision: a row of the data, or a position of it, where `rows` repeats.
"""

from collections.abc import Mapping

import numpy as np
import torch

from caveat.evaluate.metrics import accuracy, brier, interval_coverage, reliability, squared_error

__all__ = ["COLUMNS", "row_scores"]

COLUMNS = {  # by kind and role: one entry a decision each
    ("classification", "test"): ("rows", "log_prob", "brier", "correct", "confidence", "entropy", "epistemic"),
    ("classification", "ood"): ("rows", "entropy", "epistemic"),
    ("regression", "test"): ("rows", "log_prob", "squared_error", "crps", "covered", "variance", "epistemic"),
    ("regression", "ood"): ("rows", "variance", "epistemic"),
}

_BINS = 15


def row_scores(kind: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The numbers above from the arrays of a prediction file."""
    uncertainty = "entropy" if kind == "classification" else "variance"
    numbers = {"rows": arrays["rows"]}
    numbers |= {name: _per_row(arrays[name]) for name in (uncertainty, "epistemic")}
    if "targets" not in arrays:
        return numbers
    numbers["log_prob"] = arrays["log_prob"]
    columns = {name: torch.from_numpy(array) for name, array in arrays.items()}
    if kind == "regression":
        mean, targets, ends = columns["mean"], columns["targets"], (columns["lower_90"], columns["upper_90"])
        numbers["squared_error"] = squared_error(mean, targets).numpy().astype(np.float32)
        numbers["covered"] = interval_coverage(*ends, targets).numpy().astype(np.float32)
        return numbers | {"crps": arrays["crps"].reshape(len(arrays["crps"]), -1).mean(1)}
    probs, targets = columns["probs"], columns["targets"]
    diagram = reliability(probs, targets, _BINS)
    return numbers | {
        "brier": brier(probs, targets).numpy().astype(np.float32),
        "correct": accuracy(probs, targets).numpy().astype(np.uint8),
        "confidence": probs.amax(1).numpy(),
        "bin_confidence": diagram.confidence.numpy().astype(np.float32),
        "bin_accuracy": diagram.accuracy.numpy().astype(np.float32),
        "bin_count": diagram.count.numpy().astype(np.int64),
    }


def _per_row(column: np.ndarray) -> np.ndarray:
    return column if column.ndim == 1 else column.sum(axis=tuple(range(1, column.ndim)))
