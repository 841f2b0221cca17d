"""Weight draws to outputs: what most methods share.

Draws are the outer loop and pieces of the inputs the inner one, so each draw is made once.
"""

from typing import Any

import torch
from torch import Tensor

from caveat.batches import Inputs, move, slices
from caveat.engine.run import Run
from caveat.likelihoods import Hyper, Likelihood
from caveat.network import Network, Params
from caveat.rows import Rows
from caveat.storage import State

__all__ = ["PIECE_ROWS", "forward_in_pieces", "no_closed_form", "no_moments", "no_update", "pick", "push_draws"]

PIECE_ROWS = 512  # rows that go through the module at once


def forward_in_pieces(network: Network, params: Params, x: Inputs) -> Tensor:
    """Outputs of all rows, a piece at a time, without gradients."""
    with torch.no_grad():
        return torch.cat([network(params, move(piece, network.device)) for piece in slices(x, PIECE_ROWS)])


def push_draws(
    method: Any, state: State, network: Network, x: Inputs, n: int, rng: torch.Generator
) -> tuple[Tensor, Hyper]:
    """Outputs [S, B, ...] of n weight draws and their hyper; the `outputs` of every method whose draws are weights."""
    outputs: list[Tensor] = []
    own: dict[str, list[Tensor]] = {}
    for params in method.draws(state, network, n, rng):
        outputs.append(forward_in_pieces(network, params, x))
        for name, value in params.items():
            if name.startswith("hyper/"):
                own.setdefault(name.removeprefix("hyper/"), []).append(value)
    return torch.stack(outputs), state["hyper"] | {name: torch.stack(values) for name, values in own.items()}


def pick(count: int, n: int, rng: torch.Generator) -> list[int]:
    """N of `count` stored draws: each as often as the others, the remainder without repeats."""
    whole, rest = divmod(n, count)
    chosen = torch.randperm(count, generator=rng)[:rest].sort().values.tolist()
    return [*range(count)] * whole + chosen


def no_closed_form(method: Any, likelihood: Likelihood) -> bool:
    """The `closed_form` of a method that predicts from draws."""
    return False


def no_moments(method: Any, state: State, network: Network, x: Inputs, joint: bool = False) -> None:
    """The `moments` of a method whose outputs have no closed form."""
    return None


def no_update(method: Any, state: State, network: Network, rows: Rows, run: Run) -> State:
    """The `update` of a method that cannot take more data without fitting again."""
    raise TypeError(f"{type(method).__name__} cannot take more data once it is fitted: fit it again with all of them")
