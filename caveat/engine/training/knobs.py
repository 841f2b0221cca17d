"""Every knob of training, in one place, for all methods that train."""

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Literal

from caveat.knobs import Count, NonNegative, NonNegativeInt, Positive, Share, check_knobs

__all__ = ["ADAM", "Descent", "Training"]

LEAST_STEPS = 2000  # of training whose length nobody gave: below 2,500 rows 100 epochs of 128 rows a step have fewer

Optimizer = Literal["sgd", "adam", "adamw"]
Schedule = Literal["constant", "cosine", "step", "onecycle"]


@dataclass(frozen=True)
class Training:
    """Every knob of training, shared by all methods that train.

    Knobs that go together are None unless they are given, and None is the method's own: Adam's .003 would be no rate
    for the SGD of `SWAG`, so `SWAG(training=Training(epochs=10))` is ten epochs of SWAG's own SGD. Most methods have
    Adam's, which are named below.
    """

    # Passes over the training data; 0 leaves the weights as they are. None: 100, or as many as make 2,000 steps.
    epochs: NonNegativeInt | None = None
    batch_size: Count | None = None  # rows a step; the loader's own unless given
    optimizer: Optimizer | None = None  # sgd is Nesterov's; adamw decays decoupled, which is not MAP. None: "adam"
    learning_rate: Positive | None = None  # at its highest. None: 0.003
    momentum: Share = 0.9  # of sgd
    schedule: Schedule | None = None  # of the learning rate. None: "cosine"
    # Share of the steps over which the learning rate rises from zero (onecycle has its own). None: 0.05
    warmup: Share | None = None
    milestones: tuple[Share, ...] = (0.5, 0.75)  # shares of training at which "step" divides the learning rate by ten
    clip: NonNegative | None = None  # largest norm of the gradient of the loss; 0 does not clip. None: 0
    patience: NonNegativeInt = 0  # epochs without a better validation loss before stopping; 0 never stops early
    precision: Literal["float32", "bfloat16"] = "float32"  # of the forward pass; weights stay as they are
    channels_last: bool = False  # memory format of images and filters, faster on a GPU
    compile: bool = False  # let torch.compile fuse the forward and backward pass

    def __post_init__(self) -> None:
        check_knobs(self)

    def filled(self, own: "Training") -> "Training":
        """These knobs, with a method's own for those that are None."""
        missing = [field.name for field in fields(own) if getattr(self, field.name) is None]
        return replace(self, **{name: getattr(own, name) for name in missing})

    @property
    def descent(self) -> "Descent":
        """The knobs that go together, Adam's where they are None."""
        given = {field.name: getattr(self, field.name) for field in fields(Descent)}
        return Descent(**{name: value for name, value in given.items() if value is not None})

    def epochs_for(self, steps_of_an_epoch: int) -> int:
        """How many epochs there are, given how many steps one has: as asked for, or enough to arrive somewhere."""
        return max(100, math.ceil(LEAST_STEPS / steps_of_an_epoch)) if self.epochs is None else self.epochs

    def rate(self, progress: float) -> float:
        """The learning rate, as a share of its highest, after a share of training."""
        return self.descent.rate(progress, self.milestones)


@dataclass(frozen=True)
class Descent:
    """How weights are moved: the knobs of `Training` that go together, with values that suit most networks."""

    optimizer: Optimizer = "adam"
    learning_rate: float = 3e-3
    schedule: Schedule = "cosine"
    warmup: float = 0.05
    clip: float = 0.0

    def rate(self, progress: float, milestones: tuple[float, ...]) -> float:
        """The learning rate, as a share of its highest, after a share of training; "step" has milestones."""
        schedule, warmup = self.schedule, self.warmup
        if schedule == "onecycle":
            rising = 0.3
            if progress < rising:
                return 0.04 + 0.96 * 0.5 * (1 - math.cos(math.pi * progress / rising))
            return 0.5 * (1 + math.cos(math.pi * (progress - rising) / (1 - rising)))
        if progress < warmup:
            return progress / warmup
        if schedule == "cosine":
            return 0.5 * (1 + math.cos(math.pi * (progress - warmup) / max(1 - warmup, 1e-9)))
        if schedule == "step":
            return 0.1 ** sum(progress >= milestone for milestone in milestones)
        return 1.0


ADAM = Training(**asdict(Descent()))  # what methods have that have no values of their own
