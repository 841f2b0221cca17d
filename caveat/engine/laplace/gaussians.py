"""Gaussians over weights, N(0, P^-1) with P = curvature + diag(prior), in the forms that a posterior can afford.

    DenseGaussian     P itself, as its Cholesky factor                        n^2 numbers
    LowRankGaussian   P = diag(prior) + rows^T rows, by Woodbury's identity   m n numbers, m rows
    LayerGaussian     no covariance between parts (`layer_gaussians.py`)

For the Jacobian J of a forward pass (`RowPass`) each Gaussian gives the covariance of J delta, draws of delta, the
shifts J delta that draws make to the outputs, its log determinant and its marginal variances. A curvature makes the
Gaussian of any prior; its `path` serves every multiple of one prior with the work of a single decomposition.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from caveat.engine.row_gradients import Jacobian, RowPass
from caveat.network import Params
from caveat.randomness import normals

__all__ = [
    "Curvature",
    "DenseGaussian",
    "FullCurvature",
    "LowRankGaussian",
    "PrecisionPath",
    "StackedCurvature",
    "WeightGaussian",
    "in_float64",
]

DOUBLE_UP_TO = 4096  # matrices up to this size are summed and factored in float64


class WeightGaussian(Protocol):
    """A zero-mean Gaussian over n weights."""

    def rows_at_once(self, jacobian: Jacobian) -> int:
        """How many rows a pass for a covariance or for shifts should take."""

    @property
    def prior(self) -> Tensor:
        """Prior precisions, [n]."""

    def covariance(self, row_pass: RowPass, joint: bool = False) -> Tensor:
        """Covariance of J delta: of each row's D outputs [B, D, D], or of all rows together [B D, B D]."""

    def deltas(self, count: int, rng: torch.Generator) -> Tensor:
        """Draws of delta, [count, n], in the Gaussian's own coordinates."""

    def shifts(self, row_pass: RowPass, deltas: Tensor) -> Tensor:
        """J delta for each draw, [count, B, D]."""

    def weights(self, deltas: Tensor) -> Tensor:
        """The weights [count, n] that draws in the Gaussian's own coordinates stand for."""

    def covariance_root(self) -> Tensor:
        """A root R [n, n] of the covariance in the weights themselves: R^T R = P^-1."""

    def log_det(self) -> float:
        """Log determinant of the precision P."""

    def variances(self) -> Tensor:
        """The diagonal of P^-1, [n]."""

    def tensors(self) -> Params:
        """The tensors that a posterior stores of it."""

    def curvature(self) -> "Curvature":
        """The data's part of the precision."""


class PrecisionPath(Protocol):
    """The Gaussians of curvature + scale diag(prior) for any scale."""

    def rows_at_once(self, jacobian: Jacobian) -> int:
        """How many rows a pass for covariances should take."""

    @property
    def lowest(self) -> float:
        """The least scale at which the precision is positive definite beyond rounding."""

    def covariances(self, row_pass: RowPass, scales: Sequence[float]) -> Tensor:
        """Covariance of each row's outputs for each scale, [K, B, D, D]."""

    def log_det(self, scale: float) -> float:
        """Log determinant of the precision at one scale."""


class Curvature(Protocol):
    """The data's part of a precision."""

    form: ClassVar[str]  # what a person is told

    def gaussian(self, prior: Tensor) -> WeightGaussian:
        """The Gaussian with these prior precisions, [n]."""

    def path(self, prior: Tensor) -> PrecisionPath:
        """All multiples of these prior precisions at once."""

    def times(self, factor: float) -> "Curvature":
        """The curvature times a number, as for rows that carry more or less information than was assumed."""

    def tensors(self) -> Params:
        """The sums that a pass over the data makes, which add up over data."""


