"""The network that the experiment file of this folder names."""

from torch import nn

from caveat import models


def digits_100() -> nn.Module:
    """64-100-10, of 7,400 weights and 110 biases."""
    return models.mlp(64, 10, (100,))
