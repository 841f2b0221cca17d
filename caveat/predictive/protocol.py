"""What every prediction offers, and what all of them share."""

import math
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from caveat.predictive.calibration import Conformity, Kind

__all__ = ["Kind", "Predictive"]


class Predictive(Protocol):
    """What every prediction offers."""

    kind: ClassVar[Kind]

    @property
    def samples(self) -> Tensor:
        """Probabilities or means of each draw, sample axis first."""

    @property
    def aleatoric(self) -> Tensor:
        """The part of the uncertainty that more data would not remove."""

    @property
    def epistemic(self) -> Tensor:
        """The part of the uncertainty that comes from not knowing the weights."""

    def decomposed(self) -> tuple[Tensor, Tensor, Tensor]:
        """The mean (of classes the probabilities), aleatoric and epistemic, of which nothing is kept: for tracing."""

    def log_prob(self, targets: Tensor) -> Tensor:
        """Log density of targets under the mixture, one number a class label or row of real targets."""

    def columns(self, targets: Tensor | None = None) -> dict[str, Tensor]:
        """Everything per decision, as flat columns."""

    def calibration_scores(self, targets: Tensor, like: Conformity, rng: torch.Generator) -> Tensor:
        """How badly each target fits its prediction, as `like` scores it, [N, D]; for `posterior.calibrate`."""


def log_mean_exp(values: Tensor) -> Tensor:
    """The logarithm of the mean over draws of exp(values), [S, ...] -> [...]."""
    return values.logsumexp(0) - math.log(len(values))


def shaped(targets: Tensor, shape: torch.Size) -> Tensor:
    """Targets of the shape predicted; a last axis of one may be missing."""
    if targets.shape != shape and (*targets.shape, 1) != tuple(shape):
        raise ValueError(f"predictions of shape {tuple(shape)} need targets of that shape, got {tuple(targets.shape)}")
    return targets.reshape(shape)


def row_numbers(per_decision: Tensor) -> Tensor:
    """The row of the batch that each decision of [B, ...] belongs to, flat: a row may hold several."""
    rows = torch.arange(len(per_decision), device=per_decision.device)
    return rows.repeat_interleave(per_decision[0].numel() if len(per_decision) else 1)


def prediction_line(prediction: Predictive) -> str:
    """What a prediction shows of itself: how many draws, and the shape of one."""
    draws, *shape = prediction.samples.shape
    return f"{type(prediction).__name__}({draws} draws of shape {shape})"
