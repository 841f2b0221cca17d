"""The torch functions whose parameters' gradients are known for each row, and how each of their calls is recorded.

A rule is called in the place of a function that takes a watched parameter: it runs the function, records the uses of
its parameters, and returns the result. It returns None where it cannot take the call as it is.

    linear, convolution   y = W a + b                   a = inputs, or patches of them
    norm layers           y = normalised(x) w + b       w, b of each channel, or of each entry of the last axes
    embedding             y = E[token]
    sum and product       y = x + w,  y = x w           w the same for all rows
    attention             as the linear maps that it is made of
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from caveat.engine.row_gradients.product_uses import ProductUse, Window
from caveat.engine.row_gradients.uses import LookupUse, Record, Use

__all__ = ["RULES"]


def _linear(record: Record, func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    if record.name(input) is not None or weight.ndim != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        return None
    return _linear_part(record, input, weight, bias, 0, len(weight))


def _linear_part(
    record: Record,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    first: int,
    count: int,
    first_bias: int | None = None,
) -> Tensor:
    """Rows `first` to `first + count` of a linear map; its biases may start elsewhere."""
    start = first if first_bias is None else first_bias
    output = F.linear(
        x,
        weight if count == len(weight) else weight[first : first + count],
        bias if bias is None or count == len(bias) else bias[start : start + count],
    )
    if record.name(weight) is None and record.name(bias) is None:
        return output
    axis = record.axis(x, weight, bias)
    uses: list[Use] = []
    if (name := record.name(weight)) is not None:
        uses.append(ProductUse(name, record.rows, axis, x.detach(), weight, first=first, outputs=count))
    uses += record.elementwise(bias, axis, (*[1] * (output.ndim - 2), count), first=start)
    return record.add(output, uses)


def _convolution(
    record: Record,
    func: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    if record.name(input) is not None or input.ndim != weight.ndim:
        return None
    output = func(input, weight, bias, stride, padding, dilation, groups)
    axis = record.axis(input, weight, bias, channels=True)
    uses: list[Use] = []
    if (name := record.name(weight)) is not None:
        x, window = input.detach(), Window.of(weight, stride, padding, dilation)
        uses.append(ProductUse(name, record.rows, axis, x, weight, window, groups=groups, outputs=len(weight)))
    uses += record.elementwise(bias, axis, (len(weight), *[1] * (weight.ndim - 2)))
    return record.add(output, uses)


def _embedding(
    record: Record,
    func: Any,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor | None:
    if max_norm is not None or scale_grad_by_freq:
        return None
    output = func(input, weight, padding_idx)
    ignored = None if padding_idx is None else padding_idx % len(weight)
    name = record.name(weight)
    assert name is not None  # the only parameter it can take
    return record.add(output, [LookupUse(name, record.rows, record.axis(output, weight), weight, input, ignored)])


def _combined(record: Record, func: Any, input: Any, other: Any, multiplied: bool) -> Tensor | None:
    """Adding or multiplying elementwise with one watched parameter that does not vary over rows."""
    weight, x = (input, other) if record.name(input) is not None else (other, input)
    if record.name(weight) is None or record.name(x) is not None or not isinstance(x, Tensor):
        return None
    output: Tensor = func(input, other)
    missing = output.ndim - weight.ndim
    if output.ndim < 2 or missing < 0 or len(output) != record.rows or (missing == 0 and weight.shape[0] != 1):
        return None
    shape = (*[1] * (missing - 1), *weight.shape) if missing else tuple(weight.shape[1:])
    factor = x.detach().expand_as(output) if multiplied else None
    return record.add(output, record.elementwise(weight, record.axis(output, weight), shape, factor))


def _add(record: Record, func: Any, input: Any, other: Any, **named: Any) -> Tensor | None:
    return None if named else _combined(record, func, input, other, multiplied=False)


def _multiply(record: Record, func: Any, input: Any, other: Any, **named: Any) -> Tensor | None:
    return None if named else _combined(record, func, input, other, multiplied=True)


def _attention(
    record: Record,
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    *rest: Any,
    **named: Any,
) -> tuple[Tensor, Tensor | None] | None:
    """The projections as linear maps of their own; torch's function does what is between, with identities for them."""
    if rest or any(record.name(t) is not None for t in (query, key, value, bias_k, bias_v)):
        return None
    e = embed_dim_to_check
    weights = [named.pop(f"{which}_proj_weight", None) for which in "qkv"]
    if named.pop("use_separate_proj_weight", False):
        parts = [
            _linear_part(record, x, w, in_proj_bias, 0, e, first_bias=i * e)
            for i, (x, w) in enumerate(zip((query, key, value), weights, strict=True))
        ]
    elif in_proj_weight is None:
        return None
    elif query is key and key is value:
        parts = list(_linear_part(record, query, in_proj_weight, in_proj_bias, 0, 3 * e).chunk(3, -1))
    else:
        parts = [
            _linear_part(record, x, in_proj_weight, in_proj_bias, i * e, e) for i, x in enumerate((query, key, value))
        ]
    same = torch.eye(e, dtype=query.dtype, device=query.device)
    mixed, attention = func(
        *parts,
        e,
        num_heads,
        None,
        None,
        bias_k,
        bias_v,
        add_zero_attn,
        dropout_p,
        same,
        None,
        use_separate_proj_weight=True,
        q_proj_weight=same,
        k_proj_weight=same,
        v_proj_weight=same,
        **named,
    )
    return _linear_part(record, mixed, out_proj_weight, out_proj_bias, 0, e), attention


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


RULES: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    F.conv1d: _convolution,
    F.conv2d: _convolution,
    F.conv3d: _convolution,
    F.embedding: _embedding,
    F.multi_head_attention_forward: _attention,
    torch.add: _add,
    Tensor.add: _add,
    Tensor.__add__: _add,
    Tensor.__radd__: _add,
    torch.mul: _multiply,
    Tensor.mul: _multiply,
    Tensor.__mul__: _multiply,
    Tensor.__rmul__: _multiply,
    F.batch_norm: _batch_norm,
    F.instance_norm: _batch_norm,
    F.group_norm: _group_norm,
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
}
