"""Predictions of classes: one of several, or yes and no."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from caveat.predictive.next_labels import next_labels
from caveat.predictive.protocol import Kind, log_mean_exp, prediction_line, row_numbers, shaped

__all__ = ["BernoulliPredictive", "CategoricalPredictive"]


@dataclass(frozen=True, repr=False)
class CategoricalPredictive:
    """One of C classes a row (or a pixel, or a position of a sequence)."""

    log_samples: Tensor  # [S, B, ..., C] log probabilities of each draw
    ignore_index: int = -100
    next_token: bool = False  # whether a position's target is the label of the next position
    kind: ClassVar[Kind] = "classification"

    def __repr__(self) -> str:
        return prediction_line(self)

    @property
    def samples(self) -> Tensor:
        """Class probabilities of each draw, [S, B, ..., C]."""
        return self.log_samples.exp()

    @cached_property
    def _log_probs(self) -> Tensor:
        return log_mean_exp(self.log_samples)

    @cached_property
    def probs(self) -> Tensor:
        """Class probabilities, [B, ..., C]."""
        return self._log_probs.exp()

    @property
    def label(self) -> Tensor:
        """The most probable class, [B, ...]."""
        return self.probs.argmax(-1)

    @cached_property
    def entropy(self) -> Tensor:
        """Entropy of the prediction in nats: aleatoric + epistemic."""
        return -_expected(self._log_probs, self._log_probs)

    @cached_property
    def aleatoric(self) -> Tensor:
        """Mean entropy of the draws."""
        return -_expected(self.log_samples, self.log_samples).mean(0)

    @cached_property
    def epistemic(self) -> Tensor:
        """Mutual information of label and weights, mean_s KL(p_s || probs): how much the draws disagree."""
        log_ratio = (self.log_samples - self._log_probs).clamp_min(torch.finfo(self.log_samples.dtype).min)
        # KL = sum_c p_c (r log r - r + 1) with r = p_s / p: no term is negative, so that small ones are not lost.
        divergence = log_ratio.exp() * log_ratio - log_ratio.expm1()
        return _expected(self._log_probs, divergence.clamp_min(0)).mean(0)  # rounding may leave -1e-17

    def decisions(self, targets: Tensor) -> Tensor:
        """The label that each position is scored by, [B, ...]: the target there, or that of the next position."""
        targets = shaped(targets, self.log_samples.shape[1:-1]).long()
        return next_labels(targets, self.ignore_index) if self.next_token else targets

    def log_prob(self, targets: Tensor) -> Tensor:
        """Log probability of each target; 0 where the target is ignored."""
        targets = self.decisions(targets)
        ignored, classes = targets == self.ignore_index, self.log_samples.shape[-1]
        wrong = targets[~ignored & ((targets < 0) | (targets >= classes))]
        if wrong.numel():
            raise ValueError(f"a label is {int(wrong[0])}, but there are {classes} classes (labels 0 to {classes - 1})")
        index = targets.masked_fill(ignored, 0).unsqueeze(-1)
        return self._log_probs.gather(-1, index).squeeze(-1).masked_fill(ignored, 0.0)

    def columns(self, targets: Tensor | None = None) -> dict[str, Tensor]:
        """Probabilities and their decomposition, one row a decision; ignored targets are left out."""
        table = {
            "rows": row_numbers(self.entropy),
            "probs": self.probs.flatten(0, -2),
            "entropy": self.entropy.flatten(),
            "aleatoric": self.aleatoric.flatten(),
            "epistemic": self.epistemic.flatten(),
        }
        if targets is None:
            return table
        labels = self.decisions(targets).flatten()
        table |= {"targets": labels, "log_prob": self.log_prob(targets).flatten()}
        counted = labels != self.ignore_index
        return {name: column[counted] for name, column in table.items()}


@dataclass(frozen=True, repr=False)
class BernoulliPredictive:
    """Yes or no, for one label or for several independent ones."""

    logits: Tensor  # [S, B, ...] of each draw
    kind: ClassVar[Kind] = "classification"

    def __repr__(self) -> str:
        return prediction_line(self)

    @cached_property
    def _both(self) -> CategoricalPredictive:
        log_sigmoid = torch.nn.functional.logsigmoid
        return CategoricalPredictive(torch.stack([log_sigmoid(-self.logits), log_sigmoid(self.logits)], -1))

    @property
    def samples(self) -> Tensor:
        """Probability of yes in each draw, [S, B, ...]."""
        return self.logits.sigmoid()

    @property
    def probs(self) -> Tensor:
        """Probability of yes, [B, ...]."""
        return self._both.probs[..., 1]

    @property
    def label(self) -> Tensor:
        """1 where yes is the more probable answer."""
        return self._both.label

    @property
    def entropy(self) -> Tensor:
        """Entropy of the prediction in nats: aleatoric + epistemic."""
        return self._both.entropy

    @property
    def aleatoric(self) -> Tensor:
        """Mean entropy of the draws."""
        return self._both.aleatoric

    @property
    def epistemic(self) -> Tensor:
        """Mutual information of label and weights."""
        return self._both.epistemic

    def log_prob(self, targets: Tensor) -> Tensor:
        """Log probability of each target (one a label)."""
        return self._both.log_prob(targets)

    def columns(self, targets: Tensor | None = None) -> dict[str, Tensor]:
        """Probabilities of no and yes and their decomposition, one row a label."""
        return self._both.columns(targets)


def _expected(log_probs: Tensor, values: Tensor) -> Tensor:
    """Sum over classes of p * value; a class of probability zero adds nothing, whatever its value."""
    p = log_probs.exp()
    return (p * values).where(p > 0, 0.0).sum(-1)
