"""Plain architectures: ordinary torch modules, with no Bayesian copies, for experiments, demonstrations and tests.

Initial weights are torch's defaults, drawn from its global generator as for any module: seed with `torch.manual_seed`.
"""

import math
from collections.abc import Callable, Sequence

from torch import nn

from caveat.models.cnn_lstm import cnn_lstm
from caveat.models.lenet import lenet5, lenet_caffe
from caveat.models.mlp import mlp
from caveat.models.resnet18 import resnet18
from caveat.models.resnet20_frn import resnet20_frn

MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp": mlp,
    "lenet5": lenet5,
    "lenet_caffe": lenet_caffe,
    "resnet18": resnet18,
    "resnet20_frn": resnet20_frn,
    "cnn_lstm": cnn_lstm,
}

__all__ = ["MODELS", "cnn_lstm", "for_data", "lenet5", "lenet_caffe", "mlp", "resnet18", "resnet20_frn"]


def for_data(name: str, input_shape: Sequence[int], out_features: int) -> nn.Module:
    """The named model for inputs of a row's shape: [features], or [channels, height, width] for the image models."""
    if name not in MODELS:
        raise ValueError(f"no model {name!r}: there are {', '.join(MODELS)}, or file.py:function")
    if name == "mlp":
        return mlp(math.prod(input_shape), out_features)
    if name == "cnn_lstm":
        return cnn_lstm(out_features=out_features)
    if len(input_shape) != 3:
        raise ValueError(
            f"{name} takes images [channels, height, width], but a row of the data has shape "
            f"{list(input_shape)}: use mlp"
        )
    if name in ("lenet5", "lenet_caffe"):
        return MODELS[name](input_shape[0], out_features, input_shape[1])
    return MODELS[name](input_shape[0], out_features)
