"""Priors by the name of their family, all of the same variance: a comparison of families is not one of widths.

variance = 1 / precision
"""

import math
from collections.abc import Callable

from caveat.data import DataSet
from caveat.files import named_function, names_function
from caveat.priors import GaussianMixturePrior, GaussianPrior, LaplacePrior, LogisticPrior, Prior, StudentTPrior

__all__ = ["FAMILIES", "prior_of"]

_DEGREES = 5.0  # of freedom of a Student-t, whose variance is scale^2 degrees / (degrees - 2)


def _student_t(variance: float) -> Prior:
    return StudentTPrior(math.sqrt(variance * (_DEGREES - 2) / _DEGREES), _DEGREES)


def _gaussian_mixture(variance: float) -> Prior:
    """Two components of equal weight, one three times as wide as the other."""
    return GaussianMixturePrior((math.sqrt(variance / 5), math.sqrt(9 * variance / 5)), (0.5, 0.5))


FAMILIES: dict[str, Callable[[float], Prior]] = {
    "gaussian": lambda variance: GaussianPrior(1 / variance),
    "laplace": lambda variance: LaplacePrior(math.sqrt(variance / 2)),
    "student_t": _student_t,
    "logistic": lambda variance: LogisticPrior(math.sqrt(3 * variance) / math.pi),
    "gaussian_mixture": _gaussian_mixture,
}


def prior_of(name: str, precision: float, data: DataSet) -> Prior:
    """A prior of a family, or that of `file.py:function`, which is given the data and the precision."""
    if names_function(name):
        prior: Prior = named_function(name)(data, precision)
        return prior
    if name == "gaussian":
        return GaussianPrior(precision)  # without the rounding of two divisions
    return FAMILIES[name](1 / precision)
