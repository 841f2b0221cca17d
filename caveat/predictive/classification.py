"""Predictions of classes: one of several, or yes and no."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from caveat.predictive.calibration import Calibration, Conformity, Kind, label_scores, scrambled
from caveat.predictive.named_columns import prediction_frame, prediction_html
from caveat.predictive.next_labels import next_labels
from caveat.predictive.protocol import log_mean_exp, prediction_line, row_numbers, shaped

__all__ = ["BernoulliPredictive", "CategoricalPredictive"]


@dataclass(frozen=True, repr=False)
class CategoricalPredictive:
    """One of C classes a row (or a pixel, or a position of a sequence)."""

    log_samples: Tensor  # [S, B, ..., C] log probabilities of each draw
    ignore_index: int = -100
    next_token: bool = False  # whether a position's target is the label of the next position
    calibration: Calibration | None = None
    kind: ClassVar[Kind] = "classification"

    def __repr__(self) -> str:
        return prediction_line(self)

    def _repr_html_(self) -> str:
        return prediction_html(self)

    def to_frame(self, class_names: Sequence[str] = ()) -> Any:
        """A frame of pandas, one row a decision: what is predicted, its probability, those of all, the uncertainty."""
        return prediction_frame(self, class_names, ())

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
        return _mean_entropy(self.log_samples)

    @cached_property
    def epistemic(self) -> Tensor:
        """Mutual information of label and weights, mean_s KL(p_s || probs): how much the draws disagree."""
        return _disagreement(self.log_samples, self._log_probs)

    def decomposed(self) -> tuple[Tensor, Tensor, Tensor]:
        """Probabilities, aleatoric and epistemic, of which nothing is kept: for tracing."""
        log_probs = log_mean_exp(self.log_samples)
        return log_probs.exp(), _mean_entropy(self.log_samples), _disagreement(self.log_samples, log_probs)

    def decisions(self, targets: Tensor) -> Tensor:
        """The label that each position is scored by, [B, ...]: the target there, or that of the next position."""
        targets = shaped(targets, self.log_samples.shape[1:-1]).long()
        return next_labels(targets, self.ignore_index) if self.next_token else targets

    def log_prob(self, targets: Tensor) -> Tensor:
        """Log probability of each target; 0 where the target is ignored."""
        ignored, index = self._class_index(targets)
        return self._log_probs.gather(-1, index).squeeze(-1).masked_fill(ignored, 0.0)

    def log_prob_by_draw(self, targets: Tensor) -> Tensor:
        """Log probability of each target that is not ignored under each draw, one row a decision: [N, S]."""
        ignored, index = self._class_index(targets)
        return self.log_samples.gather(-1, index.expand(len(self.log_samples), *index.shape)).squeeze(-1)[:, ~ignored].T

    def _class_index(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Which targets are ignored, [B, ...], and the class of each, [B, ..., 1]."""
        targets = self.decisions(targets)
        ignored, classes = targets == self.ignore_index, self.log_samples.shape[-1]
        wrong = targets[~ignored & ((targets < 0) | (targets >= classes))]
        if wrong.numel():
            raise ValueError(f"a label is {int(wrong[0])}, but there are {classes} classes (labels 0 to {classes - 1})")
        return ignored, targets.masked_fill(ignored, 0).unsqueeze(-1)

    def label_set(self, level: float = 0.9, *, seed: int = 0) -> Tensor:
        """Which labels are in the set that holds the right one with probability `level`, [B, ..., C] of yes and no.

        After `posterior.calibrate` that is so of rows like those of calibration. A randomised set may then be empty:
        where more than `level` of the first guesses are right, a set that is never empty is right too often. Its chance
        is of the seed, the row's place and its prediction, so that rows may be asked for one by one. Without a
        calibration these are the fewest labels that the posterior gives `level` of the probability to.
        """
        if self.calibration is None:
            return _credible_set(self.probs, level)
        bound = self.calibration.bound(level).to(self.probs.device)[0]
        return _within(self._log_probs, self.calibration, bound, seed)

    def calibration_scores(self, targets: Tensor, like: Conformity, rng: torch.Generator) -> Tensor:
        """How badly each target fits its prediction, [N, 1], as `like` scores it; ignored ones are left out."""
        labels = self.decisions(targets)
        self.log_prob(targets)  # refuses labels that there are not
        counted = labels != self.ignore_index
        scores = label_scores(self._log_probs, like, _uniform(labels, rng))
        return scores[counted].gather(-1, labels[counted].unsqueeze(-1))

    def columns(self, targets: Tensor | None = None) -> dict[str, Tensor]:
        """Probabilities and their decomposition, one row a decision; ignored targets are left out."""
        table = {
            "rows": row_numbers(self.entropy),
            "probs": self.probs.flatten(0, -2),
            "entropy": self.entropy.flatten(),
            "aleatoric": self.aleatoric.flatten(),
            "epistemic": self.epistemic.flatten(),
        }
        if self.calibration is not None:
            table["set_90"] = self.label_set(0.9).flatten(0, -2)
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
    calibration: Calibration | None = None
    kind: ClassVar[Kind] = "classification"

    def __repr__(self) -> str:
        return prediction_line(self)

    def _repr_html_(self) -> str:
        return prediction_html(self)

    def to_frame(self, class_names: Sequence[str] = ()) -> Any:
        """A frame of pandas, one row a decision: what is predicted, its probability, those of all, the uncertainty."""
        return prediction_frame(self, class_names, ())

    @cached_property
    def _both(self) -> CategoricalPredictive:
        return _no_and_yes(self.logits)

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

    def decomposed(self) -> tuple[Tensor, Tensor, Tensor]:
        """The probability of yes, aleatoric and epistemic, of which nothing is kept: for tracing."""
        probs, aleatoric, epistemic = _no_and_yes(self.logits).decomposed()
        return probs[..., 1], aleatoric, epistemic

    def log_prob(self, targets: Tensor) -> Tensor:
        """Log probability of each target (one a label)."""
        return self._both.log_prob(targets)

    def label_set(self, level: float = 0.9, *, seed: int = 0) -> Tensor:
        """Whether no, and whether yes, is in the set that holds the answer with probability `level`, [B, ..., 2].

        Each of several labels has a set and a calibration of its own; see `CategoricalPredictive.label_set`.
        """
        if self.calibration is None:
            return self._both.label_set(level)
        bound = self.calibration.bound(level).to(self.logits.device)
        return _within(self._both._log_probs, self.calibration, bound.unsqueeze(-1), seed)

    def calibration_scores(self, targets: Tensor, like: Conformity, rng: torch.Generator) -> Tensor:
        """How badly each target fits its prediction, as `like` scores it, [N, K]: one for each label of a row."""
        scores = self._both.calibration_scores(targets, like, rng)
        return scores.reshape(-1, self.logits.shape[-1] if self.logits.ndim > 2 else 1)

    def log_prob_by_draw(self, targets: Tensor) -> Tensor:
        """Log probability of each target under each draw, one row a label: [N, S]."""
        return self._both.log_prob_by_draw(targets)

    def columns(self, targets: Tensor | None = None) -> dict[str, Tensor]:
        """Probabilities of no and yes and their decomposition, one row a label."""
        table = self._both.columns(targets)
        return table if self.calibration is None else table | {"set_90": self.label_set(0.9).flatten(0, -2)}


