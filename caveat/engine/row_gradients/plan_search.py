"""Finds how each parameter's gradient of a row is made: by the rules of the layers it acts in, or by copies of it.

Each way is tried on a few rows. With g the gradient of the second row for a cotangent, and h autograd's of that row
alone, a way is right where

    |g - h| <= rounding max(|h|, 1e-4 |h| of the parameter with the largest)

at parameters nearby: a layer that starts at zero would hide those below it. The rules come first, then copies of what
they got wrong, made by `torch.func`, then copies row by row.
"""

from dataclasses import replace
from itertools import count

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from caveat.batches import Inputs, count_rows, map_tensors, tensors
from caveat.engine.row_gradients.watched_pass import Plan, WatchedPass, watched_pass
from caveat.engine.torch_settings import full_precision, plain_attention
from caveat.network import Network, Params

__all__ = ["check_rows_are_independent", "find_plan"]


def find_plan(network: Network, params: Params, names: tuple[str, ...], x: Inputs) -> Plan:
    """The plan for the parameters named, found on a few of these rows."""
    try:
        with full_precision(network.device):
            return _tried_ways(network, _nearby(params, network.names), names, _few_rows(x))
    except CheckpointError as error:  # what is computed again would be at other parameters
        raise ValueError(
            "the network computes activations again in its backward pass (torch.utils.checkpoint), where the "
            "gradients of each row cannot be followed: switch gradient checkpointing off in the module"
        ) from error


def check_rows_are_independent(in_batch: Tensor, alone: Tensor) -> None:
    """Raise a ValueError where the outputs of rows in a batch are not those of each row alone, [B, ...] both."""
    scale = float(alone.abs().max())
    if not float((in_batch - alone).abs().max()) <= _rounding(alone) * scale + 1e-6:
        raise ValueError(
            "the network's output for a row depends on the other rows of the batch, so a row has no gradient of its "
            "own: use BatchNorm with running statistics, and no operation over the batch axis"
        )


def _tried_ways(network: Network, params: Params, names: tuple[str, ...], x: Inputs) -> Plan:
    """Try the rules, then copies, each against autograd's gradient of the second row alone."""
    rows = count_rows(x)
    alone, v, exact = _second_alone(network, params, names, x)
    plan = Plan(names, (), False)
    for vectorised in (True, True, False):  # the rules alone, then with copies of the rest, then row by row
        while True:
            try:
                passed = watched_pass(network, params, x, plan)
            except Exception:  # whatever torch.func says that it cannot do; row by row is tried next, and raises
                if not plan.general or not vectorised:
                    raise
                break
            check_rows_are_independent(passed.outputs[1:2], alone)
            axes = {name: tuple(places) for name, places in passed.tape.found_axes.items()}
            numbers = sum(point.numel() for point in passed.points) // rows
            wrong = passed.tape.unknown | _differing(passed, params, v, exact)
            if not wrong:
                sizes = numbers, alone.numel(), passed.tape.widest // rows
                return Plan(plan.known, plan.general, plan.vectorised, axes, *sizes, passed.last_layer())
            if wrong <= set(plan.general):
                break
            known = tuple(name for name in plan.known if name not in wrong)
            plan = Plan(known, tuple(name for name in names if name not in known), vectorised)
        plan = replace(plan, vectorised=False)
    raise ValueError(
        f"the gradients of {', '.join(sorted(wrong)[:3])} differ between a row alone and in a batch: "
        "leave those parameters out with parameters="
    )


def _second_alone(network: Network, params: Params, names: tuple[str, ...], x: Inputs) -> tuple[Tensor, Tensor, Params]:
    """The second row's outputs, a cotangent for every row, and autograd's gradients of the second for it."""
    second = map_tensors(lambda t: t[1:2] if t.ndim else t, x)
    watched = {name: params[name].detach().clone().requires_grad_() for name in names}
    try:
        with torch.enable_grad(), plain_attention():
            alone = network(params | watched, second)
    except ValueError as error:  # BatchNorm without running statistics
        raise ValueError(
            f"the network cannot take a row by itself, so a row has no gradient of its own: {error}"
        ) from error
    shape, rng = (count_rows(x), *alone.shape[1:]), torch.Generator().manual_seed(0)
    v = torch.randn(shape, generator=rng, dtype=torch.float64).to(alone.device, alone.dtype)
    exact = dict.fromkeys(names, torch.zeros((), device=alone.device))
    if alone.requires_grad:
        gradients = torch.autograd.grad(alone, list(watched.values()), v[1:2], allow_unused=True)
        exact |= {n: g for n, g in zip(names, gradients, strict=True) if g is not None}
    return alone.detach(), v, exact


def _differing(passed: WatchedPass, params: Params, v: Tensor, exact: Params) -> set[str]:
    """Parameters whose gradient for the second row is not autograd's."""
    by_plan, gradients = {name: torch.zeros_like(params[name]) for name in exact}, passed.gradients(v)
    for use, point in passed.uses:
        g = use.arranged(gradients[point])
        m = len(g) // use.rows
        by_plan[use.name] += use.dense(g, slice(m, 2 * m)).sum(0).reshape(by_plan[use.name].shape)
    norms = _norms([exact[name] for name in by_plan])
    errors = _norms([value - exact[name] for name, value in by_plan.items()])
    tolerance, least = _rounding(v), 1e-4 * max(norms, default=0.0)
    close = [error <= tolerance * max(norm, least) for error, norm in zip(errors, norms, strict=True)]
    return {name for name, is_close in zip(by_plan, close, strict=True) if not is_close}


def _few_rows(x: Inputs) -> Inputs:
    """Three rows, or more where another axis is as long; the same one again where there is only one."""
    taken = {length for t in tensors(x) for length in t.shape[1:]}
    chosen = torch.arange(next(n for n in count(3) if n not in taken)) % count_rows(x)
    return map_tensors(lambda t: t[chosen.to(t.device)] if t.ndim else t, x)


def _nearby(params: Params, names: tuple[str, ...]) -> Params:
    """Parameters a tenth away, none of them zero."""
    rng = torch.Generator().manual_seed(1)

    def moved(value: Tensor) -> Tensor:
        noise = 0.1 * torch.randn(value.shape, generator=rng).to(value)
        return value + noise * torch.where(value == 0, torch.ones_like(value), value)

    return params | {name: moved(params[name].detach()) for name in names}


def _rounding(like: Tensor) -> float:
    """The relative difference that other batch sizes may make, by rounding and by relus that it turns over."""
    return 1e-8 if like.dtype == torch.float64 else 1e-2


def _norms(tensors: list[Tensor]) -> list[float]:
    """Read all at once: each reading waits for a GPU."""
    return torch.stack([tensor.norm().double() for tensor in tensors]).tolist() if tensors else []