@dataclass(frozen=True)
class DenseGaussian:
    """A full precision matrix, factored once."""

    cholesky: Tensor  # lower triangular, cholesky @ cholesky.T = P
    prior: Tensor

    def rows_at_once(self, jacobian: Jacobian) -> int:
        """How many rows a pass should take, as the gradients of all their outputs fit."""
        return jacobian.rows_at_once(jacobian.plan.outputs)

    def _whitened(self, j: Tensor) -> Tensor:
        """J L^-T, [..., n]: the coefficients of J delta in independent standard normals."""
        flat = j.flatten(0, -2)
        solved = torch.linalg.solve_triangular(self.cholesky.to(flat.dtype), flat.T, upper=False).T
        return solved.reshape(j.shape)

    def covariance(self, row_pass: RowPass, joint: bool = False) -> Tensor:
        """J P^-1 J^T as half half^T, with half = J L^-T."""
        more_rows_than_weights = row_pass.outputs.numel() > len(self.prior)
        if more_rows_than_weights and row_pass.features() is not None:  # the inverse is less work than solving for J
            half = row_pass.times(self._inverse)
        else:
            half = self._whitened(row_pass.rows())
        half = half.flatten(0, 1) if joint else half
        return half @ half.mT

    @cached_property
    def _inverse(self) -> Tensor:
        """L^-T, [n, n]: n^3 work, for many predictions."""
        one = torch.eye(len(self.prior), dtype=self.cholesky.dtype, device=self.cholesky.device)
        return torch.linalg.solve_triangular(self.cholesky.mT, one, upper=True)

    def deltas(self, count: int, rng: torch.Generator) -> Tensor:
        """L^-T z with z standard normal."""
        z = normals((len(self.prior), count), rng, self.cholesky)
        return torch.linalg.solve_triangular(self.cholesky.mT, z, upper=True).T

    def shifts(self, row_pass: RowPass, deltas: Tensor) -> Tensor:
        """J delta for each draw, [count, B, D]."""
        return torch.movedim(row_pass.times(deltas.T), -1, 0)

    def weights(self, deltas: Tensor) -> Tensor:
        """The draws themselves: the coordinates are weights."""
        return deltas

    def covariance_root(self) -> Tensor:
        """L^-1, since P^-1 = L^-T L^-1."""
        return self._inverse.mT

    def log_det(self) -> float:
        """Twice the sum of the logs of the factor's diagonal."""
        return 2 * float(self.cholesky.diagonal().double().log().sum())

    def variances(self) -> Tensor:
        """The diagonal of P^-1, [n]."""
        return torch.cholesky_inverse(self.cholesky).diagonal()

    def tensors(self) -> Params:
        """The Cholesky factor [n, n] and the prior precisions [n]."""
        return {"cholesky": self.cholesky, "prior": self.prior}

    def curvature(self) -> "FullCurvature":
        """The data's part of the precision: P less the prior."""
        factor = in_float64(self.cholesky)
        precision = factor @ factor.mT
        precision.diagonal().sub_(self.prior.to(factor))
        return FullCurvature(precision)


@dataclass(frozen=True)
class FullCurvature:
    """A GGN matrix, [n, n]."""

    ggn: Tensor
    form: ClassVar[str] = "full"

    def gaussian(self, prior: Tensor) -> DenseGaussian:
        """The Gaussian of precision GGN + diag(prior), factored."""
        return DenseGaussian(_factored(in_float64(self.ggn, copy=True), prior).to(prior.dtype), prior)

    def path(self, prior: Tensor) -> "_Spectrum":
        """One eigendecomposition of the GGN in units of the prior: its eigenvalues plus the scale are all there is."""
        wide = in_float64(self.ggn, copy=True)
        root = prior.to(wide).sqrt()
        values, vectors = _eigh(wide.div_(root).div_(root.unsqueeze(1)))
        scaled = vectors.div_(root.unsqueeze(1)).to(prior.dtype)
        lowest = max(-2 * float(values[0]), torch.finfo(values.dtype).eps * float(values[-1]))
        return _Spectrum(values.clamp_min(0), scaled, 2 * float(root.log().sum()), lowest)

    def times(self, factor: float) -> "FullCurvature":
        """The curvature times a number."""
        return FullCurvature(self.ggn * factor)

    def tensors(self) -> Params:
        """The GGN matrix, [n, n]."""
        return {"ggn": self.ggn}


@dataclass(frozen=True)
class _Spectrum:
    values: Tensor  # [n]
    vectors: Tensor  # [n, n], scaled by the root of the prior
    log_det_prior: float
    lowest: float  # what rounding made of the smallest eigenvalues, and a little more

    def rows_at_once(self, jacobian: Jacobian) -> int:
        return jacobian.rows_at_once(jacobian.plan.outputs)

    def covariances(self, row_pass: RowPass, scales: Sequence[float]) -> Tensor:
        rotated = row_pass.times(self.vectors)
        values = self.values.to(rotated.dtype)
        return torch.stack([(rotated / (values + scale)) @ rotated.mT for scale in scales])

    def log_det(self, scale: float) -> float:
        return float((self.values.double() + scale).log().sum()) + self.log_det_prior


