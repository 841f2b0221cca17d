"""A Bayesian linear model known by products with its features: its systems of equations, samples and evidence.

    y_i = phi_i theta + eps_i,  eps_i ~ N(0, B_i^-1),  theta ~ N(0, A^-1);   posterior N(mean, H^-1)
    M = Phi^T B Phi,   H = M + A,   H mean = Phi^T B y,   H z = A theta_0 + Phi^T R e   gives   z ~ N(0, H^-1)

with B_i = R_i R_i^T, e standard normal and theta_0 ~ N(0, A^-1). Neither an inverse nor a root of B is needed, and e is
computed anew whenever a row needs it (`counted_normals`). The effective dimension is gamma = tr(H^-1 M) = E[z^T M z].
Nothing larger than K vectors of parameters is stored, whatever the number of rows.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from caveat.engine.cost import refuse_if_too_large
from caveat.engine.linear_model.counted_normals import standard_normals
from caveat.engine.linear_model.features import (
    Features,
    NoisePrecision,
    RowBlock,
    ScaledFeatures,
    apply_factor,
    apply_factor_transposed,
)

__all__ = [
    "DENSE_UP_TO",
    "LinearModel",
    "LinearSystem",
    "RowValues",
    "SampleRandomness",
    "g_prior",
    "inner",
    "log_determinant",
    "misfit",
    "pulled_rows",
    "regression_system",
    "units",
]

RowValues = Callable[[RowBlock], Tensor]  # values of a block's rows, [K, B, r] or [K, B, m]
DENSE_UP_TO = 5000  # the side of a matrix that is worth factorising
ROUNDING = 8  # a root of a curvature below so many units of rounding, of the largest, is taken for a zero


@dataclass(frozen=True)
class LinearModel:
    """The features of a linear model, its noise and its prior."""

    features: Features
    noise: NoisePrecision
    precision: Tensor  # the diagonal of A, [d], or [1] for all

    def curvature(self, z: Tensor) -> Tensor:
        """The products M z of K vectors [K, d], in one pass over the rows."""
        total = torch.zeros_like(z)
        for block in self.features.blocks():
            total += self.block_curvature(block, z)
        return total

    def block_curvature(self, block: RowBlock, z: Tensor) -> Tensor:
        """The part of M z that comes from a block's rows, for K vectors [K, d]."""
        factor = self.noise.factor(block)
        return block.backward(apply_factor(factor, apply_factor_transposed(factor, block.forward(z))))

    def product(self, z: Tensor) -> Tensor:
        """The products H z of K vectors [K, d]."""
        return self.curvature(z).addcmul_(z, self.precision)

    def pulled(self, e: RowValues) -> Tensor:
        """Phi^T R e, [K, d], for values e of the rows."""
        total: Tensor | None = None
        for block in self.features.blocks():
            part = block.backward(apply_factor(self.noise.factor(block), e(block)))
            total = part if total is None else total.add_(part)
        assert total is not None
        return total

    def check_finite(self) -> None:
        """Raise an error that names the first row whose products are NaN or infinite, if there is one."""
        for block in self._not_finite(None):
            for row in self._not_finite(block.index.split(1)):
                raise ValueError(
                    f"the features of row {int(row.index)} give products that hold NaN or infinity: look at that row, "
                    "at the noise given to it, and whether the numbers fit the type "
                    f"({str(self.features.dtype).removeprefix('torch.')})"
                )

    def _not_finite(self, order: Sequence[Tensor] | None) -> Iterator[RowBlock]:
        z = torch.ones(1, self.features.size, dtype=self.features.dtype, device=self.features.device)
        for block in self.features.blocks(order):
            if not self.block_curvature(block, z).isfinite().all():
                yield block

    def with_precision(self, precision: Tensor) -> "LinearModel":
        """The same rows under a prior of another precision, [d] or [1]."""
        return replace(self, precision=precision)


@dataclass(frozen=True)
class LinearSystem:
    """H z = A prior + Phi^T R e for K unknown z, with e a function of the rows (None: zero)."""

    right: Tensor  # the right-hand side, [K, d]
    prior: Tensor  # [K, d]
    noise: RowValues | None = None

    @classmethod
    def of(cls, model: LinearModel, right: Tensor) -> "LinearSystem":
        """The system with any right-hand side [K, d], as one with a prior alone."""
        return cls(right, right / model.precision)

    def take(self, columns: Tensor) -> "LinearSystem":
        """The system of some of the unknowns."""
        noise = self.noise
        fewer: RowValues | None = None if noise is None else lambda block: noise(block)[columns]
        return LinearSystem(self.right[columns], self.prior[columns], fewer)

    def beside(self, other: "LinearSystem") -> "LinearSystem":
        """The system of the unknowns of both, to be solved together."""

        def both(block: RowBlock) -> Tensor:
            values = [None if noise is None else noise(block) for noise in (self.noise, other.noise)]
            like = next(e for e in values if e is not None)
            counts = (len(self.right), len(other.right))
            return torch.cat(
                [like.new_zeros(k, *like.shape[1:]) if e is None else e for k, e in zip(counts, values, strict=True)]
            )

        right, prior = torch.cat([self.right, other.right]), torch.cat([self.prior, other.prior])
        return LinearSystem(right, prior, None if self.noise is None and other.noise is None else both)


