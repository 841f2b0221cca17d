"""How K tangents go through an operation, written in operations that any exporter knows.

    y = op(a, b, ...)      dy_k = A da_k + B db_k + ...      tangents [K, ...] of each tensor [...]

One rule a kind of operation: structural ones, which are linear in what they are given, are applied to each tangent;
operations on each number have a slope; products have a rule of their own. A rule is called with the operation, its
arguments and keyword arguments, the tangents in the place of each argument (None where it has none), and the result.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["WITHOUT_SLOPE", "rule_for"]

aten = torch.ops.aten
Rule = Callable[[Any, Sequence[Any], dict[str, Any], Sequence[Any], Any], Any]


def rule_for(operation: Any) -> Rule:
    """The rule of an operation; raises a KeyError where there is none."""
    if operation in STRUCTURAL:
        return _structural
    if operation in ROW_BY_ROW:
        return _row_by_row
    if operation in SLOPES:
        return _pointwise
    return RULES[operation]


STRUCTURAL = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.permute.default, aten.transpose.int,
    aten.t.default, aten.expand.default, aten.slice.Tensor, aten.select.int, aten.squeeze.dim, aten.squeeze.dims,
    aten.unsqueeze.default, aten.clone.default, aten.alias.default, aten.detach.default, aten._to_copy.default,
    aten.mean.dim, aten.mean.default, aten.sum.dim_IntList, aten.sum.default, aten.constant_pad_nd.default,
    aten.split_with_sizes.default, aten.neg.default, aten.mul.Scalar, aten.div.Scalar, aten.index_select.default,
    aten.index.Tensor, aten.flip.default, aten.repeat.default, aten.cumsum.default,
}  # fmt: skip
ROW_BY_ROW = {
    aten.avg_pool2d.default, aten._adaptive_avg_pool2d.default, aten.upsample_nearest2d.vec,
    aten.upsample_bilinear2d.vec,
}  # fmt: skip
WITHOUT_SLOPE = {
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.new_zeros.default,
    aten.new_ones.default, aten.new_full.default, aten.sign.default, aten.floor.default, aten.ceil.default,
    aten.round.default,
    aten._assert_tensor_metadata.default,  # the exporter's own checks: they give nothing
    aten._assert_scalar.default,
    aten._assert_async.msg,
}  # fmt: skip


def _structural(op: Any, args: Sequence[Any], kwargs: dict[str, Any], given: Sequence[Any], result: Any) -> Any:
    """Linear in the first argument: the operation itself, for each tangent."""

    def one(tangent: Tensor) -> Any:
        return op(tangent, *args[1:], **kwargs)

    return torch.func.vmap(one)(given[0])


def _row_by_row(op: Any, args: Sequence[Any], kwargs: dict[str, Any], given: Sequence[Any], result: Tensor) -> Tensor:
    """Linear in the first argument, [B, ...], whose rows do not meet: K times as many rows."""
    tangents: Tensor = op(given[0].flatten(0, 1), *args[1:], **kwargs)
    return tangents.unflatten(0, (len(given[0]), result.shape[0]))


def _relu_slope(x: Tensor, y: Tensor, *_: Any, **__: Any) -> Tensor:
    return (y > 0).to(x.dtype)


def _gelu_slope(x: Tensor, y: Tensor, approximate: str = "none") -> Tensor:
    if approximate == "none":
        return 0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * (-0.5 * x.square()).exp() / math.sqrt(2 * math.pi)
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x.square())
    bent = inner.tanh()
    return 0.5 * (1 + bent) + 0.5 * x * (1 - bent.square()) * slope


def _elu_slope(x: Tensor, y: Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Tensor:
    return torch.where(x > 0, torch.full_like(x, scale), y * input_scale + alpha * scale * input_scale)


def _between(x: Tensor, y: Tensor, low: float | None = None, high: float | None = None) -> Tensor:
    inside = torch.ones_like(x)
    inside = inside if low is None else inside * (x >= low)
    return inside if high is None else inside * (x <= high)


SLOPES: dict[Any, Callable[..., Tensor]] = {  # of the operation's input x and result y, then its other arguments
    aten.relu.default: _relu_slope,
    aten.gelu.default: _gelu_slope,
    aten.elu.default: _elu_slope,
    aten.leaky_relu.default: lambda x, y, slope=0.01: torch.where(x > 0, torch.ones_like(x), slope),
    aten.hardtanh.default: lambda x, y, low=-1.0, high=1.0: _between(x, y, low, high),
    aten.clamp.default: _between,
    aten.clamp_min.default: _between,
    aten.clamp_max.default: lambda x, y, high: _between(x, y, None, high),
    aten.sigmoid.default: lambda x, y: y * (1 - y),
    aten.tanh.default: lambda x, y: 1 - y.square(),
    aten.exp.default: lambda x, y: y,
    aten.expm1.default: lambda x, y: y + 1,
    aten.log.default: lambda x, y: 1 / x,
    aten.log1p.default: lambda x, y: 1 / (1 + x),
    aten.sqrt.default: lambda x, y: 0.5 / y,
    aten.rsqrt.default: lambda x, y: -0.5 * y**3,
    aten.reciprocal.default: lambda x, y: -y.square(),
    aten.sin.default: lambda x, y: x.cos(),
    aten.cos.default: lambda x, y: -x.sin(),
    aten.erf.default: lambda x, y: 2 / math.sqrt(math.pi) * (-x.square()).exp(),
    aten.abs.default: lambda x, y: x.sign(),
    aten.pow.Tensor_Scalar: lambda x, y, power: power * x ** (power - 1),
    aten.add.Scalar: lambda x, y, *_, **__: torch.ones_like(x),
    aten.sub.Scalar: lambda x, y, *_, **__: torch.ones_like(x),
}


def _pointwise(op: Any, args: Sequence[Any], kwargs: dict[str, Any], given: Sequence[Any], result: Any) -> Tensor:
    slope = SLOPES[op](args[0], result, *args[1:], **kwargs)
    tangents: Tensor = given[0] * slope
    return tangents


def _aligned(tangent: Tensor, like: Tensor) -> Tensor:
    """Tangents [K, ...] with axes of one after K, as broadcasting against the result would put them."""
    axes = (slice(None), *[None] * (like.ndim + 1 - tangent.ndim))
    return tangent[axes]


def _summed(terms: Sequence[Tensor]) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _sum(op: Any, args: Sequence[Any], kwargs: dict[str, Any], given: Sequence[Any], result: Tensor) -> Tensor:
    sign = -1 if op is aten.sub.Tensor else 1
    factors = (1, sign * kwargs.get("alpha", 1))
    terms = [f * _aligned(t, result) for f, t in zip(factors, given, strict=False) if t is not None]
    total = _summed(terms)
    return total.expand(len(total), *result.shape)


def _product(op: Any, args: Sequence[Any], kwargs: dict[str, Any], given: Sequence[Any], result: Tensor) -> Tensor:
    a, b = args
    terms = []
    if given[0] is not None:
        terms.append(_aligned(given[0], result) * b)
    if given[1] is not None:
        terms.append(_aligned(given[1], result) * a)
    return _summed(terms)


def _quotient(op: Any, args: Sequence[Any], kwargs: dict[str, Any], given: Sequence[Any], result: Tensor) -> Tensor:
    divisor = args[1]
    terms = []
    if given[0] is not None:
        terms.append(_aligned(given[0], result) / divisor)
    if given[1] is not None:
        terms.append(-_aligned(given[1], result) * (result / divisor))
    return _summed(terms)


def _power(op: Any, args: Sequence[Any], kwargs: dict[str, Any], given: Sequence[Any], result: Tensor) -> Tensor:
    base, power = args
    terms = []
    if given[0] is not None:
        terms.append(_aligned(given[0], result) * (power * base ** (power - 1)))
    if given[1] is not None:
        terms.append(_aligned(given[1], result) * (result * base.log()))
    return _summed(terms)


def _where(op: Any, args: Sequence[Any], kwargs: dict[str, Any], given: Sequence[Any], result: Tensor) -> Tensor:
    condition = args[0]
    zero = torch.zeros((), dtype=result.dtype, device=result.device)
    yes, no = (zero if t is None else _aligned(t, result) for t in given[1:])
    return torch.where(condition, yes, no)


def _matrix_product(a: Tensor, b: Tensor, of_a: Tensor | None, of_b: Tensor | None) -> Tensor:
    """Tangents of a @ b, [K, rows, O]: K matrices beside each other are one product, and so are K times the rows."""
    terms = []
    if of_a is not None:
        below = of_a.clone(memory_format=torch.contiguous_format).flatten(0, 1)  # a view may fix the rows for exporters
        terms.append((below @ b).unflatten(0, (len(of_a), a.shape[0])))
    if of_b is not None:
        beside = of_b.permute(1, 0, 2).flatten(1)  # [I, K O]
        terms.append((a @ beside).unflatten(1, (len(of_b), b.shape[1])).transpose(0, 1))
    return _summed(terms)


def _mm(op: Any, args: Sequence[Any], kwargs: dict[str, Any], given: Sequence[Any], result: Tensor) -> Tensor:
    return _matrix_product(*args, *given)


def _addmm(op: Any, args: Sequence[Any], kwargs: dict[str, Any], given: Sequence[Any], result: Tensor) -> Tensor:
    bias, a, b = given
    terms = [] if bias is None else [kwargs.get("beta", 1) * _aligned(bias, result)]
    if a is not None or b is not None:
        terms.append(kwargs.get("alpha", 1) * _matrix_product(args[1], args[2], a, b))
    total = _summed(terms)
    return total.expand(len(total), *result.shape)


def _bmm(op: Any, args: Sequence[Any], kwargs: dict[str, Any], given: Sequence[Any], result: Tensor) -> Tensor:
    a, b = args
    terms = []
    if given[0] is not None:
        terms.append(given[0] @ b)
    if given[1] is not None:
        terms.append(a @ given[1])
    return _summed(terms)


def _convolution(op: Any, args: Sequence[Any], kwargs: dict[str, Any], given: Sequence[Any], result: Tensor) -> Tensor:
    """K times the rows for tangents of the inputs; for those of the weight K times the filters of each group."""
    x, weight, _, *geometry = args
    of_x, of_weight, of_bias = given[:3]
    transposed, groups = geometry[3], geometry[5]
    terms = []
    if of_x is not None:
        images = aten.convolution(of_x.flatten(0, 1), weight, None, *geometry)
        terms.append(images.unflatten(0, (len(of_x), result.shape[0])))
    if of_weight is not None:
        k = len(of_weight)
        if transposed:  # filters [I, O / groups, ...]
            terms.append(torch.stack([aten.convolution(x, w, None, *geometry) for w in of_weight]))
        else:
            beside = of_weight.unflatten(1, (groups, weight.shape[0] // groups)).transpose(0, 1).flatten(0, 2)
            images = aten.convolution(x, beside, None, *geometry)
            apart = images.unflatten(1, (groups, k, weight.shape[0] // groups))  # [B, G, K, O / G, ...]
            terms.append(apart.movedim(2, 0).flatten(2, 3))
    if of_bias is not None:
        terms.append(of_bias.reshape(len(of_bias), 1, -1, *[1] * (x.ndim - 2)))
    total = _summed(terms)
    return total.expand(len(total), *result.shape)


def _max_pool(op: Any, args: Sequence[Any], kwargs: dict[str, Any], given: Sequence[Any], result: Any) -> Any:
    """The tangent of a maximum is that of the entry that is largest; its place has none."""
    tangents, places = given[0], result[1].flatten(2)
    picked = tangents.flatten(3).gather(3, places.unsqueeze(0).expand(len(tangents), *places.shape))
    return picked.reshape(len(tangents), *result[1].shape), None


def _largest(op: Any, args: Sequence[Any], kwargs: dict[str, Any], given: Sequence[Any], result: Tensor) -> Tensor:
    """The largest entries along axes: the mean of the tangents of those that are as large."""
    axes = [axis % args[0].ndim for axis in (args[1] if len(args) > 1 and args[1] else range(args[0].ndim))]
    kept = args[0].amax(axes, keepdim=True)
    share = (args[0] == kept).to(result.dtype)
    share = share / share.sum(axes, keepdim=True)
    return (given[0] * share).sum([axis + 1 for axis in axes]).reshape(len(given[0]), *result.shape)


def _larger(op: Any, args: Sequence[Any], kwargs: dict[str, Any], given: Sequence[Any], result: Tensor) -> Tensor:
    """The larger or the smaller of two: the tangent of that one, and where they are equal the mean of both."""
    shares = [(x == result).to(result.dtype) for x in args]
    terms = [_aligned(t, result) * share for t, share in zip(given, shares, strict=True) if t is not None]
    return _summed(terms) / sum(shares)


def _length(op: Any, args: Sequence[Any], kwargs: dict[str, Any], given: Sequence[Any], result: Tensor) -> Tensor:
    """The Euclidean length along axes: d|x| = x dx / |x|, and none at x = 0."""
    x, order = args[0], args[1] if len(args) > 1 else 2
    if order != 2:
        raise KeyError(order)  # as for an operation without a rule
    axes = [axis % x.ndim for axis in (args[2] if len(args) > 2 and args[2] is not None else range(x.ndim))]
    unit = x / x.square().sum(axes, keepdim=True).sqrt().clamp_min(torch.finfo(x.dtype).tiny)
    return (given[0] * unit).sum([axis + 1 for axis in axes]).reshape(len(given[0]), *result.shape)


def _batch_norm(op: Any, args: Sequence[Any], kwargs: dict[str, Any], given: Sequence[Any], result: Any) -> Any:
    """With fixed statistics: y = (x - mean) / sqrt(variance + eps) * weight + bias."""
    x, weight, _, mean, variance, _, eps = args

    def by_channel(t: Tensor) -> Tensor:
        return t.reshape(*t.shape[:-1], -1, *[1] * (x.ndim - 2))

    scale = by_channel((variance + eps).rsqrt())
    terms = _affine(given, weight, by_channel, scale, (x - by_channel(mean)) * scale)
    return _summed(terms).expand(-1, *result[0].shape), None, None


def _affine(
    given: Sequence[Any], weight: Tensor | None, shaped: Callable[[Tensor], Tensor], scale: Tensor, normal: Tensor
) -> list[Tensor]:
    """Terms of d(weight n + bias), n = normal whose tangent is `scale` times that of the inputs."""
    of_x, of_weight, of_bias = given[:3]
    terms = []
    if of_x is not None:
        terms.append(of_x * (scale if weight is None else scale * shaped(weight)))
    if of_weight is not None:
        terms.append(shaped(of_weight).unsqueeze(1) * normal)
    if of_bias is not None:
        terms.append(shaped(of_bias).unsqueeze(1))
    return terms


def _normalised(normal: Tensor, inverse_std: Tensor, of_x: Tensor, axes: Sequence[int]) -> Tensor:
    """The tangent of (x - mean) / std over axes counted from the end, at its value `normal`."""
    centred = of_x - of_x.mean(list(axes), keepdim=True)
    return inverse_std * (centred - normal * (normal * of_x).mean(list(axes), keepdim=True))


def _layer_norm(op: Any, args: Sequence[Any], kwargs: dict[str, Any], given: Sequence[Any], result: Any) -> Any:
    x, shape, weight = args[0], args[1], args[2]
    of_x, _, of_weight, of_bias, *_ = [*given, None, None]
    axes = range(-len(shape), 0)
    mean, inverse_std = result[1], result[2]
    normal = (x - mean) * inverse_std
    terms = []
    if of_x is not None:
        tangent = _normalised(normal, inverse_std, of_x, axes)
        terms.append(tangent if weight is None else tangent * weight)
    if of_weight is not None:
        terms.append(normal * _aligned(of_weight, x))
    if of_bias is not None:
        terms.append(_aligned(of_bias, x))
    return _summed(terms).expand(-1, *x.shape), None, None


def _group_norm(op: Any, args: Sequence[Any], kwargs: dict[str, Any], given: Sequence[Any], result: Any) -> Any:
    x, weight, groups = args[0], args[1], args[6]

    def grouped(t: Tensor) -> Tensor:  # the numbers of a group on the last axis
        return t.reshape(*t.shape[: t.ndim - x.ndim + 1], groups, -1)

    def by_channel(t: Tensor) -> Tensor:
        return t.reshape(*t.shape[:-1], -1, *[1] * (x.ndim - 2))

    inverse_std = result[2].unsqueeze(-1)
    normal = (grouped(x) - result[1].unsqueeze(-1)) * inverse_std
    of_x = given[0]
    if of_x is not None:
        of_x = _normalised(normal, inverse_std, grouped(of_x), (-1,)).reshape(of_x.shape)
    terms = _affine((of_x, *given[1:3]), weight, by_channel, torch.ones_like(x[:1, :1]), normal.reshape(x.shape))
    return _summed(terms).expand(-1, *x.shape), None, None


def _softmax(op: Any, args: Sequence[Any], kwargs: dict[str, Any], given: Sequence[Any], result: Tensor) -> Tensor:
    axis = args[1] % result.ndim
    weighted = result * given[0]
    return weighted - result * weighted.sum(axis + 1, keepdim=True)


def _log_softmax(op: Any, args: Sequence[Any], kwargs: dict[str, Any], given: Sequence[Any], result: Tensor) -> Tensor:
    axis = args[1] % result.ndim
    tangents: Tensor = given[0] - (result.exp() * given[0]).sum(axis + 1, keepdim=True)
    return tangents


def _concatenated(op: Any, args: Sequence[Any], kwargs: dict[str, Any], given: Sequence[Any], result: Tensor) -> Tensor:
    axis = (args[1] if len(args) > 1 else 0) % result.ndim
    k = next(len(t) for t in given[0] if t is not None)
    parts = [x.new_zeros((k, *x.shape)) if t is None else t for x, t in zip(args[0], given[0], strict=True)]
    return torch.cat(parts, axis + 1)


def _embedding(op: Any, args: Sequence[Any], kwargs: dict[str, Any], given: Sequence[Any], result: Tensor) -> Tensor:
    tangents: Tensor = given[0][:, args[1]]
    return tangents


RULES: dict[Any, Rule] = {
    aten.add.Tensor: _sum,
    aten.sub.Tensor: _sum,
    aten.mul.Tensor: _product,
    aten.div.Tensor: _quotient,
    aten.pow.Tensor_Tensor: _power,
    aten.where.self: _where,
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten.bmm.default: _bmm,
    aten.convolution.default: _convolution,
    aten.max_pool2d_with_indices.default: _max_pool,
    aten.amax.default: _largest,
    aten.maximum.default: _larger,
    aten.minimum.default: _larger,
    aten.linalg_vector_norm.default: _length,
    aten._native_batch_norm_legit_no_training.default: _batch_norm,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_group_norm.default: _group_norm,
    aten._softmax.default: _softmax,
    aten._log_softmax.default: _log_softmax,
    aten.cat.default: _concatenated,
    aten.embedding.default: _embedding,
}
