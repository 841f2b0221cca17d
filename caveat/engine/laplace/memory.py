"""What a Laplace approximation takes in memory, structure by structure, and what would fit where one does not.

For n weights and m rows of F (see `sweep.py`), beside one pass of the network over a batch:

    full       the matrix [n, n] with its factor, when tuning with its eigenvectors and their working memory; or, where
               m < n, the rows [m, n] and that of [m, m]
    kronecker  A and G of every linear layer and convolution, their eigenvectors, and the decomposition of one of them
    diagonal   a few numbers a weight                             low_rank   a few matrices [rank + 10, n]
"""

from bisect import bisect_right
from typing import Literal

from torch import nn

from caveat.engine.laplace.factor_sides import FactorDirections, directions_of
from caveat.engine.laplace.gaussians import DOUBLE_UP_TO
from caveat.network import Network

__all__ = ["GRAM_ROWS", "Structure", "curvature_bytes", "full_bytes", "uses_rows", "what_fits"]

Structure = Literal["full", "kronecker", "diagonal", "low_rank"]

GRAM_ROWS = 4096  # rows of F that are multiplied at once
LAYERS_WITH_FACTORS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MultiheadAttention)


def full_bytes(n: int, m: int, itemsize: int, tuned: bool) -> int:
    """The bytes of a full matrix over n weights or, with m < n rows of F, of its dual form."""
    side = min(m, n)
    wide = 8 if side <= DOUBLE_UP_TO else itemsize
    decomposed = (4 if tuned else 2) * wide * side**2
    if m < n:
        return (3 if tuned else 1) * itemsize * m * n + decomposed  # when tuning, the rows in float64 as well
    converted = wide - itemsize  # to float64 before and from it afterwards
    waiting = min(m, GRAM_ROWS) * n * (2 * itemsize + 2 * converted)  # rows of F before they are multiplied
    return max(decomposed, wide * n**2 + waiting) + converted * n**2


def uses_rows(n: int, m: int, itemsize: int) -> bool:
    """Whether a full curvature over n weights is kept as its m rows: fewer than the weights, and in less memory."""
    return m < n and full_bytes(n, m, itemsize, True) <= full_bytes(n, n, itemsize, True)


def curvature_bytes(
    network: Network,
    structure: Structure,
    n: int,
    m: int,
    tuned: bool,
    rank: int = 0,
    factors: FactorDirections = "whole",
) -> int:
    """The bytes of a structure over n weights of a network, from m rows of F, with or without tuning afterwards.

    Leaving out rows later never makes it more.
    """
    needed = structure_bytes(network, structure, rank, factors)
    if structure != "full":
        return needed
    rows = m if uses_rows(n, m, network.dtype.itemsize) else max(n, m)
    return max(needed, full_bytes(n, rows, network.dtype.itemsize, tuned))


def structure_bytes(network: Network, structure: Structure, rank: int = 0, factors: FactorDirections = "whole") -> int:
    """The bytes of the other structures; for a full one, what passes over the data take beside it."""
    weights = network.n_parameters * network.dtype.itemsize
    passes = 12 * weights  # the point and one nearby, with their gradients; sums, prior
    if structure == "low_rank":
        return passes + 8 * (rank + 10) * weights  # vectors and their products, orthogonalised
    return passes + _kronecker_bytes(network, factors) if structure == "kronecker" else passes


def _kronecker_bytes(network: Network, factors: FactorDirections) -> int:
    """The bytes of all Kronecker factors and their eigenvectors; embeddings and custom layers have none."""
    item, stored, largest = network.dtype.itemsize, 0, 0
    for prefix, module in network.module.named_modules():
        if isinstance(module, LAYERS_WITH_FACTORS) and getattr(module, "groups", 1) == 1:
            named = module.named_parameters(prefix, recurse=False)
            for value in (value for name, value in named if name in network.names and value.ndim > 1):
                sides = (len(value), value[0].numel() + 1)
                for side, other in (sides, sides[::-1]):
                    kept = directions_of(side, other, factors)
                    stored += side * (5 * kept or 2 * side)  # test vectors and products, twice as many, and vectors
                    wide = 8 if kept or side <= DOUBLE_UP_TO else item
                    largest = max(largest, 6 * wide * side * (2 * kept or side))
    return item * stored + largest


def what_fits(network: Network, concerned: Network, method: str, m: int, tuned: bool, free: int) -> str:
    """Advice on what fits into `free` bytes: `method` over the parameters of `concerned`, or a subnetwork."""
    structures: tuple[Structure, ...] = ("kronecker", "diagonal")
    advice = [f"{method}(structure={name!r})" for name in structures if structure_bytes(concerned, name) <= free]
    if structure_bytes(network, "full") <= free:
        item = network.dtype.itemsize
        most = bisect_right(range(network.n_parameters + 1), free, key=lambda n: full_bytes(n, m, item, tuned)) - 1
        advice += [f"SubnetworkLaplace(weights={max(most // 100 * 100, min(most, 100)):_})"] if most else []
    return f"try {' or '.join(advice or ['LastLayerLaplace()'])}, or select fewer weights with parameters="
