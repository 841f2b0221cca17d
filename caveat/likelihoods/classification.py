"""Likelihoods of classes: one of several, or yes and no."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from caveat.knobs import NonNegative, NonNegativeInt, check_knobs
from caveat.likelihoods.probit import probit
from caveat.likelihoods.protocol import (
    DiagonalFisher,
    FisherByColumns,
    Hyper,
    NothingLearned,
    by_output,
    check_shape,
    examples,
    shape_of,
    standard_normal,
    temperature,
)
from caveat.predictive import BernoulliPredictive, CategoricalPredictive, Kind, next_labels

__all__ = ["Bernoulli", "Categorical"]

FILLED_IN = 64  # numbers that are written on a GPU one by one, each some microseconds


@dataclass(frozen=True)
class Categorical(NothingLearned, FisherByColumns):
    """One of C classes: softmax over logits [B, C], [B, C, H, W] or, with class_axis=-1, [B, T, C]."""

    class_axis: int = 1  # where the classes are in the outputs
    ignore_index: int = -100  # targets of this value are left out
    class_weights: tuple[NonNegative, ...] | None = None  # multiply the log likelihood of each class
    # Whether labels [B, T] are the tokens themselves, so that position t is scored by the label at t + 1; None lets the
    # task see for itself.
    next_token: bool | None = None
    # Of a language model: the tokens that stand for the classes. Its outputs [B, T, V] are read as the logits [B, C] of
    # these at each row's last token, labels are 0 to C - 1.
    classes: tuple[NonNegativeInt, ...] | None = None
    names: tuple[str, ...] | None = None  # of the classes, in order: targets may then be these words
    kind: ClassVar[Kind] = "classification"
    tempered: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.classes, list):
            object.__setattr__(self, "classes", tuple(self.classes))
        if isinstance(self.names, list):
            object.__setattr__(self, "names", tuple(self.names))
        check_knobs(self)
        if self.names is not None and len(set(self.names)) < max(2, len(self.names)):
            raise ValueError(f"Categorical(names={list(self.names)}): must be two different words or more")
        if self.classes is None:
            return
        if len(set(self.classes)) < max(2, len(self.classes)):
            raise ValueError(f"Categorical(classes={list(self.classes)}): must be two different tokens or more")
        if self.class_axis != 1 or self.next_token:
            raise ValueError(
                "Categorical(classes=...) reads one answer a row at its last token: leave class_axis and next_token out"
            )

    def check_targets(self, targets: Tensor) -> None:
        """Raise a ValueError unless targets are whole numbers."""
        if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
            raise ValueError(
                f"Categorical needs integer class labels, got {targets.dtype}: use targets.long(), "
                "or Bernoulli() for a yes/no target"
            )

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise a ValueError unless there is one label in 0..C-1 for each vector of logits."""
        self.check_targets(targets)
        if outputs.ndim < 2 or not -outputs.ndim < self.class_axis < outputs.ndim or self.class_axis == 0:
            raise ValueError(
                f"Categorical(class_axis={self.class_axis}) needs logits with classes on that axis and the batch on "
                f"the first, such as [batch, classes], got {shape_of(outputs)}: change the output or class_axis"
            )
        *positions, classes = outputs.movedim(self.class_axis, -1).shape
        if tuple(positions) != shape_of(targets):
            last = outputs.shape[:-1] == targets.shape
            advice = "say class_axis=-1" if last else "reshape the labels or change class_axis"
            raise ValueError(
                f"logits of shape {shape_of(outputs)} with class_axis={self.class_axis} need labels of shape "
                f"{tuple(positions)}, got {shape_of(targets)}: {advice}"
            )
        first = outputs[:1].double()
        fine = outputs.dtype in (torch.float32, torch.float64)  # in half precision other numbers may sum to one, too
        sums = (first.sum(self.class_axis) - 1).abs() < 1e-5
        if fine and classes > 1 and len(first) and bool((first >= 0).all()) and bool(sums.all()):
            raise ValueError(
                "the outputs of the first row are probabilities, and Categorical takes logits: leave the softmax "
                "at the network's end out"
            )
        if self.class_weights is not None and len(self.class_weights) != classes:
            raise ValueError(
                f"Categorical has {len(self.class_weights)} class weights, but the network has {classes} outputs: "
                "give one weight a class"
            )
        if self.names is not None and len(self.names) != classes:
            raise ValueError(
                f"Categorical has {len(self.names)} names, but the network has {classes} outputs: name each class"
            )
        labels = self._labels(targets)
        counted = labels[self._kept(labels)].long()
        if targets.numel() and not counted.numel():
            raise ValueError(f"every label is ignore_index={self.ignore_index}: there is nothing to learn from")
        low, high = (int(counted.min()), int(counted.max())) if counted.numel() else (0, 0)
        if low < 0 or high >= classes:
            if self.classes is not None and set(counted.unique().tolist()) <= set(self.classes):
                raise ValueError(
                    f"labels are the tokens {list(self.classes)[:3]} themselves, and Categorical(classes=...) takes "
                    "their places among the classes, from 0: give each row classes.index(label)"
                )
            advice = (
                f"mark labels to leave out with ignore_index={low}"
                if low < 0
                else f"give the network {high + 1} outputs"
            )
            raise ValueError(
                f"labels run from {low} to {high}, but the network has {classes} outputs (labels 0 to {classes - 1}): "
                f"check the labels, or {advice}"
            )

    def _labels(self, targets: Tensor) -> Tensor:
        """The label that each vector of logits is scored by."""
        return next_labels(targets, self.ignore_index) if self.next_token else targets

    def _kept(self, targets: Tensor) -> Tensor:
        return targets.long() != self.ignore_index  # long, because -100 as a uint8 is the label 156

    def log_prob(self, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Tensor:
        """Weighted log softmax at the label, summed over the positions of a row."""
        logits = outputs if self.class_axis % outputs.ndim == 1 else outputs.movedim(self.class_axis, 1)
        weights = None if self.class_weights is None else self._weights_like(logits)
        labels = self._labels(targets).long()
        loss = F.nll_loss(_log_softmax(logits), labels, weights, ignore_index=self.ignore_index, reduction="none")
        return -loss if loss.ndim == 1 else -loss.flatten(1).sum(1)

    def _weights_like(self, logits: Tensor) -> Tensor:
        """The weights of the classes, [C]; a few are filled in, since a GPU would wait for the host's copy of them."""
        weights = self.class_weights or ()
        if len(weights) > FILLED_IN:
            return logits.new_tensor(weights)
        return torch.stack([torch.full((), w, dtype=logits.dtype, device=logits.device) for w in weights])

    def baseline(self, targets: Tensor) -> float:
        """The entropy of the labels' own frequencies, each class counted by its weight."""
        labels = self._labels(targets)
        counts = torch.bincount(labels[self._kept(labels)].long()).double()
        if self.class_weights is not None:
            counts = counts * counts.new_tensor(self.class_weights[: len(counts)])
        return float(torch.special.xlogy(counts, counts / counts.sum()).sum()) / len(targets)

    def _probs_and_weight(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities [B, ..., C] and the root of each position's weight in the likelihood, [B, ...]."""
        p = outputs.movedim(self.class_axis, -1).softmax(-1)
        labels = self._labels(targets)
        counted = self._kept(labels)
        weight = counted.to(p.dtype)
        if self.class_weights is not None:
            weight = weight * p.new_tensor(self.class_weights)[labels.long() * counted]
        return p, weight.sqrt()

    @property
    def output_axis(self) -> int:
        """The axis of the outputs on which the classes are."""
        return self.class_axis

    def fisher_factor(self, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Tensor:
        """R = diag(r) Q with r = sqrt(p) and Q a basis of what is orthogonal to r, exact: R R^T = diag(p) - p p^T.

        Q is all but the first column of the Householder reflection I - u u^T / (1 + r_1), u = r + e_1, that takes r to
        -e_1: there is no direction for a shift of all logits, so [B, ..., C, C - 1] is enough.
        """
        p, root_weight = self._probs_and_weight(outputs, targets)
        r = p.sqrt()
        u = torch.cat([r[..., :1] + 1, r[..., 1:]], -1)
        reflection = torch.eye(p.shape[-1], dtype=p.dtype, device=p.device) - (
            u.unsqueeze(-1) * (u / (1 + r[..., :1])).unsqueeze(-2)
        )
        return r.unsqueeze(-1) * reflection[..., 1:] * root_weight[..., None, None]

    def fisher_rank(self, outputs: Tensor) -> int:
        """One less than there are classes."""
        return outputs.shape[self.class_axis] - 1

    def fisher_columns(self, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Iterator[Tensor]:
        """The columns of R, which has C - 1 of them, each [B, ..., C]: r (e_k - u r_k / (1 + r_1))."""
        p, root_weight = self._probs_and_weight(outputs, targets)
        r = p.sqrt()
        u = torch.cat([r[..., :1] + 1, r[..., 1:]], -1)
        scaled = u / (1 + r[..., :1])
        for k in range(1, p.shape[-1]):
            reflected = -(u * scaled[..., k : k + 1])
            reflected[..., k] += 1
            yield r * reflected * root_weight.unsqueeze(-1)

    def fisher_diagonal(self, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Tensor:
        """The product p (1 - p), weighted, [B, C]; 1 - p from the logarithm, which has it where p is near 1."""
        p, root_weight = self._probs_and_weight(outputs, targets)
        others = -torch.expm1(_log_softmax(outputs.movedim(self.class_axis, 1)))
        return p * others * root_weight.square().unsqueeze(-1)

    def fisher_sum(self, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Tensor:
        """diag(p) - p p^T, weighted and summed over rows, [C, C]."""
        p, root_weight = self._probs_and_weight(outputs, targets)
        weighted = p * root_weight.unsqueeze(-1)
        total = -(weighted.T @ weighted)
        # The rows of F sum to 0, which says the diagonal better than p - p^2 where p is near 1.
        total.diagonal().zero_()
        total.diagonal().copy_(-total.sum(1))
        return total

    def fisher_trace(self, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Tensor:
        """1 - sum p^2, weighted, summed over the positions of a row."""
        p, root_weight = self._probs_and_weight(outputs, targets)
        traces = root_weight.square() * (1 - p.square().sum(-1)).clamp_min(0)
        return traces.unsqueeze(-1).flatten(1).sum(1)

    def sample_noise(self, outputs: Tensor, targets: Tensor, hyper: Hyper, rng: torch.Generator) -> Tensor:
        """sqrt(p) e - p (sqrt(p) . e) without forming R."""
        p, root_weight = self._probs_and_weight(outputs, targets)
        scaled = p.sqrt() * standard_normal(p, rng)
        noise = (scaled - p * scaled.sum(-1, keepdim=True)) * root_weight.unsqueeze(-1)
        return noise.movedim(-1, self.class_axis)

    def predictive(self, outputs: Tensor, hyper: Hyper) -> CategoricalPredictive:
        """Softmax of logits / temperature for each draw."""
        logits = outputs.movedim(self.class_axis + 1 if self.class_axis > 0 else self.class_axis, -1)
        log_probs = (logits / temperature(hyper, logits)).log_softmax(-1)
        return CategoricalPredictive(log_probs, self.ignore_index, bool(self.next_token))

    def closed_predictive(self, mean: Tensor, variance: Tensor, hyper: Hyper) -> CategoricalPredictive:
        """Softmax of every logit by the probit approximation: what is uncertain is not told from what is noise."""
        return self.predictive(probit(mean, variance, hyper).unsqueeze(0), hyper)


@dataclass(frozen=True)
class Bernoulli(NothingLearned, DiagonalFisher):
    """Yes or no: one logit for a binary target [B] or [B, 1], or one for each of several labels [B, K]."""

    kind: ClassVar[Kind] = "classification"
    tempered: ClassVar[bool] = True

    def check_targets(self, targets: Tensor) -> None:
        """Raise a ValueError unless targets are 0 or 1."""
        if not bool(((targets == 0) | (targets == 1)).all()):
            raise ValueError(
                f"Bernoulli needs targets 0 or 1, got {examples(targets[(targets != 0) & (targets != 1)])}: "
                "clean them, or use Categorical() for more than two classes"
            )

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise a ValueError unless there is one target, 0 or 1, for each logit."""
        self.check_targets(targets)
        check_shape("Bernoulli", outputs, targets)

    def log_prob(self, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Tensor:
        """Log probability of the targets, summed over the labels of a row."""
        targets = targets.reshape(outputs.shape).to(outputs.dtype)
        return -F.binary_cross_entropy_with_logits(outputs, targets, reduction="none").flatten(1).sum(1)

    def baseline(self, targets: Tensor) -> float:
        """The entropy of each label's own frequency."""
        rows = by_output(targets)
        share = rows.mean(0)
        per_position = (torch.special.xlogy(share, share) + torch.special.xlogy(1 - share, 1 - share)).sum()
        return float(per_position) * len(rows) / len(targets)

    def _fisher_root(self, outputs: Tensor, hyper: Hyper) -> Tensor:
        """F = p (1 - p)."""
        return (outputs.sigmoid() * (-outputs).sigmoid()).sqrt()

    def predictive(self, outputs: Tensor, hyper: Hyper) -> BernoulliPredictive:
        """Sigmoid of logits / temperature for each draw."""
        return BernoulliPredictive(outputs / temperature(hyper, outputs))

    def closed_predictive(self, mean: Tensor, variance: Tensor, hyper: Hyper) -> BernoulliPredictive:
        """Sigmoid of the logit by the probit approximation: what is uncertain is not told from what is noise."""
        return self.predictive(probit(mean, variance, hyper).unsqueeze(0), hyper)


def _log_softmax(logits: Tensor) -> Tensor:
    """Over axis 1; a CPU works on many rows of few classes three times as fast when the rows are the last axis."""
    if logits.device.type == "cpu" and logits.ndim == 2 and logits.shape[1] < 32 and len(logits) >= 128:
        return F.log_softmax(logits.t().contiguous(), 0).t()
    return F.log_softmax(logits, 1)
