"""The posterior on a plane through three draws: are there walls between the chains?

With w1, w2, w3 three draws of all weights, and u, v orthonormal vectors that span w2 - w1 and w3 - w1,

    height(a, b) = scale * sum_i log p(y_i | f(x_i, w)) + log p(w),   w = w1 + a u + b v

(Izmailov et al. 2021). Draws of one chain share a basin; draws of different chains often lie in basins of their own,
with low ground between them, and still predict alike. A learned noise moves along with the weights; its prior is left
out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from caveat.evaluate.diagnosis.by_draw import LEARNED, chains_of, some_rows
from caveat.network import Params
from caveat.posterior import Posterior
from caveat.rows import Data, Rows

__all__ = ["Surface", "posterior_surface"]

_MARGIN = 0.35  # of the distance between the outermost draws, on every side


@dataclass(frozen=True)
class Surface:
    """The log posterior density on a plane through three draws, float64."""

    along: Tensor  # [n] distances from the first draw in the direction of the second
    across: Tensor  # [n] distances at a right angle to that, in the plane
    log_density: Tensor  # [n across, n along]
    positions: Tensor  # [3, 2] where the draws are: along, across
    draws: tuple[tuple[int, int], ...]  # (chain, draw) of each


def posterior_surface(
    posterior: Posterior,
    data: Data,
    *,
    draws: Sequence[tuple[int, int]] | None = None,
    points: int = 25,
    rows: int | None = None,
    scale: float = 1.0,
) -> Surface:
    """Compute the log posterior density on the plane through three draws.

    Args:
        posterior: of a method that runs chains.
        data: rows with targets: the training rows.
        draws: three pairs (chain, draw); by default the last draws of the first three chains, or draws spread over one.
        points: how many points the grid has on each side; every one of points^2 takes a pass over the rows.
        rows: at most this many of the data, spread evenly, whose log likelihood stands for that of all.
        scale: a further factor of the log likelihood: 1 is the posterior, 0 the prior.
    """
    chosen = _three_draws(posterior, draws)
    if points < 2:
        raise ValueError(f"posterior_surface(points={points}): a grid needs at least 2 points on each side")
    stacks = posterior.state["params"]
    corners = [torch.cat([stack[c, d].flatten().double().cpu() for stack in stacks.values()]) for c, d in chosen]
    device = posterior.network.device
    basis, positions = _plane(corners, chosen)
    low, high = positions.amin(0), positions.amax(0)
    reach = _MARGIN * (high - low).amax()
    along, across = (
        torch.linspace(float(a - reach), float(b + reach), points, dtype=torch.float64)
        for a, b in zip(low, high, strict=True)
    )
    chosen_rows = some_rows(data, rows).on(posterior.network.device)
    weight = scale * len(Rows(data)) / len(chosen_rows)
    grid = [(corners[0] + torch.stack([a, b]) @ basis).to(device) for b in across for a in along]
    heights = [_log_density(posterior, chosen_rows, _as_weights(point, stacks), weight) for point in grid]
    return Surface(along, across, torch.stack(heights).reshape(points, points), positions.cpu(), chosen)


def _three_draws(posterior: Posterior, draws: Sequence[tuple[int, int]] | None) -> tuple[tuple[int, int], ...]:
    """Three pairs (chain, draw): those asked for, refused where the chains do not have them, or the default."""
    chains, length = chains_of(posterior)
    if draws is None:
        if chains >= 3:
            return tuple((chain, length - 1) for chain in range(3))
        spread = torch.linspace(0, chains * length - 1, 3, dtype=torch.float64).long()
        return tuple((int(s) // length, int(s) % length) for s in spread)
    chosen = tuple((int(chain), int(draw)) for chain, draw in draws)
    if len(chosen) != 3 or any(not (0 <= c < chains and 0 <= d < length) for c, d in chosen):
        raise ValueError(
            f"draws={list(draws)}: must be three pairs (chain, draw) of {chains} chains of {length} draws, from (0, 0)"
        )
    return chosen


def _plane(corners: list[Tensor], chosen: tuple[tuple[int, int], ...]) -> tuple[Tensor, Tensor]:
    """Two orthonormal rows that span the plane, [2, P], and where the three draws lie on it, [3, 2]."""
    second, third = corners[1] - corners[0], corners[2] - corners[0]
    u = second / second.norm()
    rest = third - (third @ u) * u
    if not bool(rest.norm() > 1e-9 * third.norm()):  # equal draws make NaN, which is not above anything
        raise ValueError(
            f"the draws {list(chosen)} lie on one line, and a plane needs three that do not (a sampler that rejects "
            "repeats a draw): pass others as draws="
        )
    basis = torch.stack([u, rest / rest.norm()])
    return basis, torch.stack([basis @ (corner - corners[0]) for corner in corners])


def _as_weights(flat: Tensor, stacks: Params) -> Params:
    """A flat vector [P] as weights with the names and shapes of the chains' own."""
    sizes = [stack[0, 0].numel() for stack in stacks.values()]
    parts = zip(stacks.items(), flat.split(sizes), strict=True)
    return {name: part.reshape(stack.shape[2:]).to(stack.dtype) for (name, stack), part in parts}


def _log_density(posterior: Posterior, rows: Rows, params: Params, scale: float) -> Tensor:
    network = posterior.network
    hyper = posterior.state["hyper"] | {n.removeprefix(LEARNED): v for n, v in params.items() if n.startswith(LEARNED)}
    total = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for x, y in rows.ordered(4 * rows.batch_size, network.device):
            total += network.likelihood.log_prob(network(params, x), y, hyper).double().sum().cpu()
        prior = network.prior.log_prob({name: params[name].double() for name in network.names})
    return scale * total + prior.cpu()
