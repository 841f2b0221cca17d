"""Plain architectures: ordinary torch modules, with no Bayesian copies, for experiments, demonstrations and tests.

Initial weights are torch's defaults, drawn from its global generator as for any module: seed with `torch.manual_seed`.
"""

from collections.abc import Callable

from torch import nn

from caveat.models.cnn_lstm import cnn_lstm
from caveat.models.lenet import lenet5
from caveat.models.mlp import mlp
from caveat.models.resnet18 import resnet18
from caveat.models.resnet20_frn import resnet20_frn

MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp": mlp,
    "lenet5": lenet5,
    "resnet18": resnet18,
    "resnet20_frn": resnet20_frn,
    "cnn_lstm": cnn_lstm,
}

__all__ = ["MODELS", "cnn_lstm", "lenet5", "mlp", "resnet18", "resnet20_frn"]