class SampleRandomness:
    """The randomness of K posterior samples, fixed by a seed and the same for every prior precision.

    Making it takes one pass over the rows (backward only), because Phi^T R e does not depend on the prior.
    """

    def __init__(self, model: LinearModel, samples: int | Sequence[int], seed: int = 0) -> None:
        self.samples = range(samples) if isinstance(samples, int) else samples
        self.seed, self._width, self._dtype = seed, model.noise.width, model.features.dtype
        places = torch.arange(model.features.size, device=model.features.device)
        self._unit = standard_normals(seed, "parameters", self.samples, places, self._dtype)
        self._pulled = model.pulled(self.noise)

    def noise(self, block: RowBlock) -> Tensor:
        """The standard normal e of a block's rows, [K, B, r]."""
        columns = torch.arange(self._width, device=block.index.device)
        places = block.index.unsqueeze(1) * self._width + columns
        return standard_normals(self.seed, "rows", self.samples, places, self._dtype)

    def system(self, model: LinearModel) -> LinearSystem:
        """The system whose solutions are the samples, under the model's prior."""
        root = model.precision.sqrt()
        return LinearSystem(self._pulled + self._unit * root, self._unit / root, self.noise)


def regression_system(model: LinearModel, targets: Tensor) -> LinearSystem:
    """The system whose solution is the posterior mean, H mean = Phi^T B y, for targets [n, m]."""

    def e(block: RowBlock) -> Tensor:
        return apply_factor_transposed(model.noise.factor(block), targets[block.index].unsqueeze(0))

    right = model.pulled(e)
    return LinearSystem(right, torch.zeros_like(right), e)


def inner(a: Tensor, b: Tensor) -> Tensor:
    """The inner product of each pair of rows, summed in float64, [K]."""
    return (a * b).sum(-1, dtype=torch.float64)


def g_prior(model: LinearModel) -> LinearModel:
    """The model with its features scaled so that every parameter has a curvature of 1; takes n r products backward."""
    features = model.features
    diagonal = torch.zeros(features.size, dtype=torch.float64, device=features.device)
    for rows in pulled_rows(model):
        diagonal += rows.double().square().sum(0)
    return replace(model, features=ScaledFeatures(features, units(diagonal, features.dtype).to(features.dtype)))


def units(diagonal: Tensor, dtype: torch.dtype) -> Tensor:
    """One over the root of each parameter's curvature, of features in a type; zero where it has none: it is left out.

    Nor has it any where that is what rounding leaves of a zero, as for the bias of an attention's keys, which moves no
    output: in units of it draws would be of any size, and the products of features with them nothing but rounding.
    """
    least = (ROUNDING * torch.finfo(dtype).eps) ** 2 * diagonal.max()
    return torch.where(diagonal > least, diagonal.rsqrt(), 0.0)


def log_determinant(model: LinearModel) -> float:
    """The logarithm of det(I + A^-1 M), computed from a matrix over parameters or over rows, whichever is smaller."""
    features, r = model.features, model.noise.width
    side = min(features.size, features.rows * r)
    if side > DENSE_UP_TO:
        raise ValueError(
            f"the evidence needs a matrix of side {side:,} (the smaller of {features.size:,} parameters and "
            f"{features.rows * r:,} outputs), more than {DENSE_UP_TO:,}: compare models on held-out rows instead, or "
            "use fewer features"
        )
    root = model.precision.double().rsqrt()
    if side == features.size:
        unit = torch.eye(side, dtype=features.dtype, device=features.device)
        columns = torch.cat([model.curvature(part) for part in unit.split(256)]).double()
        gram = root.expand(side).unsqueeze(1) * columns * root
    else:
        advice = "compare models on held-out rows instead"
        refuse_if_too_large("the evidence", 24 * side * features.size, features.device, advice)
        rows = torch.cat(list(pulled_rows(model))).double() * root
        gram = rows @ rows.T
    eigenvalues = torch.linalg.eigvalsh((gram + gram.T) / 2).clamp_min(0)
    return float(eigenvalues.log1p().sum())


def pulled_rows(model: LinearModel) -> Iterator[Tensor]:
    """R_i^T phi_i of every row, as [B r, d] for a few rows at a time, by B r products with the block."""
    features, r = model.features, model.noise.width
    for block in features.blocks(torch.arange(features.rows, device=features.device).split(8)):
        unit = torch.eye(len(block.index) * r, dtype=features.dtype, device=features.device)
        yield block.backward(apply_factor(model.noise.factor(block), unit.unflatten(1, (-1, r))))


def misfit(model: LinearModel, targets: Tensor, mean: Tensor) -> float:
    """The misfit |y - Phi mean|^2_B for targets [n, m] and a mean [d], summed in float64."""
    total = torch.zeros((), dtype=torch.float64, device=mean.device)
    for block in model.features.blocks():
        error = targets[block.index] - block.forward(mean.unsqueeze(0))
        total += apply_factor_transposed(model.noise.factor(block), error).double().square().sum()
    return float(total)
