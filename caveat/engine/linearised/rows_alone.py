"""Whether rows in a batch have the derivatives that each has alone, without which nothing can be linearised by rows.

    J^T v of some rows together = the sum over rows of J_n^T v_n, each from a pass of its own,    at every parameter

up to rounding. Where units stand at the corner of a relu, in many places at once as over a plain part of an image,
rounding decides on which side they are, and single precision shows derivatives that are apart by more than rounding.
What differs is therefore looked at again in double precision, where the module has one.
"""

import torch
from torch import Tensor

from caveat.batches import Inputs, count_rows, map_tensors, slices
from caveat.copies import copied
from caveat.engine.tangents import AutogradProducts, PassFacts, rounding
from caveat.engine.torch_settings import full_precision, plain_attention
from caveat.network import Network, Params

__all__ = ["facts_of_rows"]


def facts_of_rows(network: Network, params: Params, names: tuple[str, ...], x: Inputs) -> PassFacts:
    """What passes over these rows show; a ValueError where a row's derivatives depend on the others."""
    facts, wrong = _compared(network, params, names, x)
    if wrong and network.dtype != torch.float64:
        wrong = _in_double(network, params, names, x, wrong)
    if wrong:
        raise ValueError(
            f"the derivatives of {', '.join(wrong[:3])} are not those that autograd gives for a row alone: an "
            "operation over the batch axis cannot be linearised row by row; leave those parameters out, or replace "
            "the layer"
        )
    return facts


def _compared(network: Network, params: Params, names: tuple[str, ...], x: Inputs) -> tuple[PassFacts, list[str]]:
    """The facts, and the parameters whose derivatives differ."""
    with full_precision(network.device):
        with torch.no_grad():
            outputs = network(params, x).flatten(1)
        rng = torch.Generator().manual_seed(0)
        v = torch.randn((1, *outputs.shape), generator=rng, dtype=torch.float64).to(outputs)
        rows = enumerate(slices(x, 1))
        each = [_of_a_row(network, params, names, number, row, v[0, number]) for number, row in rows]
        general = AutogradProducts.looking(network, params, names, x, count_rows(x))
        together = general.pull(general.run(x)[0], v)[0].split(general.sizes)
    alone = [sum(parts[1:], start=parts[0]) for parts in zip(*each, strict=True)]
    tolerance = rounding(network)
    scale = max(float(g.norm()) for g in alone)
    wrong = [
        name
        for name, mine, g in zip(names, together, alone, strict=True)
        if not float((mine - g.flatten()).norm()) <= tolerance * max(float(g.norm()), 0.01 * scale)
    ]
    return general.facts, wrong


def _in_double(network: Network, params: Params, names: tuple[str, ...], x: Inputs, wrong: list[str]) -> list[str]:
    """The parameters whose derivatives differ in double precision too; those given where the module has none."""

    def wide(t: Tensor) -> Tensor:
        return t.double() if t.is_floating_point() else t

    try:
        finer = network.with_module(copied(network.module).double())
        return _compared(finer, {name: wide(value) for name, value in params.items()}, names, map_tensors(wide, x))[1]
    except (RuntimeError, TypeError, NotImplementedError):
        return wrong


def _of_a_row(
    network: Network, params: Params, names: tuple[str, ...], number: int, row: Inputs, v: Tensor
) -> tuple[Tensor, ...]:
    """J^T v of a row by autograd, parameter by parameter."""
    weights = {name: params[name].detach().clone().requires_grad_() for name in names}
    with torch.enable_grad(), plain_attention():
        total = (network(params | weights, row).flatten() * v).sum()
        if not total.requires_grad:
            raise ValueError("the outputs do not depend on the parameters of the linear model: choose others")
        gradients = torch.autograd.grad(total, list(weights.values()), allow_unused=True, materialize_grads=True)
    bad = [name for name, g in zip(weights, gradients, strict=True) if not g.isfinite().all()]
    if bad:
        raise ValueError(
            f"the derivatives of row {number} by {bad[0]} hold NaN or infinity: look at that row, and whether the "
            "network takes a root or a logarithm of zero, or divides by it"
        )
    return gradients
