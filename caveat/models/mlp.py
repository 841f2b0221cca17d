"""A multilayer perceptron: flatten, then linear layers with an activation between them."""

from collections.abc import Sequence
from itertools import pairwise

from torch import nn


def mlp(
    in_features: int, out_features: int, hidden: Sequence[int] = (50,), activation: type[nn.Module] = nn.ReLU
) -> nn.Sequential:
    """Build in_features - hidden - out_features; `hidden=()` is a linear model.

    Args:
        in_features: numbers in one input once flattened, such as 784 for a 28x28 image
        out_features: classes, or numbers to predict (two a target for a mean and a log variance)
        hidden: width of each hidden layer
        activation: a module class that takes no arguments: `nn.ReLU`, `nn.SiLU`, `nn.Tanh`
    """
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in, fan_out in pairwise([in_features, *hidden]):
        layers += [nn.Linear(fan_in, fan_out), activation()]
    return nn.Sequential(*layers, nn.Linear([in_features, *hidden][-1], out_features))
