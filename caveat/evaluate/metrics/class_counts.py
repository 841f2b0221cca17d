"""Which classes are taken for which, and what a network that always says the same would get right.

counts[i, j] = rows of class i that are taken for class j
recall_i = counts[i, i] / sum_j counts[i, j]        majority = max_i sum_j counts[i, j] / N
"""

from typing import NamedTuple

import torch
from torch import Tensor

from caveat.evaluate.metrics.per_row import check_classification

__all__ = ["ByClass", "by_class"]


class ByClass(NamedTuple):
    """The confusion matrix, its recalls, and the majority baseline."""

    counts: Tensor  # [C, C] int64; a row is a true class, a column what it was taken for
    recall: Tensor  # [C]; NaN where no row is of the class
    majority_class: int
    majority: float  # share of rows that are of that class: the accuracy of always saying it


def by_class(probs: Tensor, targets: Tensor) -> ByClass:
    """Count what each class is taken for; probs are [N, C], targets [N]."""
    probs, targets = check_classification(probs, targets)
    classes = probs.shape[1]
    pairs = targets * classes + probs.argmax(1)
    counts = torch.bincount(pairs, minlength=classes**2).reshape(classes, classes)
    rows = counts.sum(1)
    largest = int(rows.argmax())
    return ByClass(counts, counts.diagonal().double() / rows, largest, int(rows[largest]) / len(targets))
