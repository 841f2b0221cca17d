"""Averages of what was measured: over training seeds, and over the conditions of a shift.

Over n seeds the standard error is s / sqrt(n): what another seed would change. Over the severities of a shift it is the
mean of theirs, an upper bound that is reached when the same rows fail at every severity (they are the same inputs, so
their errors are far from independent).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["UNKNOWN", "MeanAndError", "curve_over_seeds", "over_conditions", "over_seeds"]


@dataclass(frozen=True)
class MeanAndError:
    """A mean and its standard error; None where not known or not finite."""

    mean: float | None
    stderr: float | None


UNKNOWN = MeanAndError(None, None)


def over_seeds(values: Iterable[float | None]) -> MeanAndError:
    """Return the mean over seeds and its standard error.

    It is unknown where a seed has no value; the mean of a single seed has no error.
    """
    known = list(values)
    if not known or any(value is None for value in known):
        return UNKNOWN
    array = np.array(known, dtype=np.float64)
    around = array - array[0]  # equal values have no spread at all, not one of rounding
    error = float(around.std(ddof=1) / math.sqrt(len(array))) if len(array) > 1 else None
    return MeanAndError(float(array.mean()), error)


def over_conditions(scores: Sequence[MeanAndError]) -> MeanAndError:
    """Return the mean over conditions; its standard error is an upper bound, the mean of theirs."""
    means = [score.mean for score in scores if score.mean is not None]
    errors = [score.stderr for score in scores if score.stderr is not None]
    if not scores or len(means) < len(scores):
        return UNKNOWN
    return MeanAndError(sum(means) / len(means), sum(errors) / len(errors) if len(errors) == len(scores) else None)


def curve_over_seeds(curves: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the mean [X] of one curve a seed, [S, X], and its standard error [X], which one seed does not have."""
    error = curves.std(0, ddof=1) / math.sqrt(len(curves)) if len(curves) > 1 else None
    return curves.mean(0), error
