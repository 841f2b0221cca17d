"""Posteriors of a few draws of networks with few weights or few nodes: every draw as a posterior of points keeps it.

Tensors of a draw are named "draw/name" in the groups "active", "rest" and "slices" of the state; those of "active" that
have no such name are common to all draws (the places of weights). What a likelihood learned for a draw is in "rest",
under "draw/hyper/".
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from caveat.batches import Inputs, move, slices
from caveat.engine.replicas import Replicas
from caveat.engine.sparse import Substitute
from caveat.engine.variational import LayerPredictor, layout_of, own_network
from caveat.engine.weight_draws import PIECE_ROWS, pick
from caveat.likelihoods import Hyper
from caveat.network import Network, Params
from caveat.storage import State

__all__ = ["DrawsPredictor", "count", "one_draw"]


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


class DrawsPredictor:
    """Predicts from a few draws, each through its own sparse or narrow network."""

    def __init__(self, state: State, network: Network) -> None:
        self._state, self._network = state, network
        self._networks = Replicas(lambda: _DrawNetworks(state, network))

    def draws(self, n: int, rng: torch.Generator) -> Iterator[Params]:
        """Whole weights, zero where there are none."""
        for i in pick(count(self._state), n, rng):
            yield from LayerPredictor(one_draw(self._state, i), self._network).draws(1, rng)

    def outputs(self, x: Inputs, n: int, rng: torch.Generator) -> tuple[Tensor, Hyper]:
        """Outputs of n passes, each through a draw's own network, [S, B, ...]."""
        outputs: list[Tensor] = []
        learned: dict[str, list[Tensor]] = {}
        with torch.no_grad(), self._networks.lent() as networks:
            for i in pick(count(self._state), n, rng):
                network = networks.of(i)
                pieces = (move(piece, network.device) for piece in slices(x, PIECE_ROWS))
                outputs.append(torch.cat([network.evaluation_pass(piece) for piece in pieces]))
                for name, value in self._state["rest"].items():
                    if name.startswith(f"{i}/hyper/"):
                        learned.setdefault(name.removeprefix(f"{i}/hyper/"), []).append(value)
        hyper = self._state["hyper"] | {name: torch.stack(values) for name, values in learned.items()}
        return torch.stack(outputs), hyper

    def moments(self, x: Inputs, joint: bool = False) -> None:
        """None: there is no closed form."""
        return None


class _DrawNetworks:
    """The networks of draws: narrow ones are made once each, draws with the same places of weights share one."""

    def __init__(self, state: State, network: Network) -> None:
        self._state, self._network = state, network
        self._narrow: dict[int, Network] = {}
        self._shared: Substitute | None = None

    def of(self, draw: int) -> Network:
        """The network of a draw, ready for a pass."""
        state = one_draw(self._state, draw)
        rest = {name: value for name, value in state["rest"].items() if not name.startswith("hyper/")}
        if "slices" in state:
            if draw not in self._narrow:
                self._narrow[draw] = own_network(state, self._network).with_fixed(rest)
            return self._narrow[draw]
        if self._shared is None:
            self._shared = Substitute(self._network, layout_of(state, self._network), rest)
        module = self._shared.network.module
        targets = dict(module.named_parameters()) | dict(module.named_buffers())
        for name, value in rest.items():
            targets[name].copy_(value)
        self._shared.use(state["active"]["mean"])
        return self._shared.network
