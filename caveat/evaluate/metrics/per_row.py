"""Scores of predictions, one number a test point, and their means with standard errors.

Scores are kept per point so that any of them can be averaged, compared between methods row by row, or plotted later.
All are computed in float64 on the CPU. A mean over N points has standard error s / sqrt(N), s the sample standard
deviation (N - 1 in the denominator): the spread over test points, not over training runs.
"""

import math

import torch
from torch import Tensor

__all__ = [
    "accuracy",
    "brier",
    "check_classification",
    "check_scores",
    "interval_coverage",
    "mean_and_stderr",
    "rmse",
    "set_coverage",
    "squared_error",
]


def accuracy(probs: Tensor, targets: Tensor) -> Tensor:
    """Return 1 for each row whose most probable class is the target, else 0, [N]; probs are [N, C], targets [N]."""
    probs, targets = check_classification(probs, targets)
    return (probs.argmax(dim=1) == targets).double()


def brier(probs: Tensor, targets: Tensor) -> Tensor:
    """Return the Brier score [N] of probs [N, C] and targets [N]: the *sum* over classes of (prob - indicator)^2.

    It lies between 0 and 2. With two classes it is twice the score that only looks at the positive one.
    """
    probs, targets = check_classification(probs, targets)
    indicator = torch.nn.functional.one_hot(targets, probs.shape[1])  # [N, C]
    return (probs - indicator).square().sum(dim=1)


def squared_error(mean: Tensor, targets: Tensor) -> Tensor:
    """Return (mean - target)^2 for each row, [N], averaged over its outputs where there are several, [N, D]."""
    _check_same_shape(mean=mean, targets=targets)
    return _average_within_rows((mean.double() - targets.double()).square())


def interval_coverage(lower: Tensor, upper: Tensor, targets: Tensor) -> Tensor:
    """Return the share of each row's outputs that lie in [lower, upper], ends included, [N]: 0 or 1 with one output."""
    _check_same_shape(lower=lower, upper=upper, targets=targets)
    if (lower > upper).any():
        raise ValueError(f"{int((lower > upper).sum())} intervals have lower > upper: were the two swapped?")
    return _average_within_rows(((lower <= targets) & (targets <= upper)).double())


def set_coverage(sets: Tensor, targets: Tensor) -> Tensor:
    """Return 1 for each row whose target is among its labels, else 0, [N]; sets [N, C] of yes and no, targets [N]."""
    if sets.ndim != 2 or targets.shape != sets.shape[:1]:
        raise ValueError(f"sets {list(sets.shape)} must be [N, C], with one target a row; given {list(targets.shape)}")
    return sets.bool().gather(1, targets.long().unsqueeze(1)).squeeze(1).double()


def mean_and_stderr(scores: Tensor, rows: Tensor | None = None) -> tuple[float, float | None]:
    """Return the mean of scores [N] or [N, D] and its standard error.

    A row's outputs ([N, D]) are averaged first: rows are independent, the outputs of one row are not. Where several
    scores belong to one row (the tokens of a sequence, the labels of an image), `rows` [N] says which, and the standard
    error is sqrt(G / (G - 1) sum_g (sum_{i in g} (s_i - mean))^2) / N over the G rows.
    The standard error is None for a single row and where a score is infinite (a log probability of zero).
    """
    if scores.ndim == 0 or scores.numel() == 0:
        raise ValueError(f"scores must be [N] or [N, D] with at least one row; given shape {list(scores.shape)}")
    if scores.isnan().any():
        raise ValueError(f"{int(scores.isnan().sum())} of {scores.numel()} scores are NaN: mend them before averaging")
    points = _average_within_rows(scores.double())
    mean = points.mean().item()
    group = torch.arange(len(points)) if rows is None else rows.unique(return_inverse=True)[1]
    groups = int(group.max()) + 1
    if groups == 1 or not math.isfinite(mean):
        return mean, None
    sums = torch.zeros(groups, dtype=torch.float64).index_add(0, group, points - mean)
    return mean, math.sqrt(groups / (groups - 1) * sums.square().sum().item()) / len(points)


def rmse(squared_errors: Tensor, rows: Tensor | None = None) -> tuple[float, float | None]:
    """Return the root of the mean of squared errors [N], and its standard error se(sqrt(m)) = se(m) / (2 sqrt(m))."""
    mean, stderr = mean_and_stderr(squared_errors, rows)
    root = math.sqrt(mean)
    if stderr is None or root == 0.0:  # all errors zero: the standard error is zero as well
        return root, stderr
    return root, stderr / (2 * root)


def check_classification(probs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Refuse what is not N distributions over C classes with N targets; give both back as float64 and int64."""
    if probs.ndim != 2 or probs.numel() == 0:
        raise ValueError(f"probs must be [N, C] with at least one row; given shape {list(probs.shape)}")
    if targets.shape != probs.shape[:1]:
        raise ValueError(f"targets must be [{len(probs)}], one class a row of probs; given {list(targets.shape)}")
    if targets.is_floating_point():
        raise ValueError(f"targets must be class numbers of an integer type; given {targets.dtype}")
    probs, targets = probs.double(), targets.long()
    if not probs.isfinite().all():
        bad = int((~probs.isfinite()).any(dim=1).sum())
        raise ValueError(f"{bad} of {len(probs)} rows of probs hold NaN or infinite values")
    sums = probs.sum(dim=1)
    if probs.min() < -1e-6 or (sums - 1).abs().max() > 1e-3:
        raise ValueError(
            f"rows of probs must be distributions: the smallest value is {probs.min().item():.3g} and row sums run "
            f"from {sums.min().item():.4g} to {sums.max().item():.4g}. If these are logits, take the softmax first"
        )
    if targets.min() < 0 or targets.max() >= probs.shape[1]:
        raise ValueError(
            f"targets must lie in 0..{probs.shape[1] - 1}; given {targets.min().item()}..{targets.max().item()}"
        )
    return probs, targets


def check_scores(name: str, scores: Tensor) -> Tensor:
    """Refuse what is not one number a row; give it back as float64."""
    if scores.ndim != 1 or len(scores) == 0:
        raise ValueError(f"{name} must be [N] with at least one row; given shape {list(scores.shape)}")
    if scores.isnan().any():
        raise ValueError(f"{int(scores.isnan().sum())} of {len(scores)} values of {name} are NaN")
    return scores.double()


def _average_within_rows(scores: Tensor) -> Tensor:
    return scores.reshape(len(scores), -1).mean(dim=1)


def _check_same_shape(**tensors: Tensor) -> None:
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    if len({tuple(shape) for shape in shapes.values()}) > 1:
        raise ValueError(f"shapes differ: {shapes}. Broadcasting here is most often a mistake ([N] against [N, 1])")
    for name, tensor in tensors.items():
        if tensor.ndim == 0 or tensor.numel() == 0:
            raise ValueError(f"{name} must have at least one row; given shape {shapes[name]}")
        if tensor.isnan().any():
            raise ValueError(f"{name} holds NaN in {int(tensor.isnan().sum())} of {tensor.numel()} places")
