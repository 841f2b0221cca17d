"""One side of a Kronecker product, in its eigenbasis: whole, or a few directions and the mean of the rest.

A layer that takes thousands of numbers and gives eight (an adapter) has a factor of eight by eight and one of thousands
by thousands. The wide one is kept as

    A ~ V diag(values) V^T + rest (1 - V V^T),   rest = (trace A - sum of values) / (n - k)

with its k leading directions V [n, k]. They come from A Omega alone, with a fixed random Omega [n, s], which a pass
over the data sums without ever holding A (a Nystrom approximation of A, (A Omega) (Omega^T A Omega)^-1 (A Omega)^T).
Coordinates of such a side are those along V, then the n numbers of what is orthogonal to V: more than n, but of a
tight frame F = [V, 1 - V V^T], F F^T = 1, so that sums over coordinates are as in a basis.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from caveat.engine.laplace.gaussians import in_float64
from caveat.knobs import Count
from caveat.network import Params

__all__ = ["FactorDirections", "FactorSum", "Side", "Sketch", "directions_of"]

FactorDirections = Literal["auto", "whole"] | Count
WIDE, RATIO, KEPT = 512, 16, 64  # auto: of factors wider than the first and than so many times the other side


def directions_of(side: int, other: int, factors: FactorDirections) -> int:
    """How many directions of a factor `side` wide are kept, beside one `other` wide; 0 for all of them."""
    if factors == "whole":
        return 0
    if factors == "auto":
        return KEPT if side > WIDE and side > RATIO * other else 0
    return factors if 2 * factors < side else 0


def probe_vectors(side: int, count: int, like: Tensor) -> Tensor:
    """Omega, orthonormal [side, count], the same for every pass over data and on every device."""
    rng = torch.Generator().manual_seed(side)
    return torch.linalg.qr(torch.randn(side, count, generator=rng, dtype=torch.float64))[0].to(like)


@dataclass(frozen=True)
class Sketch:
    """What a pass sums of a factor A that is too wide to hold."""

    products: Tensor  # A Omega, [n, s] with s twice the directions that will be kept
    trace: Tensor

    def plus(self, other: "Sketch") -> "Sketch":
        """The sketch of both sums together."""
        return Sketch(self.products + other.products, self.trace + other.trace)

    def times(self, factor: float) -> "Sketch":
        """The sketch of the factor times a number."""
        return Sketch(self.products * factor, self.trace * factor)


@dataclass(frozen=True)
class FactorSum:
    """A factor while it is summed over data: the matrix, or what a sketch needs; its tensors are written in place."""

    whole: Tensor | None = None  # [n, n]
    sketch: Sketch | None = None
    probes: Tensor | None = None  # Omega, [n, s]

    @classmethod
    def empty(cls, side: int, directions: int, like: Tensor) -> "FactorSum":
        """Nothing summed yet; `directions` is how many will be kept, 0 for all."""
        if not directions:
            return cls(like.new_zeros(side, side))
        probes = probe_vectors(side, min(2 * directions, side), like)
        return cls(None, Sketch(torch.zeros_like(probes), like.new_zeros(())), probes)

    def add(self, columns: Tensor) -> None:
        """Add the products of columns [n, m] with themselves."""
        if self.whole is not None:
            self.whole.addmm_(columns, columns.T)
        else:
            assert self.sketch is not None
            assert self.probes is not None
            self.sketch.products.addmm_(columns, columns.T @ self.probes)
            self.sketch.trace.add_(columns.square().sum())

    def add_matrix(self, matrix: Tensor) -> None:
        """Add a matrix [n, n]."""
        if self.whole is not None:
            self.whole.add_(matrix)
        else:
            assert self.sketch is not None
            assert self.probes is not None
            self.sketch.products.addmm_(matrix, self.probes)
            self.sketch.trace.add_(matrix.diagonal().sum())

    def total(self) -> Tensor | Sketch:
        """The sum so far."""
        total = self.whole if self.whole is not None else self.sketch
        assert total is not None
        return total

    def tensors(self, name: str) -> Params:
        """What is summed, under names that begin alike."""
        if self.sketch is None:
            assert self.whole is not None
            return {name: self.whole}
        return {f"{name}-products": self.sketch.products, f"{name}-trace": self.sketch.trace}


@dataclass(frozen=True)
class Side:
    """A factor in its eigenbasis."""

    values: Tensor  # [k]
    vectors: Tensor  # [n, k]
    rest: Tensor | None = None  # the eigenvalue of everything orthogonal to the vectors; None where there is nothing

    @classmethod
    def of(cls, factor: Tensor | Sketch, count: Tensor | None = None) -> "Side":
        """The eigenbasis of a sum, over a count of what was summed."""
        if isinstance(factor, Sketch):
            return cls._of_sketch(factor if count is None else factor.times(1 / float(count)))
        values, vectors = torch.linalg.eigh(in_float64(factor if count is None else factor / count))
        # As they will be when loaded: the layout decides the last bits of products.
        return cls(values.clamp_min(0).to(factor.dtype), vectors.to(factor.dtype).contiguous())

    @classmethod
    def _of_sketch(cls, sketch: Sketch) -> "Side":
        y = sketch.products.double()
        n, s = y.shape
        omega = probe_vectors(n, s, y)
        shift = torch.finfo(sketch.products.dtype).eps * y.norm().clamp_min(1e-300)  # so that it can be factored
        y = y + shift * omega
        inner = omega.T @ y
        root = torch.linalg.cholesky((inner + inner.T) / 2)
        half = torch.linalg.solve_triangular(root, y.T, upper=False).T  # half half^T approximates A
        vectors, singular, _ = torch.linalg.svd(half, full_matrices=False)
        values = (singular.square() - shift).clamp_min(0)[: s // 2]
        rest = ((sketch.trace.double() - values.sum()) / (n - len(values))).clamp_min(0)
        kind = sketch.products.dtype
        return cls(values.to(kind), vectors[:, : s // 2].to(kind).contiguous(), rest.to(kind))

    @property
    def coordinates(self) -> int:
        """How many coordinates a vector has."""
        return len(self.values) + (0 if self.rest is None else len(self.vectors))

    def spectrum(self) -> Tensor:
        """The eigenvalue of every coordinate."""
        return self.values if self.rest is None else torch.cat([self.values, self.rest.expand(len(self.vectors))])

    def shares(self) -> Tensor:
        """Which share of a dimension every coordinate is: they sum to n."""
        ones = torch.ones_like(self.values)
        if self.rest is None:
            return ones
        n = len(self.vectors)
        return torch.cat([ones, ones.new_full((n,), (n - len(ones)) / n)])

    def rotated(self, a: Tensor) -> Tensor:
        """F^T a of columns [..., n, m]."""
        along = self.vectors.T @ a
        return along if self.rest is None else torch.cat([along, a - self.vectors @ along], -2)

    def restored(self, c: Tensor) -> Tensor:
        """F c of coordinates [..., coordinates, m]."""
        if self.rest is None:
            return self.vectors @ c
        along, across = c.split([len(self.values), len(self.vectors)], -2)
        return self.vectors @ (along - self.vectors.T @ across) + across

    def squares(self, numbers: Tensor) -> Tensor:
        """The diagonal of F diag(c) F^T for each column c of numbers [coordinates, m], one number for all of the rest.

        [n, m]
        """
        squares = self.vectors.square()
        k = len(self.values)
        along = squares @ numbers[:k]
        return along if self.rest is None else along + (1 - squares.sum(1, keepdim=True)) * numbers[k : k + 1]

    def factor(self, count: Tensor | None = None) -> Tensor | Sketch:
        """The sum that this was made of, times the count that it was divided by."""
        scale = 1 if count is None else count
        if self.rest is None:
            return (self.vectors * self.values) @ self.vectors.T * scale
        n, k = self.vectors.shape
        omega = probe_vectors(n, 2 * k, self.vectors)
        along = self.vectors.T @ omega
        products = self.vectors @ ((self.values - self.rest).unsqueeze(1) * along) + self.rest * omega
        return Sketch(products * scale, (self.values.sum() + self.rest * (n - k)) * scale)

    def tensors(self, prefix: str) -> Params:
        """The eigenvalues and the vectors, under names that begin alike."""
        rest = {} if self.rest is None else {f"{prefix}_rest": self.rest}
        return {f"{prefix}_values": self.values, f"{prefix}_vectors": self.vectors} | rest

    @classmethod
    def from_tensors(cls, tensors: Params, prefix: str) -> "Side":
        """What `tensors` gave."""
        return cls(tensors[f"{prefix}_values"], tensors[f"{prefix}_vectors"], tensors.get(f"{prefix}_rest"))