@dataclass(frozen=True)
class LowRankGaussian:
    """A diagonal precision and m rows, P = diag(prior) + rows^T rows: the dual form, or an approximation of rank m.

    P^-1 = D^-1 - D^-1 rows^T K^-1 rows D^-1  with  D = diag(prior), K = I + rows D^-1 rows^T = cholesky cholesky^T
    """

    rows: Tensor  # [m, n]
    cholesky: Tensor  # [m, m], lower triangular; float64 where it is small, see `StackedCurvature`
    prior: Tensor

    def rows_at_once(self, jacobian: Jacobian) -> int:
        """How many rows a pass should take, as the gradients of all their outputs fit."""
        return jacobian.rows_at_once(jacobian.plan.outputs)

    def covariance(self, row_pass: RowPass, joint: bool = False) -> Tensor:
        """J D^-1 J^T - (J D^-1 rows^T) K^-1 (rows D^-1 J^T)."""
        j = row_pass.rows()
        if self.rows.numel() + j.numel() < 2**26:
            j = j.double()  # two large terms nearly cancel where the data say much
        j = j.flatten(0, 1) if joint else j
        scaled = j / self.prior.to(j.dtype)
        part = (scaled @ self.rows.to(j.dtype).T).flatten(0, -2)  # [..., m]
        solved = torch.linalg.solve_triangular(self.cholesky.to(j.dtype), part.T, upper=False).T
        half = solved.reshape(*j.shape[:-1], -1)
        return (scaled @ j.mT - half @ half.mT).to(row_pass.outputs.dtype)

    def deltas(self, count: int, rng: torch.Generator) -> Tensor:
        """As u - D^-1 rows^T K^-1 (rows u + e) with u ~ N(0, D^-1), e standard normal: conditioning a prior draw."""
        u = normals((count, len(self.prior)), rng, self.rows) / self.prior.to(self.rows.dtype).sqrt()
        e = normals((count, len(self.rows)), rng, self.rows)
        target = (u @ self.rows.T + e).T.to(self.cholesky.dtype)
        solved = torch.cholesky_solve(target, self.cholesky).T.to(self.rows.dtype)
        return u - (solved @ self.rows) / self.prior.to(self.rows.dtype)

    def shifts(self, row_pass: RowPass, deltas: Tensor) -> Tensor:
        """J delta for each draw, [count, B, D]."""
        return torch.movedim(row_pass.times(deltas.T), -1, 0)

    def weights(self, deltas: Tensor) -> Tensor:
        """The draws themselves: the coordinates are weights."""
        return deltas

    def covariance_root(self) -> Tensor:
        """The symmetric root in units of the prior, times D^-1/2.

        With W = rows D^-1/2 = U s V^T, P^-1 = D^-1/2 (I - V diag(1 - 1 / (1 + s^2)) V^T) D^-1/2, and the symmetric root
        of what is between has 1 - 1 / sqrt(1 + s^2) in the place of the diagonal.
        """
        scale = self.prior.double().rsqrt()
        _, singular, basis = torch.linalg.svd(self.rows.double() * scale, full_matrices=False)
        shrink = 1 - (1 + singular.square()).rsqrt()
        root = -(basis.T * shrink) @ basis
        root.diagonal().add_(1)
        return (root * scale).to(self.rows.dtype)

    def log_det(self) -> float:
        """The log determinant of P, which is log|D| + log|K|."""
        return float(self.prior.double().log().sum()) + 2 * float(self.cholesky.diagonal().double().log().sum())

    def variances(self) -> Tensor:
        """The diagonal of P^-1, [n], by Woodbury's identity."""
        solved = torch.linalg.solve_triangular(self.cholesky, self.rows.to(self.cholesky.dtype), upper=False)
        half = solved / self.prior.to(solved)
        return (1 / self.prior.to(half) - half.square().sum(0)).to(self.rows.dtype)

    def tensors(self) -> Params:
        """The rows [m, n], the Cholesky factor [m, m] and the prior precisions [n]."""
        return {"rows": self.rows, "cholesky": self.cholesky, "prior": self.prior}

    def curvature(self) -> "StackedCurvature":
        """The data's part of the precision."""
        return StackedCurvature(self.rows)


