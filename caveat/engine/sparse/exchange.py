"""What an exchange of weights is: some are removed and as many others added while all of them are trained.

    before a step    exchange.begin(step, batch)     looks at gradients where an exchange is near
    after it         exchange.finish(moments)        exchanges, where it is time

Which weights there are (their places, or the channels that they belong to) is the exchange's own affair; what training
needs of it is this protocol. A `Schedule` (`densities`) says when an exchange is due.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from caveat.batches import Inputs
from caveat.engine.sparse.accounting import FlopsByCounts
from caveat.engine.training import Moments
from caveat.network import Network, Params

__all__ = ["Exchange", "NoExchange", "StepBatch"]


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
