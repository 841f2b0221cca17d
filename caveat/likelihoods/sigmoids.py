"""Whether a network ends in a sigmoid: its outputs are probabilities then, where `Bernoulli` takes logits.

Values alone do not tell: logits of a few rows may lie between 0 and 1 too. That the last operation was a sigmoid does.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["ends_in_sigmoid"]


class _Sigmoids(TorchDispatchMode):
    """Keeps what sigmoids gave during a pass, so that no other tensor takes their places in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.sigmoid.default, torch.ops.aten.sigmoid_.default):
            self.results.append(result)
        return result


def ends_in_sigmoid(forward: Callable[[], Tensor]) -> bool:
    """Whether what a pass gives is, but for its shape, what a sigmoid gave."""
    with _Sigmoids() as sigmoids:
        outputs = forward()
    return any(
        result.data_ptr() == outputs.data_ptr() and result.numel() == outputs.numel() for result in sigmoids.results
    )
