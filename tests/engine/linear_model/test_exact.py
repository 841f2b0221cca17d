"""The exact solver against dense float64 references: any prior, any right-hand side, what is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor

from caveat.engine.linear_model import (
    ConjugateGradients,
    DenseFeatures,
    Exact,
    LinearModel,
    LinearSystem,
    RowNoise,
    SampleRandomness,
    exact,
)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


PHI = normal(12, 3, 50)
FACTORS: dict[str, Tensor] = {"full": normal(12, 3, 2, seed=1), "diagonal": normal(12, 3, seed=2).abs()}
PRECISIONS = {"one": torch.tensor([0.3], dtype=torch.float64), "each": normal(50, seed=3).exp()}


def model_of(noise: str = "full", precision: str = "one", dtype: torch.dtype = torch.float64) -> LinearModel:
    features = DenseFeatures(PHI.to(dtype), block_rows=5)
    return LinearModel(features, RowNoise(FACTORS[noise].to(dtype)), PRECISIONS[precision].to(dtype))


def dense_precision(noise: str, precision: str) -> Tensor:
    factor = FACTORS[noise]
    R = factor.diag_embed() if factor.ndim == 2 else factor
    rows = torch.einsum("nmr,nmd->nrd", R, PHI).flatten(0, 1)
    return rows.T @ rows + PRECISIONS[precision].expand(50).diag()


@pytest.mark.parametrize("noise", FACTORS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_samples_and_any_right_hand_side_are_solved_exactly(noise: str, precision: str) -> None:
    model, H = model_of(noise, precision), dense_precision(noise, precision)
    prepared = Exact().prepare(model)
    system = SampleRandomness(model, 4, seed=0).system(model)
    anything = LinearSystem.of(model, normal(3, 50, seed=5))
    for given in (system, anything, system.beside(anything)):
        solution = prepared.solve(model, given)
        wanted = torch.linalg.solve(H, given.right.T).T
        torch.testing.assert_close(solution.z, wanted)
        torch.testing.assert_close(solution.image, wanted @ (H - PRECISIONS[precision].expand(50).diag()))
        assert solution.report.converged
        assert float(solution.report.residuals.max()) < 1e-10
    v = normal(2, 50, seed=6)
    torch.testing.assert_close(prepared.preconditioner(model.precision)(v), torch.linalg.solve(H, v.T).T)


def test_other_priors_take_the_same_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    model, made = model_of(), []
    real = exact._gram
    monkeypatch.setattr(exact, "_gram", lambda *a: (made.append(1), real(*a))[1])
    prepared = Exact().prepare(model)
    stored: Any = Exact().prepare(model, stored=prepared.tensors())
    for value in (0.01, 5.0, 0.01):
        other = model.with_precision(torch.tensor([value], dtype=torch.float64))
        system = SampleRandomness(other, 2, seed=0).system(other)
        H = dense_precision("full", "one") + (value - 0.3) * torch.eye(50).double()
        for solver in (prepared, stored):
            torch.testing.assert_close(solver.solve(other, system).z, torch.linalg.solve(H, system.right.T).T)
    assert len(made) == 1
    H = dense_precision("full", "one") - 0.3 * torch.eye(50).double()
    assert 0.9 < prepared.top / float(torch.linalg.eigvalsh(H)[-1]) <= 1.0001


def test_samples_are_those_of_conjugate_gradients() -> None:
    model = model_of()
    system = SampleRandomness(model, 4, seed=0).system(model)
    gradients = ConjugateGradients(tolerance=1e-10).prepare(model).solve(model, system)
    torch.testing.assert_close(Exact().prepare(model).solve(model, system).z, gradients.z)


@pytest.mark.parametrize(("precision", "fine"), [(1e-2, True), (1e-9, False)])
def test_single_precision_is_told_where_it_is_too_coarse(precision: float, fine: bool) -> None:
    model = model_of(dtype=torch.float32).with_precision(torch.tensor([precision]))
    system = SampleRandomness(model, 2, seed=0).system(model)
    solution = Exact(tolerance=1e-3 if fine else 1e-9).prepare(model).solve(model, system)
    assert solution.report.converged is fine
    assert solution.report.stood_still is not fine
    assert any("ConjugateGradients() needs none" in text for text in solution.report.warnings) is not fine
    if fine:
        H = dense_precision("full", "one") + (precision - 0.3) * torch.eye(50).double()
        wanted = torch.linalg.solve(H, system.right.double().T).T
        assert float((solution.z - wanted).norm() / wanted.norm()) < 1e-3


def test_too_many_rows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(exact.EXACT_UP_TO, "cpu", 23)
    with pytest.raises(ValueError, match=r"matrix of side 24 .*more than 23: use ConjugateGradients\(\)"):
        Exact().prepare(model_of())


def test_a_matrix_too_coarse_for_a_weak_prior_takes_a_solve_no_further_off() -> None:
    model = model_of()
    one = model.with_precision(torch.ones(1, dtype=torch.float64))
    gram = Exact().prepare(one).gram
    error = 1e-3 * normal(*gram.shape, seed=7)
    coarse = Exact().prepare(model, stored={"gram": gram + error + error.T})
    weak = model.with_precision(torch.full((1,), 1e-4, dtype=torch.float64))
    report = coarse.solve(weak, SampleRandomness(weak, 4, seed=0).system(weak)).report
    seen = [residual for _, residual in report.history]
    assert seen[-1] > seen[0], "it would go further off"
    assert float(report.residuals.max()) == min(seen)
    assert not report.converged
