"""Solves H z = b through a matrix over rows and outputs: exact, and quick where there are some thousands of these.

    H z = A u + Phi^T e   has   z = u + A^-1 Phi^T (I + G)^-1 (e - Phi u),   G = Phi A^-1 Phi^T [N, N]

with Phi = R^T phi of all rows, N = rows * r (Woodbury's identity). G takes N products once for all priors of one
precision, and each solve a factor of I + G in float64, whose eigenvalues are not below 1. What single precision of the
products leaves is taken off by solving again for the residual.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from caveat.engine.cost import refuse_if_too_large
from caveat.engine.linear_model.features import apply_factor_transposed
from caveat.engine.linear_model.model import LinearModel, LinearSystem, inner, pulled_rows
from caveat.engine.linear_model.solvers import ProductCounter, Progress, Solution, SolveReport, relative
from caveat.knobs import Positive, check_knobs

__all__ = ["EXACT_UP_TO", "Exact", "PreparedExact"]

EXACT_UP_TO = {"cpu": 5000, "cuda": 2**15}  # the side of a matrix that is factorised, again for each precision tried
_AGAIN = 3  # solves for the residual, at most
_POWERS = 30  # products with G for its largest eigenvalue


@dataclass(frozen=True)
class Exact:
    """The exact solution, where rows times outputs are some thousands."""

    tolerance: Positive = 1e-3  # the relative residual above which a warning says that single precision is too coarse

    def __post_init__(self) -> None:
        check_knobs(self)

    def prepare(
        self,
        model: LinearModel,
        seed: int = 0,
        stored: dict[str, Tensor] | None = None,
        counted: ProductCounter | None = None,
    ) -> "PreparedExact":
        """Make G for a precision of one, or take what was stored; nothing is random, so the seed does not matter."""
        side, most = model.features.rows * model.noise.width, EXACT_UP_TO[model.features.device.type]
        if side > most:
            raise ValueError(
                f"an exact solve needs a matrix of side {side:,} (rows x outputs), more than {most:,}: use "
                "ConjugateGradients()"
            )
        one = model.with_precision(torch.ones_like(model.precision[:1]))
        return PreparedExact(self, model, _gram(one, counted) if stored is None else stored["gram"])


class PreparedExact:
    """The matrix G of a model's rows for a precision of one."""

    progress: Progress | None

    def __init__(self, knobs: Exact, model: LinearModel, gram: Tensor) -> None:
        self.knobs, self.model, self.gram, self.progress = knobs, model, gram, None
        self.top, self.preparation = _top(gram), float(model.noise.width)
        self._factor: tuple[Tensor, Tensor] | None = None  # of I + G, and the precision that it is for

    def tensors(self) -> dict[str, Tensor]:
        """The matrix."""
        return {"gram": self.gram}

    def preconditioner(self, precision: Tensor) -> Callable[[Tensor], Tensor]:
        """The function v [K, d] -> H^-1 v."""
        model = self.model.with_precision(precision)
        factor = self._of_precision(model)

        def solve(v: Tensor) -> Tensor:
            return _solved(model, factor, v / precision, None)

        return solve

    def solve(self, model: LinearModel, system: LinearSystem, start: Tensor | None = None) -> Solution:
        """Solve for all unknowns; where they start does not matter."""
        factor, report = self._of_precision(model), SolveReport()
        z = _solved(model, factor, system.prior, system)
        squares = inner(system.right, system.right)
        best: tuple[Tensor, Tensor, Tensor] | None = None
        for _ in range(_AGAIN):
            image = model.curvature(z)
            residual = system.right - image - model.precision * z
            report.iterations, report.vectors = report.iterations + 1, report.vectors + 2 * len(z)
            report.residuals = relative(inner(residual, residual), squares)
            report.history.append((report.vectors, float(report.residuals.max())))
            if best is not None and not float(report.residuals.max()) < float(best[2].max()):
                z, image, report.residuals = best  # G is too coarse for so weak a prior: steps lead further off
                break
            best = z, image, report.residuals
            if float(report.residuals.max()) <= self.knobs.tolerance / 10 or report.iterations == _AGAIN:
                break
            z = z + _solved(model, factor, residual / model.precision, None)
        report.converged = bool((report.residuals <= self.knobs.tolerance).all())
        report.stood_still = not report.converged
        if not report.converged:
            report.warnings.append(
                "the matrix over rows and outputs has too few digits for so weak a prior: solver=ConjugateGradients() "
                "needs none"
            )
        if self.progress is not None:
            self.progress(report.passes, float(report.residuals.max()))
        return Solution(z, image, report)

    def _of_precision(self, model: LinearModel) -> Tensor:
        """The Cholesky factor of I + G under a model's prior."""
        precision = model.precision
        if self._factor is None or not torch.equal(self._factor[1], precision):
            gram = self.gram / precision.double() if len(precision) == 1 else _gram(model, None)
            gram.diagonal().add_(1)
            factor, failed = torch.linalg.cholesky_ex(gram)
            while failed:  # by the rounding of products in single precision, beside a weak prior
                gram.diagonal().add_(torch.finfo(precision.dtype).eps * float(gram.diagonal().mean()))
                factor, failed = torch.linalg.cholesky_ex(gram)
            self._factor = factor, precision
        return self._factor[0]


def _solved(model: LinearModel, factor: Tensor, u: Tensor, system: LinearSystem | None) -> Tensor:
    """The solution z of H z = A u + Phi^T e, with the e of a system, or zero; [K, d]."""
    noise, left = None if system is None else system.noise, []
    for block in model.features.blocks():
        seen = apply_factor_transposed(model.noise.factor(block), block.forward(u))
        left.append(-seen if noise is None else noise(block) - seen)
    misfit = torch.cat(left, 1)  # [K, rows, r]
    solved = torch.cholesky_solve(misfit.flatten(1).T.double(), factor).T.to(u.dtype).reshape(misfit.shape)
    return u + model.pulled(lambda block: solved[:, block.index]) / model.precision


def _gram(model: LinearModel, counted: ProductCounter | None) -> Tensor:
    """G [N, N] in float64, by a product with each row of Phi."""
    features = model.features
    side = features.rows * model.noise.width
    advice = "give the solver as ConjugateGradients()"
    refuse_if_too_large(f"an exact solve for {side:,} rows x outputs", 24 * side**2, features.device, advice)
    rows: list[Tensor] = []
    for part in pulled_rows(model):
        seen = [
            apply_factor_transposed(model.noise.factor(block), block.forward(part / model.precision))
            for block in features.blocks()
        ]
        rows.append(torch.cat(seen, 1).flatten(1).double())
        if counted is not None:
            counted(sum(map(len, rows)), side)
    gram = torch.cat(rows)
    if not gram.isfinite().all():
        model.check_finite()
    return (gram + gram.T) / 2


def _top(gram: Tensor) -> float:
    """About the largest eigenvalue, from below."""
    v, value = gram.new_ones(len(gram)), 0.0
    for _ in range(_POWERS):
        v = gram @ (v / v.norm().clamp_min(1e-300))
        value = float(v.norm())
    return value
