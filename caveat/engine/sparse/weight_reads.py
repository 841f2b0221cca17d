"""The weight of a layer whose weights are random, as a module sees it that reads it instead of calling the layer.

Fused attention and transformer layers compute with `layer.weight`; adapters and embeddings look at its type alone. What
they get has the type, shape and device of the weight at once, and its numbers, a draw, when the first operation asks.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

__all__ = ["WeightRead"]

_DESCRIBED = ("dtype", "device", "shape", "ndim", "requires_grad", "is_cuda", "layout", "is_leaf", "grad_fn")
_DESCRIBING = {getattr(Tensor, name).__get__ for name in _DESCRIBED} | {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.is_floating_point,
    Tensor.is_complex, Tensor.__len__, Tensor.get_device, Tensor.ndimension,
}  # fmt: skip


class WeightRead(Tensor):
    """Stands for a tensor that is made when it is first computed with; `make` is asked in every operation."""

    make: Callable[[], Tensor]

    @staticmethod
    def of(like: Tensor, shape: tuple[int, ...], make: Callable[[], Tensor]) -> "WeightRead":
        """A weight of the type and device of `like` whose numbers `make` gives, the same each time that it is asked."""
        tracked = like.requires_grad and torch.is_grad_enabled()
        read: WeightRead = Tensor._make_wrapper_subclass(
            WeightRead, shape, dtype=like.dtype, device=like.device, requires_grad=tracked
        )
        read.make = make
        return read

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Tell what is known of the weight without its numbers, and give every other operation the numbers."""
        if func in _DESCRIBING:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = tree_map(lambda part: part.make() if isinstance(part, WeightRead) else part, (args, kwargs))
        return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse operations that come here past `__torch_function__`: gradients would be lost."""
        raise TypeError(
            f"{func} is called on the weight of a variational layer in a way that its draw cannot follow: leave that "
            "layer out with parameters="
        )
