"""Posteriors of a few draws of networks with few weights or few nodes: every draw as a posterior of points keeps it.

Tensors of a draw are named "draw/name" in the groups "active", "rest" and "slices" of the state; those of "active" that
have no such name are common to all draws (the places of weights). What a likelihood learned for a draw is in "rest",
under "draw/hyper/".
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from caveat.batches import Inputs, move, slices
from caveat.engine.sparse import Substitute
from caveat.engine.variational import active_draws, layout_of, own_network
from caveat.engine.weight_draws import PIECE_ROWS, pick
from caveat.likelihoods import Hyper
from caveat.network import Network, Params
from caveat.storage import State

__all__ = ["count", "one_draw", "sampled_draws", "sampled_outputs"]


def count(state: State) -> int:
    """How many draws a state has; 0 where it is of another kind."""
    return sum(name.endswith("/mean") for name in state.get("active", {}))


def one_draw(state: State, draw: int) -> State:
    """A draw by itself, as a posterior of points."""
    prefix = f"{draw}/"
    groups = ("active", "rest", "slices")
    found = {
        g: {n.removeprefix(prefix): t for n, t in state[g].items() if n.startswith(prefix)}
        for g in groups
        if g in state
    }
    found["active"] |= {name: t for name, t in state["active"].items() if "/" not in name}
    learned = {n: t for n, t in found["rest"].items() if n.startswith("hyper/")}
    found["hyper"] = state["hyper"] | {name.removeprefix("hyper/"): t for name, t in learned.items()}
    return found


def sampled_draws(method: Any, state: State, network: Network, n: int, rng: torch.Generator) -> Iterator[Params]:
    """The `draws` of a method whose state has a few: whole weights, zero where there are none."""
    for i in pick(count(state), n, rng):
        yield from active_draws(method, one_draw(state, i), network, 1, rng)


def sampled_outputs(
    method: Any, state: State, network: Network, x: Inputs, n: int, rng: torch.Generator
) -> tuple[Tensor, Hyper]:
    """The `outputs` of such a method: a pass of each draw's own sparse or narrow network, [S, B, ...]."""
    outputs: list[Tensor] = []
    learned: dict[str, list[Tensor]] = {}
    with torch.no_grad():
        for i in pick(count(state), n, rng):
            own = _network(state, network, i)
            pieces = (move(piece, network.device) for piece in slices(x, PIECE_ROWS))
            outputs.append(torch.cat([own.evaluation_pass(piece) for piece in pieces]))
            for name, value in state["rest"].items():
                if name.startswith(f"{i}/hyper/"):
                    learned.setdefault(name.removeprefix(f"{i}/hyper/"), []).append(value)
    return torch.stack(outputs), state["hyper"] | {name: torch.stack(values) for name, values in learned.items()}


def _network(state: State, network: Network, draw: int) -> Network:
    """The network of a draw: narrow ones are made once each, draws of the same weights share one."""
    first = state["active"]["0/mean"]
    kept = network.found.get("samples")
    if kept is None or kept[0] is not first:
        kept = network.found["samples"] = (first, {})
    made: dict[int | None, Any] = kept[1]
    own = one_draw(state, draw)
    rest = {name: value for name, value in own["rest"].items() if not name.startswith("hyper/")}
    if "slices" in own:
        if draw not in made:
            made[draw] = own_network(own, network).with_fixed(rest)
        narrow: Network = made[draw]
        return narrow
    if None not in made:
        made[None] = Substitute(network, layout_of(own, network), rest)
    substitute: Substitute = made[None]
    module = substitute.network.module
    targets = dict(module.named_parameters()) | dict(module.named_buffers())
    for name, value in rest.items():
        targets[name].copy_(value)
    substitute.use(own["active"]["mean"])
    return substitute.network
