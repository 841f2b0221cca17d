"""Attention and recurrent layers by their ordinary operations, not by kernels that lack derivatives."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from caveat.engine.torch_settings import HeldSetting, differentiable_attention

__all__ = ["plain_operations"]

_no_mkldnn = HeldSetting(torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled, False)
_no_cudnn = HeldSetting(torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled, False)


@contextlib.contextmanager
def plain_operations(module: nn.Module, device: torch.device, convolutions: bool) -> Iterator[None]:
    """While a pass is made that is differentiated twice, or traced (then a GPU's `convolutions` are plain too).

    These are settings of the whole process: other threads keep their kernels unless a recurrent layer, or a GPU, makes
    it necessary.
    """
    recurrent = any(isinstance(child, nn.RNNBase) for child in module.modules())
    with differentiable_attention(), contextlib.ExitStack() as settings:
        if recurrent:
            settings.enter_context(_no_mkldnn())
        if device.type == "cuda" and (recurrent or convolutions):
            # cudnn's public context sets TF32 too, and fails where a program has set that
            settings.enter_context(_no_cudnn())
        yield
