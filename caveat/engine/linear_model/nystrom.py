"""A randomised Nystrom sketch of the curvature, M ~ U diag(lambda) U^T, and the preconditioner it gives.

    Y = M Omega,   M ~ Y (Omega^T Y)^-1 Y^T,   Omega [d, r] orthonormal
    P = U diag(lambda - lambda_r) U^T + lambda_r I + A

(Frangella, Tropp and Udell 2023; for A = alpha I, P is (lambda_r + alpha) times theirs). The sketch does not depend on
the prior: it is built once, for r products, and serves every A. A small multiple of Omega is added to Y and subtracted
from the eigenvalues again, so that the Cholesky factor exists even where M does not have full rank.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from caveat.engine.cost import refuse_if_too_large
from caveat.engine.linear_model.counted_normals import standard_normals
from caveat.engine.linear_model.model import LinearModel

__all__ = ["Nystrom", "sketch", "top_eigenvalue"]

_AT_ONCE = 1 << 24  # numbers in a part of the triangular solve


@dataclass(frozen=True)
class Nystrom:
    """The leading eigenvectors and eigenvalues of the curvature, approximately."""

    vectors: Tensor  # U, [d, r]
    values: Tensor  # lambda, [r], descending, float64

    def preconditioner(self, precision: Tensor) -> Callable[[Tensor], Tensor]:
        """The function v [K, d] -> P^-1 v under a prior precision [d] or [1]."""
        return self._of_one(precision) if len(precision) == 1 else self._of_each(precision)

    def _of_one(self, precision: Tensor) -> Callable[[Tensor], Tensor]:
        """For one alpha: v is divided by lambda + alpha along U, and by lambda_r + alpha elsewhere."""
        U, along, elsewhere = self.vectors, self.values + precision.double(), self.values[-1] + precision.double()

        def solve(v: Tensor) -> Tensor:
            inside = v @ U
            outside = v - inside @ U.T
            # Rounding leaves a little of the part inside, which counts where lambda_r + alpha is small: project again.
            outside -= (outside @ U) @ U.T
            return (inside / along).to(v.dtype) @ U.T + outside / elsewhere.to(v.dtype)

        return solve

    def _of_each(self, precision: Tensor) -> Callable[[Tensor], Tensor]:
        """By Woodbury's identity with S = U diag(lambda - lambda_r)^(1/2) and D = lambda_r + A."""
        smallest = self.values[-1]
        S = self.vectors * (self.values - smallest).sqrt().to(self.vectors.dtype)
        D = precision + smallest.to(precision.dtype)
        W = S / D.unsqueeze(1)
        inner = (S.T @ W).double()
        inner.diagonal().add_(1)
        factor = torch.linalg.cholesky(inner)

        def solve(v: Tensor) -> Tensor:
            correction = torch.cholesky_solve((v @ W).T.double(), factor).T
            return v / D - correction.to(v.dtype) @ W.T

        return solve


def sketch(
    model: LinearModel, rank: int, seed: int = 0, at_once: int = 64, counted: Callable[[int, int], None] | None = None
) -> Nystrom:
    """A sketch of some rank, from that many products with M, `at_once` in a pass; `counted` is called with each.

    There are never more than two arrays of its size: for eleven million weights and rank 256 each takes 11 GB.
    """
    features = model.features
    rank = min(rank, features.size, features.rows * model.noise.width)
    needed = 5 * rank * features.size * features.dtype.itemsize // 2
    what = f"a sketch of rank {rank} for {features.size:,} weights"
    refuse_if_too_large(what, needed, features.device, "give the solver a lower rank")
    places = torch.arange(features.size, device=features.device)
    omega = torch.linalg.qr(standard_normals(seed, "sketch", range(rank), places, features.dtype).T)[0]
    product = torch.empty_like(omega)  # Y, and in the end the root Y_s C^-T, whose square is the approximation
    for first in range(0, rank, at_once):
        columns = model.curvature(omega.T[first : first + at_once].contiguous())
        if not columns.isfinite().all():
            model.check_finite()
        product.T[first : first + at_once] = columns
        if counted is not None:
            counted(min(first + at_once, rank), rank)
    shift = torch.finfo(features.dtype).eps * float(product.norm()) or torch.finfo(features.dtype).tiny
    factor, shift = _factor(omega.T @ product, shift)
    product.add_(omega, alpha=shift)
    del omega
    for part in product.split(max(_AT_ONCE // rank, 1)):
        part.copy_(torch.linalg.solve_triangular(factor.to(part.dtype).T, part, upper=True, left=False))
    Q, T = torch.linalg.qr(product)
    del product, part
    left, singular, _ = torch.linalg.svd(T.double())
    return Nystrom(Q @ left.to(Q.dtype), (singular.square() - shift).clamp_min(0))


def _factor(gram: Tensor, shift: float) -> tuple[Tensor, float]:
    """C with C C^T = Omega^T Y_s and Y_s = Y + shift Omega, in float64; and the shift, raised until C exists."""
    gram = (gram.double() + gram.T.double()) / 2
    eye = torch.eye(len(gram), dtype=torch.float64, device=gram.device)
    while True:
        factor, failed = torch.linalg.cholesky_ex(gram + shift * eye)
        if not failed:
            return factor, shift
        shift *= 10


def top_eigenvalue(model: LinearModel, seed: int = 0, order: list[Tensor] | None = None, products: int = 10) -> float:
    """A lower estimate of the largest eigenvalue of M, or of the part of M from some rows, by power iteration."""
    features = model.features
    z = standard_normals(seed, "power", [0], torch.arange(features.size, device=features.device), features.dtype)
    value = 0.0
    for _ in range(products):
        z /= z.norm()
        blocks = features.blocks(None if order is None else [index.to(features.device) for index in order])
        z = sum((model.block_curvature(block, z) for block in blocks), start=torch.zeros_like(z))
        value = float(z.norm())
        if not value > 0:
            break
    return value
