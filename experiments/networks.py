"""Networks that experiment files name, as in models = ["networks.py:digits_mlp"]."""

from torch import nn

from caveat import models


def digits_mlp() -> nn.Module:
    """The 64-32-10 network that the stored HMC reference of digits is about."""
    return models.mlp(64, 10, hidden=(32,), activation=nn.SiLU)
