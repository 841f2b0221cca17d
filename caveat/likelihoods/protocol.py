"""What every likelihood offers, and what several of them share."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from caveat.predictive import Kind, Predictive

__all__ = ["DiagonalFisher", "Hyper", "Likelihood", "NothingLearned", "TargetFault", "fisher_columns", "fisher_rank",
           "learned_noise"]  # fmt: skip

Hyper = dict[str, Tensor]


class TargetFault(ValueError):  # noqa: N818 - the name says what is wrong
    """A target that a likelihood cannot take: that of `row`, from 0 among the targets it was given."""

    def __init__(self, message: str, row: int) -> None:
        super().__init__(message.format(row=row))
        self.message, self.row = message, row

    def numbered(self, row: int) -> "TargetFault":
        """The same fault, with the row's number in the whole of the data."""
        return TargetFault(self.message, row)


class Likelihood(Protocol):
    """What a method may ask of a likelihood; outputs and targets carry the batch axis first."""

    kind: ClassVar[Kind]
    tempered: ClassVar[bool]  # whether hyper["temperature"] has a meaning

    @property
    def output_axis(self) -> int:
        """The axis of the outputs whose entries belong to one target; the others are rows and positions."""

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise a ValueError when the shapes, types or values do not fit."""

    def check_targets(self, targets: Tensor) -> None:
        """Raise a ValueError when targets alone are of the wrong type or not finite."""

    def initial_hyper(self, targets: Tensor) -> Hyper:
        """Starting values of what is learned, and the units of the targets."""

    def fitted_hyper(self, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Hyper:
        """The maximum-likelihood values given outputs: what a trained network's own noise is."""

    def log_prob(self, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Tensor:
        """Log likelihood of each row, [B], in the outputs' type."""

    def baseline(self, targets: Tensor) -> float:
        """Mean log likelihood of a row under the best prediction that is the same for all rows and positions."""

    def fisher_factor(self, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Tensor:
        """R with R R^T = Fisher information of the outputs, [B, ..., C, rank]."""

    def fisher_trace(self, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Tensor:
        """The trace of the Fisher information of each row's outputs, [B]."""

    def sample_noise(self, outputs: Tensor, targets: Tensor, hyper: Hyper, rng: torch.Generator) -> Tensor:
        """R e with e standard normal: noise of the outputs' shape whose covariance is the Fisher information."""

    def predictive(self, outputs: Tensor, hyper: Hyper) -> Predictive:
        """The prediction from outputs [S, B, ...] of S draws."""

    def closed_predictive(self, mean: Tensor, variance: Tensor, hyper: Hyper) -> Predictive:
        """The prediction from the mean and variance of Gaussian outputs, [B, ...] each, without draws."""


class NothingLearned:
    """Likelihoods without hyperparameters."""

    def initial_hyper(self, targets: Tensor) -> Hyper:
        """Nothing to learn."""
        return {}

    def fitted_hyper(self, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Hyper:
        """Nothing to learn."""
        return hyper


class FisherByColumns(ABC):
    """Likelihoods that give R one column after the other: of C outputs all of them take C^2 numbers a row."""

    @abstractmethod
    def fisher_rank(self, outputs: Tensor) -> int:
        """How many columns R has at each position."""

    @abstractmethod
    def fisher_columns(self, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Iterator[Tensor]:
        """The columns of R at all positions, each [B, ..., C], as `fisher_factor` has them."""

    @abstractmethod
    def fisher_diagonal(self, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Tensor:
        """The diagonal of F of every row, for outputs [B, C]."""

    @abstractmethod
    def fisher_sum(self, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Tensor:
        """F summed over rows, [C, C], for outputs [B, C]; without F of any row."""


def fisher_rank(likelihood: Likelihood, outputs: Tensor, targets: Tensor, hyper: Hyper) -> int:
    """How many columns the factor of a row's Fisher information has, all positions together."""
    if isinstance(likelihood, FisherByColumns):
        positions = outputs[0].numel() // outputs.shape[likelihood.output_axis]
        return positions * likelihood.fisher_rank(outputs)
    shape = likelihood.fisher_factor(outputs[:1], targets[:1], hyper).shape
    return math.prod(shape[1:-2]) * shape[-1]


def fisher_columns(likelihood: Likelihood, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Iterator[Tensor]:
    """The columns of R of all rows, position by position, each in the outputs' shape [B, ...]."""
    axis = likelihood.output_axis
    positions = math.prod(outputs.movedim(axis, -1).shape[1:-1])
    for position in range(positions):
        if isinstance(likelihood, FisherByColumns):
            columns = likelihood.fisher_columns(outputs, targets, hyper)
        else:
            columns = iter(likelihood.fisher_factor(outputs, targets, hyper).unbind(-1))
        for column in columns:  # [B, ..., C]
            v = column
            if positions > 1:
                v = torch.zeros_like(column).flatten(1, -2)
                v[:, position] = column.flatten(1, -2)[:, position]
            yield v.reshape(column.shape).movedim(-1, axis)


class DiagonalFisher(FisherByColumns):
    """Likelihoods whose outputs carry information independently: R is diagonal."""

    output_axis: ClassVar[int] = -1

    @abstractmethod
    def _fisher_root(self, outputs: Tensor, hyper: Hyper) -> Tensor:
        """The diagonal of R, shaped as the outputs."""

    def fisher_factor(self, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Tensor:
        """R as a diagonal matrix, [B, ..., D, D]."""
        return torch.diag_embed(self._fisher_root(outputs, hyper))

    def fisher_rank(self, outputs: Tensor) -> int:
        """One column for each output."""
        return outputs.shape[-1]

    def fisher_columns(self, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Iterator[Tensor]:
        """One output after the other."""
        root = self._fisher_root(outputs, hyper)
        for k in range(root.shape[-1]):
            column = torch.zeros_like(root)
            column[..., k] = root[..., k]
            yield column

    def fisher_diagonal(self, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Tensor:
        """The squares of R."""
        return self._fisher_root(outputs, hyper).square()

    def fisher_sum(self, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Tensor:
        """A diagonal matrix."""
        return self.fisher_diagonal(outputs, targets, hyper).sum(0).diag()

    def fisher_trace(self, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Tensor:
        """The sum of R's squares, [B]."""
        return self._fisher_root(outputs, hyper).square().flatten(1).sum(1)

    def sample_noise(self, outputs: Tensor, targets: Tensor, hyper: Hyper, rng: torch.Generator) -> Tensor:
        """R e with e standard normal, [B, ...], without forming R."""
        return self._fisher_root(outputs, hyper) * standard_normal(outputs, rng)


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """The shape of a tensor as a tuple, which messages print without torch's name."""
    return tuple(tensor.shape)


def examples(values: Tensor) -> str:
    """The first three of some values [n] in words, and how many there are where there are more."""
    shown = ", ".join(f"{float(value):g}" for value in values[:3])
    return f"{shown}, ... ({len(values)} such)" if len(values) > 3 else shown


def by_output(targets: Tensor) -> Tensor:
    """Rows and positions by outputs, [N, D], float64; targets [B] are one output."""
    return targets.reshape(-1, targets.shape[-1] if targets.ndim > 1 else 1).double()


def check_shape(name: str, outputs: Tensor, targets: Tensor, per_target: int = 1) -> None:
    """Raise a ValueError unless there are `per_target` outputs for each target: [B, ..., D] for targets [B, ...]."""
    positions, width = (targets.shape[:-1], targets.shape[-1]) if targets.ndim > 1 else (targets.shape, 1)
    wanted = (*positions, per_target * width)
    if shape_of(outputs) != wanted:
        count = "one output" if per_target == 1 else "two outputs, a mean and a log variance,"
        raise ValueError(
            f"{name} needs {count} for each target: targets {shape_of(targets)} need outputs {wanted}, "
            f"got {shape_of(outputs)}: change the network's last layer, or reshape the targets"
        )


def standard_normal(like: Tensor, rng: torch.Generator) -> Tensor:
    """Standard normal numbers in the shape, type and place of a tensor, drawn on the generator's device."""
    return torch.randn(like.shape, generator=rng, dtype=like.dtype, device=rng.device).to(like.device)


def per_draw(value: Tensor, outputs: Tensor, base: int) -> Tensor:
    """A hyperparameter of `base` axes, with or without a draw axis, shaped to broadcast to outputs [S, B, ..., D]."""
    if value.ndim > base:
        value = value.reshape(len(value), *[1] * (outputs.ndim - 1 - base), *value.shape[1:])
    return value.to(outputs)


def temperature(hyper: Hyper, outputs: Tensor) -> Tensor:
    """The temperature, 1 where none was tuned, shaped to broadcast to outputs [S, B, ...]."""
    return per_draw(hyper.get("temperature", torch.ones(())), outputs, base=0)


def within_range(values: Tensor) -> Tensor:
    """Off zero and infinity, where the exponential of an extreme output ends, with room to sum over draws."""
    limits = torch.finfo(values.dtype)
    return values.clamp(limits.tiny, limits.max**0.9)


def learned_noise(likelihood: Likelihood, hyper: Hyper) -> Tensor | None:
    """The logarithm of the noise, where the likelihood learns one; None where it has none, or was given it."""
    return hyper.get("log_noise") if getattr(likelihood, "noise", None) is None else None
