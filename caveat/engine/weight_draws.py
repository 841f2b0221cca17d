"""Weight draws to outputs: how most methods predict.

Draws are the outer loop and pieces of the inputs the inner one, so that each draw is made once.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from caveat.batches import Inputs, move, slices
from caveat.engine.replicas import Replicas
from caveat.likelihoods import Hyper
from caveat.network import Network, Params
from caveat.storage import State

__all__ = ["PIECE_ROWS", "DrawFunction", "DrawPredictor", "forward_in_pieces", "outputs_of_draws", "pick"]

PIECE_ROWS = 512  # rows that go through the module at once
DrawFunction = Callable[[State, Network, int, torch.Generator], Iterator[Params]]  # a method's `draws`


class DrawPredictor:
    """Predicts with weight draws, each sent through a replica of the network's module."""

    def __init__(self, draws: DrawFunction, state: State, network: Network) -> None:
        self._draws, self._state = draws, state
        self._networks = Replicas(network.replica)

    def draws(self, n: int, rng: torch.Generator) -> Iterator[Params]:
        """The method's own weight draws, n of them."""
        with self._networks.lent() as network:
            yield from self._draws(self._state, network, n, rng)

    def outputs(self, x: Inputs, n: int, rng: torch.Generator) -> tuple[Tensor, Hyper]:
        """Outputs [S, B, ...] of n weight draws, and their hyper."""
        with self._networks.lent() as network:
            return outputs_of_draws(self._draws(self._state, network, n, rng), self._state["hyper"], network, x)

    def moments(self, x: Inputs, joint: bool = False) -> None:
        """None: outputs of weight draws have no closed form."""
        return None


def outputs_of_draws(draws: Iterator[Params], hyper: Hyper, network: Network, x: Inputs) -> tuple[Tensor, Hyper]:
    """Outputs [S, B, ...] of weight draws, and the hyper: one for all, or stacked where each draw has its own."""
    outputs: list[Tensor] = []
    learned: dict[str, list[Tensor]] = {}
    for params in draws:
        outputs.append(forward_in_pieces(network, params, x))
        for name, value in params.items():
            if name.startswith("hyper/"):
                learned.setdefault(name.removeprefix("hyper/"), []).append(value)
    return torch.stack(outputs), hyper | {name: torch.stack(values) for name, values in learned.items()}


def forward_in_pieces(network: Network, params: Params, x: Inputs) -> Tensor:
    """Outputs of all rows [B, ...], a piece of the rows at a time, without gradients."""
    with torch.no_grad():
        return torch.cat([network(params, move(piece, network.device)) for piece in slices(x, PIECE_ROWS)])


def pick(count: int, n: int, rng: torch.Generator) -> list[int]:
    """The numbers of n of `count` stored draws: each as often as the others, the remainder drawn without repeats."""
    whole, rest = divmod(n, count)
    chosen = torch.randperm(count, generator=rng)[:rest].sort().values.tolist()
    return [*range(count)] * whole + chosen
