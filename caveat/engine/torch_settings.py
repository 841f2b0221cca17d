"""What torch must be set to while derivatives are made, put back afterwards.

    with plain_attention():                 operations that have derivatives
    with full_precision(device):            derivatives that can be compared

`refuse_inference_mode` is for what no setting mends.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["full_precision", "plain_attention", "refuse_inference_mode"]


def refuse_inference_mode() -> None:
    """Where gradients are needed."""
    if torch.is_inference_mode_enabled():
        raise ValueError("gradients are needed, and torch.inference_mode() makes none: use torch.no_grad() instead")


_PRECISION = threading.RLock()  # held while the settings are changed: they are the process's, not a thread's


@contextlib.contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """For derivatives that are compared: float32 without the ten bits that a GPU's convolutions round to by default.

    Rounding alone would be harmless; but it turns some of the relus over, and the derivatives then differ by far more.
    Afterwards convolutions, recurrent layers and matrix products each hold the setting that they had: one that followed
    `torch.backends.fp32_precision` does so no longer. On another device than a GPU nothing is touched.
    """
    if device.type != "cuda":
        yield
        return
    backends: Any = torch.backends  # its parts are not typed
    settings = backends.cudnn.conv, backends.cudnn.rnn, backends.cuda.matmul
    with _PRECISION:
        before = [setting.fp32_precision for setting in settings]
        for setting in settings:
            setting.fp32_precision = "ieee"
        try:
            yield
        finally:
            for setting, value in zip(settings, before, strict=True):
                setting.fp32_precision = value


@contextlib.contextmanager
def plain_attention() -> Iterator[None]:
    """Attention by its ordinary operations: torch's fused inference path cannot be differentiated."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