def _no_and_yes(logits: Tensor) -> CategoricalPredictive:
    """The two classes that a logit stands for."""
    log_sigmoid = torch.nn.functional.logsigmoid
    return CategoricalPredictive(torch.stack([log_sigmoid(-logits), log_sigmoid(logits)], -1))


def _mean_entropy(log_samples: Tensor) -> Tensor:
    return -_expected(log_samples, log_samples).mean(0)


def _disagreement(log_samples: Tensor, log_probs: Tensor) -> Tensor:
    """The mean over draws of KL(p_s || p)."""
    log_ratio = (log_samples - log_probs).clamp_min(torch.finfo(log_samples.dtype).min)
    # KL = sum_c p_c (r log r - r + 1) with r = p_s / p: no term is negative, so that small ones are not lost.
    divergence = log_ratio.exp() * log_ratio - log_ratio.expm1()
    return _expected(log_probs, divergence.clamp_min(0)).mean(0)  # rounding may leave -1e-17


def _expected(log_probs: Tensor, values: Tensor) -> Tensor:
    """Sum over classes of p * value; a class of probability zero adds nothing, whatever its value."""
    p = log_probs.exp()
    return (p * values).where(p > 0, 0.0).sum(-1)


def _within(log_probs: Tensor, calibration: Calibration, bound: Tensor, seed: int) -> Tensor:
    """The labels whose score is at most a bound, and without chance the most probable one, so that no set is empty."""
    drawn = _uniform(log_probs[..., 0], torch.Generator().manual_seed(seed))
    u = (drawn + scrambled(log_probs)) % 1.0  # of a row's own: rows that are asked for one by one share the seed
    inside = label_scores(log_probs, calibration.conformity, u) <= bound
    if calibration.conformity.randomised or calibration.conformity.score == "probability":
        return inside
    return inside.scatter(-1, log_probs.argmax(-1, keepdim=True), True)


def _credible_set(probs: Tensor, level: float) -> Tensor:
    """The fewest labels that have `level` of the probability together, the most probable first."""
    if not 0 < level < 1:
        raise ValueError(f"label_set(level={level!r}): must be above 0 and below 1, such as 0.9 for 90%")
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    return torch.empty_like(order, dtype=torch.bool).scatter_(-1, order, ordered.cumsum(-1) - ordered < level)


def _uniform(like: Tensor, rng: torch.Generator) -> Tensor:
    """Uniform numbers of a shape, float64."""
    return torch.rand(like.shape, generator=rng, dtype=torch.float64).to(like.device)
