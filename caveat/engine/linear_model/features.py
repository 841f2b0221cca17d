"""Features of a linear model, known by their products only, a block of rows at a time.

    block.forward(z)  = phi_i z   for the rows i of the block, K vectors z at once:   [K, d] -> [K, B, m]
    block.backward(v) = sum_i phi_i^T v_i:                                            [K, B, m] -> [K, d]

The products may come from a matrix, or from a network's jvp and vjp at its weights, with the forward pass shared by
all products of a block. The noise is given by a factor of each row's precision, R_i R_i^T = B_i.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = [
    "DenseBlock",
    "DenseFeatures",
    "Features",
    "NoisePrecision",
    "RowBlock",
    "RowNoise",
    "ScaledFeatures",
    "apply_factor",
    "apply_factor_transposed",
]


class RowBlock(Protocol):
    """A block of rows, and products with their features."""

    @property
    def index(self) -> Tensor:
        """Which rows of the data they are, [B]."""

    def forward(self, z: Tensor) -> Tensor:
        """The products Phi z of the block's rows, [K, d] -> [K, B, m]."""

    def backward(self, v: Tensor) -> Tensor:
        """The products Phi^T v, summed over the block's rows, [K, B, m] -> [K, d]."""


class Features(Protocol):
    """The features of all rows, block by block."""

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
        """The type of vectors of parameters."""

    @property
    def device(self) -> torch.device:
        """The device that products are computed on."""

    def blocks(self, order: Sequence[Tensor] | None = None) -> Iterator[RowBlock]:
        """All rows in order, in blocks of a fixed size; or, with `order`, one block for each tensor of row numbers."""


class NoisePrecision(Protocol):
    """The precision B_i of each row's noise, as a factor R_i with R_i R_i^T = B_i."""

    @property
    def width(self) -> int:
        """The number of columns of a factor, r."""

    def factor(self, block: RowBlock) -> Tensor:
        """The factor R of each row: [B, m, r], or [B, m] for the diagonal of a diagonal one.

        Outputs at several positions that are independent have [B, p, c, q, t], with m = p c t and r = p q t.
        """


@dataclass(frozen=True)
class RowNoise:
    """Factors given for all rows: [n, m, r], or [n, m] where they are diagonal."""

    factors: Tensor

    @property
    def width(self) -> int:
        """The number of columns of a factor, r."""
        return self.factors.shape[-1]

    def factor(self, block: RowBlock) -> Tensor:
        """The factors of the block's rows, [B, m, r] or [B, m]."""
        return self.factors[block.index]


def apply_factor(factor: Tensor, e: Tensor) -> Tensor:
    """The product R e of each row, [K, B, r] -> [K, B, m]."""
    if factor.ndim == 5:
        _, p, _, q, t = factor.shape
        return torch.einsum("bpcqt,kbpqt->kbpct", factor, e.unflatten(2, (p, q, t))).flatten(2)
    return factor * e if factor.ndim == 2 else torch.einsum("bmr,kbr->kbm", factor, e)


def apply_factor_transposed(factor: Tensor, v: Tensor) -> Tensor:
    """The product R^T v of each row, [K, B, m] -> [K, B, r]."""
    if factor.ndim == 5:
        _, p, c, _, t = factor.shape
        return torch.einsum("bpcqt,kbpct->kbpqt", factor, v.unflatten(2, (p, c, t))).flatten(2)
    return factor * v if factor.ndim == 2 else torch.einsum("bmr,kbm->kbr", factor, v)


@dataclass(frozen=True)
class DenseBlock:
    """Rows whose features are in memory."""

    index: Tensor  # which rows they are, [B]
    phi: Tensor  # [B, m, d]

    def forward(self, z: Tensor) -> Tensor:
        """The products Phi z of the block's rows, [K, d] -> [K, B, m]."""
        return (z @ self.phi.flatten(0, 1).T).unflatten(1, self.phi.shape[:2])

    def backward(self, v: Tensor) -> Tensor:
        """The products Phi^T v, summed over the block's rows, [K, B, m] -> [K, d]."""
        return v.flatten(1) @ self.phi.flatten(0, 1)


class DenseFeatures:
    """Features that are a matrix in memory.

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

    def blocks(self, order: Sequence[Tensor] | None = None) -> Iterator[RowBlock]:
        """All rows in order, in blocks of `block_rows`; or one block for each tensor of row numbers."""
        if order is not None:
            yield from (DenseBlock(index, self.phi[index]) for index in order)
            return
        index = torch.arange(self.rows, device=self.device)
        parts = zip(index.split(self.block_rows), self.phi.split(self.block_rows), strict=True)
        yield from (DenseBlock(part, phi) for part, phi in parts)


@dataclass(frozen=True)
class _ScaledBlock:
    block: RowBlock
    scale: Tensor

    @property
    def index(self) -> Tensor:
        return self.block.index

    def forward(self, z: Tensor) -> Tensor:
        return self.block.forward(z * self.scale)

    def backward(self, v: Tensor) -> Tensor:
        return self.block.backward(v) * self.scale


class ScaledFeatures:
    """Features phi diag(s), scaled for each parameter: a prior of precision alpha / s^2 on the parameters s z.

    With s_j the inverse root of the curvature's diagonal this is the g-prior, whose posterior does not depend on the
    features' units. A parameter without curvature has no such unit, and s_j = 0 leaves it out.
    """

    def __init__(self, features: Features, scale: Tensor) -> None:
        self.features, self.scale = features, scale
        self.size, self.rows, self.outputs = features.size, features.rows, features.outputs
        self.dtype, self.device = features.dtype, features.device

    def blocks(self, order: Sequence[Tensor] | None = None) -> Iterator[RowBlock]:
        """The blocks of the features, scaled."""
        yield from (_ScaledBlock(block, self.scale) for block in self.features.blocks(order))
