"""What an exchange of weights is: some are removed and as many others added while all of them are trained.

    before a step    exchange.begin(step, batch)     looks at gradients where an exchange is near
    after it         exchange.finish(moments)        exchanges, where it is time

Which weights there are (their places, or the channels that they belong to) is the exchange's own affair; what training
needs of it is this protocol. The exchanges of a training are spaced by a `Schedule`:

    rate(t) = initial / 2 (1 + cos(pi t / stop)),   every `interval` steps, t = the share of training that is over
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from caveat.batches import Inputs
from caveat.engine.sparse.accounting import FlopsByCounts
from caveat.engine.sparse.densities import replacement_rate
from caveat.engine.sparse.weight_layout import WeightLayout
from caveat.engine.training import Moments
from caveat.network import Network, Params

__all__ = ["ActiveWeights", "Exchange", "NoExchange", "Schedule", "StepBatch"]


@dataclass(frozen=True)
class ActiveWeights:
    """The weights of all sparse layers, one after the other, that training and exchanges change in place."""

    mean: Tensor  # [size]: means of Gaussians, or point weights
    log_std: Tensor | None = None  # [size]: logarithms of standard deviations; None for points

    def variance(self) -> Tensor | None:
        """The variance of every weight, [size]; None for points."""
        return None if self.log_std is None else (2 * self.log_std).exp()

    def new_log_std(self, layout: WeightLayout, new_std: float | None) -> Tensor:
        """Log standard deviations of weights that are added to each layer, [layers]; its mean unless given."""
        assert self.log_std is not None
        parts = [part.mean() for _, part in layout.split(self.log_std.detach().exp())]
        means = torch.stack(parts).log()
        return means if new_std is None else torch.full_like(means, math.log(new_std))


@dataclass(frozen=True)
class Schedule:
    """When weights are exchanged, and which share of them."""

    interval: int  # steps from one exchange to the next
    initial: float  # share exchanged at first; it falls as a half cosine
    stop: float  # share of training after which nothing is exchanged
    steps: int  # of the whole training

    def rate(self, step: int) -> float:
        """The share of the weights that is exchanged after this step, counted from 0."""
        return replacement_rate((step + 1) / self.steps, self.initial, self.stop)

    def due(self, step: int) -> bool:
        """Whether there is an exchange after this step, counted from 0."""
        return (step + 1) % self.interval == 0 and self.rate(step) > 0


@dataclass(frozen=True)
class StepBatch:
    """What an exchange may ask of the batch of a step."""

    x: Inputs
    loss: Callable[[Tensor], Tensor]  # -log likelihood over N, of outputs for these inputs
    pass_at_the_means: Callable[[], None]  # forward and back without noise; layers give gradients to their collectors


class Exchange(Protocol):
    """What changes which weights there are while they are trained."""

    @property
    def rows_of_each_rank(self) -> int:
        """The rows that every rank must have in every batch."""

    @property
    def sums(self) -> Params:
        """What batches before the next exchange have added up, by layer: a checkpoint keeps it as it is then."""

    def begin(self, step: int, batch: StepBatch) -> None:
        """Before a step, counted from 0: find out what an exchange after it takes, where one is near."""

    def finish(self, moments: Moments) -> bool:
        """After a step: exchange in place, the optimiser's moments with the weights; returns whether it was time."""

    def state(self) -> Params:
        """What a checkpoint keeps beside the weights and their layout: tensors that follow every exchange in place."""

    def take_up(self) -> None:
        """Go on from the values that `state` has now, which may have come from a file or from the best epoch."""

    def flops(self, network: Network, example: Inputs) -> FlopsByCounts | None:
        """Operations of a training step, by the number of each layer's weights; None where these numbers stay."""


class NoExchange:
    """The weights that there are stay."""

    rows_of_each_rank = 0

    def __init__(self) -> None:
        self.sums: Params = {}
        self._exchanges = torch.zeros(2, dtype=torch.int64)

    def begin(self, step: int, batch: StepBatch) -> None:
        """Nothing to find out."""

    def finish(self, moments: Moments) -> bool:
        """Nothing to exchange."""
        return False

    def state(self) -> Params:
        """As that of an exchange that never was due."""
        return {"exchanges": self._exchanges}

    def take_up(self) -> None:
        """Nothing to follow."""

    def flops(self, network: Network, example: Inputs) -> None:
        """The numbers of weights stay."""
        return None
