"""Features of a linear model, known by their products only, a block of rows at a time.

    block.forward(z)  = phi_i z   for the rows i of the block, K vectors z at once:   [K, d] -> [K, B, m]
    block.backward(v) = sum_i phi_i^T v_i:                                            [K, B, m] -> [K, d]

A matrix is one way to have them; a network's jvp and vjp at its weights are another, with the forward pass shared by
all products of a block. Noise is a factor of each row's precision, R_i R_i^T = B_i.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = [
    "Block",
    "DenseBlock",
    "DenseFeatures",
    "Features",
    "Noise",
    "RowNoise",
    "Scaled",
    "times",
    "times_transposed",
]


class Block(Protocol):
    """Some rows of the data."""

    @property
    def index(self) -> Tensor:
        """Which rows of the data they are, [B]."""

    def forward(self, z: Tensor) -> Tensor:
        """Phi z, [K, d] -> [K, B, m]."""

    def backward(self, v: Tensor) -> Tensor:
        """Phi^T v, [K, B, m] -> [K, d]."""


class Features(Protocol):
    """All rows, block by block."""

    @property
    def size(self) -> int:
        """The number of parameters, d."""

    @property
    def rows(self) -> int:
        """The number of rows, n."""

    @property
    def outputs(self) -> int:
        """The number of outputs of a row, m."""

    @property
    def dtype(self) -> torch.dtype:
        """That of vectors of parameters."""

    @property
    def device(self) -> torch.device:
        """Where products are made."""

    def blocks(self, order: Sequence[Tensor] | None = None) -> Iterator[Block]:
        """All rows in order, in blocks of a fixed size; or one block for each tensor of row numbers."""


class Noise(Protocol):
    """The precision B_i of each row's outputs, as a factor."""

    @property
    def width(self) -> int:
        """Columns of a factor, r."""

    def factor(self, block: Block) -> Tensor:
        """R of each row, [B, m, r], or [B, m], the diagonal of a diagonal one.

        Outputs in positions that know nothing of each other have [B, p, c, q, t] with m = p c t and r = p q t.
        """


@dataclass(frozen=True)
class RowNoise:
    """Factors given for all rows: [n, m, r], or [n, m] where they are diagonal."""

    factors: Tensor

    @property
    def width(self) -> int:
        """Columns of a factor."""
        return self.factors.shape[-1]

    def factor(self, block: Block) -> Tensor:
        """Those of the block's rows."""
        return self.factors[block.index]


def times(factor: Tensor, e: Tensor) -> Tensor:
    """R e for each row, [K, B, r] -> [K, B, m]."""
    if factor.ndim == 5:
        _, p, _, q, t = factor.shape
        return torch.einsum("bpcqt,kbpqt->kbpct", factor, e.unflatten(2, (p, q, t))).flatten(2)
    return factor * e if factor.ndim == 2 else torch.einsum("bmr,kbr->kbm", factor, e)


def times_transposed(factor: Tensor, v: Tensor) -> Tensor:
    """R^T v for each row, [K, B, m] -> [K, B, r]."""
    if factor.ndim == 5:
        _, p, c, _, t = factor.shape
        return torch.einsum("bpcqt,kbpct->kbpqt", factor, v.unflatten(2, (p, c, t))).flatten(2)
    return factor * v if factor.ndim == 2 else torch.einsum("bmr,kbm->kbr", factor, v)


@dataclass(frozen=True)
class DenseBlock:
    """Rows whose features are held while they are used."""

    index: Tensor  # which rows they are, [B]
    phi: Tensor  # [B, m, d]

    def forward(self, z: Tensor) -> Tensor:
        """Phi z, [K, d] -> [K, B, m]."""
        return (z @ self.phi.flatten(0, 1).T).unflatten(1, self.phi.shape[:2])

    def backward(self, v: Tensor) -> Tensor:
        """Phi^T v, [K, B, m] -> [K, d]."""
        return v.flatten(1) @ self.phi.flatten(0, 1)


class DenseFeatures:
    """A matrix held in memory.

    Args:
        phi: features [n, m, d], or [n, d] for one output a row.
        block_rows: rows in a block of a pass in order.
    """

    def __init__(self, phi: Tensor, block_rows: int = 4096) -> None:
        if phi.ndim not in (2, 3) or not phi.is_floating_point() or not phi.numel():
            raise ValueError(
                f"features are {phi.dtype} of shape {tuple(phi.shape)}: give real numbers [rows, features] or "
                "[rows, outputs, features]"
            )
        finite = phi.isfinite().flatten(1).all(1)
        if not finite.all():
            raise ValueError(
                f"the features hold NaN or infinity, first in row {int(finite.long().argmin())}: "
                "clean or impute them first"
            )
        self.phi, self.block_rows = phi.unsqueeze(1) if phi.ndim == 2 else phi, block_rows
        self.rows, self.outputs, self.size = self.phi.shape
        self.dtype, self.device = phi.dtype, phi.device

    def blocks(self, order: Sequence[Tensor] | None = None) -> Iterator[Block]:
        """Slices in order, or chosen rows."""
        if order is not None:
            yield from (DenseBlock(index, self.phi[index]) for index in order)
            return
        index = torch.arange(self.rows, device=self.device)
        parts = zip(index.split(self.block_rows), self.phi.split(self.block_rows), strict=True)
        yield from (DenseBlock(part, phi) for part, phi in parts)


@dataclass(frozen=True)
class _ScaledBlock:
    block: Block
    scale: Tensor

    @property
    def index(self) -> Tensor:
        return self.block.index

    def forward(self, z: Tensor) -> Tensor:
        return self.block.forward(z * self.scale)

    def backward(self, v: Tensor) -> Tensor:
        return self.block.backward(v) * self.scale


class Scaled:
    """Features times a number for each parameter, phi diag(s): a prior of precision alpha / s^2 on the parameters s z.

    With s_j the inverse root of the curvature's diagonal this is the g-prior, whose posterior does not change with the
    features' units; a parameter that has no curvature has no unit either, and s_j = 0 leaves it out.
    """

    def __init__(self, features: Features, scale: Tensor) -> None:
        self.features, self.scale = features, scale
        self.size, self.rows, self.outputs = features.size, features.rows, features.outputs
        self.dtype, self.device = features.dtype, features.device

    def blocks(self, order: Sequence[Tensor] | None = None) -> Iterator[Block]:
        """Those of the features, scaled."""
        yield from (_ScaledBlock(block, self.scale) for block in self.features.blocks(order))
