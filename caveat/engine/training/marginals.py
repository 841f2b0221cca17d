"""Whether what was fitted predicts better than somebody who never looks at the inputs: than the targets' marginals.

    gain_i = log p(y_i | x_i, posterior) - ((n + 1) b(y_1 .. y_n, y_i) - n b(y_1 .. y_n))

for a row i, in nats. b is the mean log likelihood of targets under the best prediction that is the same for all of
them (`Likelihood.baseline`), so that the bracket is what a row adds to the code length of n training targets. A
posterior of use has a mean gain that is above zero by more than its standard error.

Validation rows are looked at where the task has ten or more. On training rows every method looks better than it is:
there a warning means that nothing was learned, and no warning means little. Two to nine validation rows are looked at
beside training rows, and can say that predictions are worse, but not that they are better.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from caveat.batches import Inputs
from caveat.engine.run import Run
from caveat.engine.training.against_point import point_is_better
from caveat.likelihoods import Likelihood
from caveat.predictive import Predictive
from caveat.randomness import seeded
from caveat.rows import Rows
from caveat.task import Task

__all__ = ["check_against_marginals"]

FEWEST = 10  # validation rows that can say anything
FIRST, MOST = 32, 256  # rows that are looked at; the first ones are enough where they leave no doubt
NO_DOUBT = 4.0  # standard errors
TARGETS = 2**17  # numbers at most of the training targets that stand for the marginals
NUMBERS = 2**21  # of outputs, of all draws, that are held at once

Predict = Callable[[Inputs], Predictive]


def check_against_marginals(
    task: Task, predict: Predict, draws: int, run: Run, point: Predict | None = None
) -> dict[str, Any] | None:
    """What predictions of so many draws gain over the marginals, as json; adds a warning to the run if that is unclear.

    With the predictions of the point that a fit started from, it warns too where these are clearly better.
    None where there is no such comparison: classes that are weighted are not to be predicted as often as they come.
    The first rank looks. A fit that is over is not lost because its predictions fail: that becomes a warning.
    """
    if getattr(task.network.likelihood, "class_weights", None) is not None:
        return None
    found: dict[str, Any] = {}
    told: list[str] = []
    if run.ranks.first:
        held_out = task.validation is not None and len(task.validation) >= FEWEST
        rows = task.validation if task.validation is not None and held_out else task.train
        kind, looked_at = "validation" if held_out else "training", rows.some(FIRST)
        try:
            with seeded(0, run.device), torch.no_grad():  # for data that are augmented as they are read
                gains = _gains(task, predict, draws, looked_at)
                few = torch.empty(0)
                if task.validation is not None and not held_out:
                    few = _gains(task, predict, draws, task.validation)
                if len(rows) > FIRST and not _mean(gains) > NO_DOUBT * _error(gains):
                    looked_at = rows.some(MOST)
                    gains = _gains(task, predict, draws, looked_at)
                of_point = None if point is None else _gains(task, point, 1, looked_at)
        except Exception as error:  # whatever a module, a data set or a likelihood of somebody's own may raise
            told = [f"predictions could not be compared with the label marginals ({type(error).__name__}: {error})"]
        else:
            gain, error_of_gain = _mean(gains), _error(gains)
            found = {"rows": kind, "count": len(gains), "gain": _number(gain), "error": _number(error_of_gain)}
            if not gain > error_of_gain:
                told = [_warning(task.network.likelihood, gain, error_of_gain, f"{len(gains)} {kind} rows")]
            elif len(few) > 1 and not _mean(few) >= -_error(few):
                told = [_warning(task.network.likelihood, _mean(few), _error(few), f"{len(few)} validation rows")]
            if of_point is not None:
                found |= {"gain_of_point": _number(_mean(of_point))}
                worse = point_is_better(gains, of_point, kind)
                told += [] if worse is None else [worse]
    found, told = run.ranks.from_first((found, told))
    run.warnings += told
    return found or None


def _warning(likelihood: Likelihood, gain: float, error: float, rows: str) -> str:
    standardise = (
        "" if getattr(likelihood, "standardise", True) else f", or {type(likelihood).__name__}(standardise=True)"
    )
    return (
        f"predictions are no better than the label marginals, or not clearly: {gain:+.3g} ± {error:.2g} nats a row on "
        f"{rows}. Nothing was learned, or training rows were learned by heart: train longer or shorter, at another "
        f"learning rate or with a stronger prior{standardise}"
    )


def _gains(task: Task, predict: Predict, draws: int, rows: Rows) -> Tensor:
    """The gain of each row, [R] in float64."""
    device = task.network.device
    outputs = task.network(task.network.params(), task.example(device))
    at_once = max(1, NUMBERS // max(1, draws * outputs[0].numel()))
    gains = []
    for x, y in rows.ordered(at_once, device):
        log_prob = predict(x).log_prob(y).double().cpu()
        gains.append(log_prob.reshape(len(y), -1).sum(1) - _by_marginals(task, y.cpu()))
    return torch.cat(gains)


def _by_marginals(task: Task, targets: Tensor) -> Tensor:
    """The log likelihood of each row's targets under the marginals of the training targets, [R] in float64."""
    likelihood = task.network.likelihood
    size = max(targets[0].numel(), 1)
    _, known = next(iter(task.train.some(max(2, min(2000, TARGETS // size))).ordered(2000)))
    before = len(known) * likelihood.baseline(known)
    after = [(len(known) + 1) * likelihood.baseline(torch.cat([known, target[None]])) for target in targets]
    return torch.tensor(after, dtype=torch.float64) - before


def _mean(gains: Tensor) -> float:
    return float(gains.mean())


def _error(gains: Tensor) -> float:
    """The standard error of the mean gain; without bound for one row."""
    return float(gains.std()) / math.sqrt(len(gains)) if len(gains) > 1 else math.inf


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
