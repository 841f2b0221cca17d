"""Every knob of training, in one place, for all methods that train."""

import math
from dataclasses import dataclass
from typing import Literal

from caveat.knobs import Count, NonNegative, NonNegativeInt, Positive, Share, check_knobs

__all__ = ["Training"]

LEAST_STEPS = 2000  # of training whose length nobody gave: below 2,500 rows 100 epochs of 128 rows a step have fewer


@dataclass(frozen=True)
class Training:
    """Every knob of training, shared by all methods that train."""

    # Passes over the training data; 0 leaves the weights as they are. None: 100, or as many as make 2,000 steps.
    epochs: NonNegativeInt | None = None
    batch_size: Count | None = None  # rows a step; the loader's own unless given
    optimizer: Literal["sgd", "adam", "adamw"] = "adam"  # sgd is Nesterov's; adamw decays decoupled, which is not MAP
    learning_rate: Positive = 3e-3  # at its highest
    momentum: Share = 0.9  # of sgd
    schedule: Literal["constant", "cosine", "step", "onecycle"] = "cosine"  # of the learning rate
    warmup: Share = 0.05  # share of the steps over which the learning rate rises from zero (onecycle has its own)
    milestones: tuple[Share, ...] = (0.5, 0.75)  # shares of training at which "step" divides the learning rate by ten
    clip: NonNegative = 0.0  # largest norm of the gradient of the loss; 0 does not clip
    patience: NonNegativeInt = 0  # epochs without a better validation loss before stopping; 0 never stops early
    precision: Literal["float32", "bfloat16"] = "float32"  # of the forward pass; weights stay as they are
    channels_last: bool = False  # memory format of images and filters, faster on a GPU
    compile: bool = False  # let torch.compile fuse the forward and backward pass

    def __post_init__(self) -> None:
        check_knobs(self)

    def epochs_for(self, steps_of_an_epoch: int) -> int:
        """How many epochs there are, given how many steps one has: as asked for, or enough to arrive somewhere."""
        return max(100, math.ceil(LEAST_STEPS / steps_of_an_epoch)) if self.epochs is None else self.epochs

    def rate(self, progress: float) -> float:
        """The learning rate, as a share of its highest, after a share of training."""
        if self.schedule == "onecycle":
            rising = 0.3
            if progress < rising:
                return 0.04 + 0.96 * 0.5 * (1 - math.cos(math.pi * progress / rising))
            return 0.5 * (1 + math.cos(math.pi * (progress - rising) / (1 - rising)))
        if progress < self.warmup:
            return progress / self.warmup
        if self.schedule == "cosine":
            return 0.5 * (1 + math.cos(math.pi * (progress - self.warmup) / max(1 - self.warmup, 1e-9)))
        if self.schedule == "step":
            return 0.1 ** sum(progress >= milestone for milestone in self.milestones)
        return 1.0
