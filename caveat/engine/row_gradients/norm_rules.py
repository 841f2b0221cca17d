"""How calls of torch's norm layers are recorded: a weight multiplies the normalised inputs, and a bias is added.

y = normalised(x) w + b      w, b of each channel, or of each entry of the last axes
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from caveat.engine.row_gradients.use_record import Record

__all__ = ["NORM_RULES"]


def _batch_norm(
    record: Record,
    func: Any,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *rest: Any,
    **named: Any,
) -> Tensor | None:
    return _normalised(
        record, lambda w, b: func(input, running_mean, running_var, w, b, *rest, **named), input, weight, bias
    )


def _group_norm(
    record: Record, func: Any, input: Tensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Tensor | None:
    return _normalised(record, lambda w, b: func(input, num_groups, w, b, eps), input, weight, bias)


def _layer_norm(
    record: Record,
    func: Any,
    input: Tensor,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> Tensor | None:
    over = normalized_shape
    return _normalised(record, lambda w, b: func(input, over, w, b, eps), input, weight, bias, over)


def _rms_norm(
    record: Record, func: Any, input: Tensor, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> Tensor | None:
    over = normalized_shape
    return _normalised(record, lambda w, _: func(input, over, w, eps), input, weight, None, over)


def _normalised(
    record: Record,
    norm_with: Callable[[Tensor | None, Tensor | None], Tensor],
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    over: Sequence[int] | None = None,
) -> Tensor | None:
    """Record a norm layer, which `norm_with` runs with a weight and a bias: of the last axes, or a number a channel."""
    if record.name(input) is not None:
        return None
    output = norm_with(weight, bias)
    axis = record.axis(output, weight, bias, channels=over is None)
    ones = [1] * (input.ndim - (2 if over is None else 1 + len(over)))
    shape = (input.shape[1], *ones) if over is None else (*ones, *over)
    factor = None
    if record.name(weight) is not None:
        with torch.no_grad():
            factor = norm_with(None, None)
    uses = record.elementwise(weight, axis, shape, factor) + record.elementwise(bias, axis, shape)
    return record.add(output, uses)


NORM_RULES: dict[Any, Callable[..., Tensor | None]] = {
    F.batch_norm: _batch_norm,
    F.instance_norm: _batch_norm,
    F.group_norm: _group_norm,
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
}
