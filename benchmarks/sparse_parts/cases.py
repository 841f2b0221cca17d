"""The networks, and the ways to train them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

import caveat
from caveat import models

SPARSE = {"SSVI 90%": 0.1, "SSVI 95%": 0.05, "SSVI 99%": 0.01}  # densities
CHANNEL = {"SSVI channel 90%": 0.1, "SSVI channel 95%": 0.05}
PEERS = ("bayesian-torch Reparameterization", "bayesian-torch Flipout")
WAYS = ("deterministic", "dense VI", *PEERS, *SPARSE, *CHANNEL, "RigL 95%")


@dataclass(frozen=True)
class Case:
    """A network, the shape of a row, and the batch of a training step."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch: int


CASES = {
    "resnet18": Case(lambda: models.resnet18(), (3, 32, 32), 16),
    "mlp 784-300-300-10": Case(lambda: models.mlp(784, 10, hidden=(300, 300)), (784,), 128),
}


def chosen_ways(asked: list[str] | None, peer: str | None) -> list[str]:
    """Those asked for, in that order, after dense VI; all of them unless asked."""
    ways = ["dense VI", *asked] if asked else WAYS
    return [way for way in dict.fromkeys(ways) if peer or way not in PEERS]


def method_of(way: str, training: caveat.Training) -> Any:
    """The library's own method for a way that is not a peer's."""
    if way == "deterministic":
        return caveat.MAP(training=training)
    if way == "dense VI":
        return caveat.MeanFieldVI(training=training)
    if way == "RigL 95%":
        return caveat.RigL(density=0.05, interval=100, training=training)
    structure = "channel" if way in CHANNEL else "unstructured"
    return caveat.SSVI(density=(SPARSE | CHANNEL)[way], structure=structure, interval=100, training=training)