@dataclass(frozen=True)
class StackedCurvature:
    """A GGN as rows^T rows, with fewer rows than weights."""

    rows: Tensor
    form: ClassVar[str] = "rows"

    def gaussian(self, prior: Tensor) -> LowRankGaussian:
        """The Gaussian of precision rows^T rows + diag(prior); only K, [m, m], is factored."""
        return self._with(self._inner(prior), prior)

    def path(self, prior: Tensor) -> "_DualSpectrum":
        """One eigendecomposition of the rows' inner products in units of the prior."""
        values, vectors = _eigh(self._inner(prior))
        return _DualSpectrum(self.rows, prior, values.clamp_min(0), vectors)

    def times(self, factor: float) -> "StackedCurvature":
        """The curvature times a number."""
        return StackedCurvature(self.rows * factor**0.5)

    def _inner(self, prior: Tensor) -> Tensor:
        """Rows D^-1 rows^T; nearly singular where rows say the same, so in float64 where it is small."""
        m = len(self.rows)
        total = self.rows.new_zeros(m, m, dtype=torch.float64 if m <= DOUBLE_UP_TO else None)
        for rows, precisions in zip(self.rows.split(2**10, 1), prior.split(2**10), strict=True):
            scaled = rows.to(total.dtype) / precisions.to(total).sqrt()
            total.addmm_(scaled, scaled.T)
        return total

    def _with(self, inner: Tensor, prior: Tensor) -> LowRankGaussian:
        return LowRankGaussian(self.rows, _factored(inner, torch.ones_like(inner[0])), prior)

    def tensors(self) -> Params:
        """The rows, [m, n]."""
        return {"rows": self.rows}


@dataclass(frozen=True)
class _DualSpectrum:
    """J P^-1 J^T = (J D^-1 J^T - sum_i b_i b_i^T / (values_i + scale)) / scale  with  b = J D^-1 rows^T vectors."""

    rows: Tensor  # [m, n]
    prior: Tensor
    values: Tensor  # [m], of rows D^-1 rows^T
    vectors: Tensor  # [m, m]

    @property
    def lowest(self) -> float:
        return 10 * torch.finfo(self.values.dtype).eps * float(self.values[-1])

    def rows_at_once(self, jacobian: Jacobian) -> int:
        return jacobian.rows_at_once(jacobian.plan.outputs)

    def covariances(self, row_pass: RowPass, scales: Sequence[float]) -> Tensor:
        j = row_pass.rows().to(self.values.dtype)  # two large terms nearly cancel where the data say much
        scaled = j / self.prior.to(j)
        rotated = scaled @ self.rows.to(j.dtype).T @ self.vectors
        before = scaled @ j.mT
        by_scale = [(before - (rotated / (self.values + scale)) @ rotated.mT) / scale for scale in scales]
        return torch.stack(by_scale).to(row_pass.outputs.dtype)

    def log_det(self, scale: float) -> float:
        prior = float((scale * self.prior.double()).log().sum())
        return prior + float((1 + self.values.double() / scale).log().sum())


def in_float64(matrix: Tensor, copy: bool = False) -> Tensor:
    """The matrix in the type in which it is factored: float64 where that is affordable."""
    return matrix.to(torch.float64 if len(matrix) <= DOUBLE_UP_TO else matrix.dtype, copy=copy)


def _factored(precision: Tensor, prior: Tensor) -> Tensor:
    """The Cholesky factor of precision + diag(prior), in the place of the matrix."""
    precision.diagonal().add_(prior.to(precision))
    lowest = float(precision.diagonal().min())
    # The upper factor of a matrix stored by columns is the lower one stored by rows: nothing is copied, and the layout
    # is as it will be when loaded, on which a solve's last bits depend.
    failed = torch.empty((), dtype=torch.int32, device=precision.device)
    torch.linalg.cholesky_ex(precision.mT, upper=True, out=(precision.mT, failed))
    if int(failed) or not bool(precision.diagonal().isfinite().all()):
        raise ValueError(
            f"the posterior's precision matrix ({len(precision):,} weights) is not positive definite (its smallest "
            f"diagonal entry is {lowest:.3g}, the prior's precision {float(prior.min()):.3g}): raise the prior's "
            "precision, or compute in float64 or with arithmetic='full'"
        )
    return precision


def _eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, and eigenvectors in the place of the matrix."""
    values = torch.empty(len(matrix), dtype=matrix.dtype, device=matrix.device)
    torch.linalg.eigh(matrix.mT, out=(values, matrix.mT))
    return values, matrix.mT
