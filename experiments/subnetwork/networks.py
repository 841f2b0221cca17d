"""Networks that experiment files of this folder name: those of the paper's UCI figure, for the 11 inputs of wine."""

from torch import nn

from caveat import models


def one_layer_of_50() -> nn.Module:
    """651 weights."""
    return models.mlp(11, 1, (50,))


def one_layer_of_100() -> nn.Module:
    """1,301 weights."""
    return models.mlp(11, 1, (100,))


def two_layers_of_50() -> nn.Module:
    """3,201 weights."""
    return models.mlp(11, 1, (50, 50))


def two_layers_of_100() -> nn.Module:
    """11,401 weights."""
    return models.mlp(11, 1, (100, 100))
