"""Every solver finds what a dense solve finds; stopping, warm starts, and what each costs in passes."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from caveat.engine.cost import peak_bytes, reset_peak
from caveat.engine.linear_model.conjugate_gradients import ConjugateGradients
from caveat.engine.linear_model.features import DenseFeatures, RowBlock, RowNoise
from caveat.engine.linear_model.mackay import unfinished_warnings
from caveat.engine.linear_model.model import LinearModel, LinearSystem, SampleRandomness
from caveat.engine.linear_model.nystrom import Nystrom, sketch, top_eigenvalue
from caveat.engine.linear_model.solvers import FinishRule, Solution, Solver
from caveat.engine.linear_model.stochastic_descent import StochasticDescent

EXACT: dict[str, Solver] = {
    "conjugate gradients": ConjugateGradients(rank=0, tolerance=1e-10),
    "with a sketch": ConjugateGradients(rank=10, tolerance=1e-10),
    "refreshed often": ConjugateGradients(rank=10, tolerance=1e-10, refresh=3),
    "plain, all rows at once": StochasticDescent("plain", 60, tolerance=1e-8, passes=4000),
    "reduced, all rows at once": StochasticDescent("reduced", 60, tolerance=1e-8, passes=4000),
    "dual, all rows at once": StochasticDescent("dual", 60, tolerance=1e-8, passes=4000),
    "dual, in batches": StochasticDescent("dual", 20, tolerance=1e-8, passes=4000),
}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def small(per_parameter: bool = False) -> LinearModel:
    """Sixty rows of two outputs with correlated noise, 25 parameters."""
    features = DenseFeatures(normal(60, 2, 25) * torch.linspace(1, 0.2, 25), 16)
    precision = 2 * normal(25, seed=2).mul(0.5).exp() if per_parameter else torch.tensor([1.5])
    return LinearModel(features, RowNoise(normal(60, 2, 2, seed=1)), precision.double())


@cache
def decaying(alpha: float = 0.3, dtype: torch.dtype = torch.float64) -> LinearModel:
    """2,000 rows of length one, 200 parameters, eigenvalues that fall as 1 / j^2: condition 3,000, 96 determined."""
    turned = torch.linalg.qr(normal(200, 200, seed=1))[0]
    phi = (normal(2000, 200) / torch.arange(1, 201)) @ turned
    phi = (phi / phi.norm(dim=1, keepdim=True)).to(dtype)
    noise = torch.ones(1, 1, dtype=dtype).expand(2000, 1)
    return LinearModel(DenseFeatures(phi, 2000), RowNoise(noise), torch.tensor([alpha], dtype=dtype))


def curvature(model: LinearModel) -> Tensor:
    return model.curvature(torch.eye(model.features.size, dtype=torch.float64))


def exact(model: LinearModel, system: LinearSystem) -> Tensor:
    H = curvature(model) + torch.diag(model.precision.expand(model.features.size))
    return torch.linalg.solve(H, system.right.T).T


def error(model: LinearModel, z: Tensor, solution: Tensor) -> float:
    """Relative to the solution, in the norm of H, over all unknowns."""
    e = z - solution
    return math.sqrt(float((model.product(e) * e).sum() / (model.product(solution) * solution).sum()))


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("per_parameter", [False, True])
def test_every_solver_finds_the_dense_solution(name: str, per_parameter: bool) -> None:
    model = small(per_parameter)
    system = SampleRandomness(model, 4, seed=7).system(model)
    solution = EXACT[name].prepare(model).solve(model, system)
    assert solution.report.converged
    torch.testing.assert_close(solution.z, exact(model, system), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(solution.image, model.curvature(solution.z), rtol=1e-5, atol=1e-6)
    assert solution.report.residuals.max() <= 1e-7


@pytest.mark.parametrize("name", EXACT)
def test_a_general_right_hand_side_needs_no_noise(name: str) -> None:
    model = small()
    system = LinearSystem.of(model, normal(2, 25, seed=5))
    solution = EXACT[name].prepare(model).solve(model, system)
    torch.testing.assert_close(solution.z, exact(model, system), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("objective", ["plain", "reduced"])
def test_descent_in_batches_comes_near(objective: str) -> None:
    model = decaying()
    system = SampleRandomness(model, 4).system(model)
    solver = StochasticDescent(objective, 100, tolerance=5e-2, passes=300)  # type: ignore[arg-type]
    solution = solver.prepare(model).solve(model, system)
    assert solution.report.converged
    assert error(model, solution.z, exact(model, system)) < 0.1


@pytest.mark.parametrize("name", EXACT)
def test_a_warm_start_saves_passes(name: str) -> None:
    model = small()
    system = SampleRandomness(model, 4, seed=7).system(model)
    prepared = EXACT[name].prepare(model)
    cold = prepared.solve(model, system)
    near = cold.z + 1e-5 * normal(4, 25)
    warm = prepared.solve(model, system, near)
    assert warm.report.passes < cold.report.passes
    there = prepared.solve(model, system, exact(model, system))
    assert there.report.passes <= 6  # one to find out, or what lies between two looks
    torch.testing.assert_close(warm.z, cold.z, rtol=1e-5, atol=1e-6)


def passes_to(model: LinearModel, solver: Solver, samples: int) -> tuple[float, Solution]:
    prepared = solver.prepare(model)
    solution = prepared.solve(model, SampleRandomness(model, samples).system(model))
    return solution.report.passes + prepared.preparation / samples, solution


def test_solvers_rank_as_on_a_network() -> None:
    """After ten passes: plain conjugate gradients, batches of L, of L' and of the dual, and a sketch that is best."""
    model = decaying()
    system = SampleRandomness(model, 4).system(model)
    solution = exact(model, system)

    def after(solver: Solver) -> float:
        return error(model, solver.prepare(model).solve(model, system).z, solution)

    def gradients(rank: int, passes: int) -> float:
        return after(ConjugateGradients(rank=rank, tolerance=1e-12, iterations=passes))

    def batches(objective: str, passes: int) -> float:
        knobs = {"tolerance": 1e-12, "passes": passes, "look_every": passes}
        return after(StochasticDescent(objective, 20, **knobs))  # type: ignore[arg-type]

    plain, reduced, dual = (batches(objective, 10) for objective in ("plain", "reduced", "dual"))
    assert gradients(0, 10) > 2 * plain
    assert plain > 1.5 * reduced
    assert reduced > dual > 2 * gradients(40, 10)
    # Given time, conjugate gradients overtake batches of L', whose noise does not die down by itself.
    assert gradients(0, 40) < batches("reduced", 40)
    assert gradients(10, 20) < gradients(0, 20) / 5


def test_stopping_early_widens_and_the_rule_does_not() -> None:
    model = decaying()
    mu = torch.linalg.eigvalsh(curvature(model))
    system = SampleRandomness(model, 8).system(model)
    true = exact(model, system)
    gamma = float((true * model.curvature(true)).sum(1).mean())
    assert gamma == pytest.approx(float((mu / (mu + model.precision)).sum()), rel=0.2)
    early = ConjugateGradients(rank=0, iterations=4).prepare(model).solve(model, system)
    assert not early.report.converged
    assert float(early.effective_dimension()) > 1.5 * gamma
    for rank in (0, 20):
        late = ConjugateGradients(rank=rank, tolerance=1e-2).prepare(model).solve(model, system)
        assert float(late.effective_dimension()) == pytest.approx(gamma, rel=0.01)


def test_predictive_variances_are_settled_when_it_stops() -> None:
    model = decaying()
    system, x = SampleRandomness(model, 32).system(model), normal(200, 50, seed=9)
    stopped = ConjugateGradients(rank=20).prepare(model).solve(model, system)
    twice = ConjugateGradients(rank=20, tolerance=1e-14, iterations=2 * stopped.report.iterations)
    further = twice.prepare(model).solve(model, system)
    variances = [(s.z @ x).square().mean(0) for s in (stopped, further)]
    assert ((variances[0] / variances[1]) - 1).abs().max() < 0.02


def test_finished_unknowns_take_no_more_products() -> None:
    model = decaying()
    system = SampleRandomness(model, 8).system(model)
    start = exact(model, system)
    start[7] = system.prior[7]
    report = ConjugateGradients(rank=0).prepare(model).solve(model, system, start).report
    assert report.converged
    assert report.vectors <= 8 + report.iterations * (1 + 1 / 50)
    batches = StochasticDescent("dual", 100, tolerance=1e-2).prepare(model).solve(model, system, start).report
    assert batches.converged
    assert batches.passes < 6 + batches.iterations / 20 / 8 * 1.3


def test_finish_wants_a_small_residual_and_rest() -> None:
    finish = FinishRule(1e-2, 1e-2)
    value = torch.tensor([100.0, 100.0])
    assert not finish(torch.tensor([5e-3, 5e-3]), value).any()  # a start says nothing of rest
    assert finish(torch.tensor([5e-3, 5e-2]), value * 1.005).tolist() == [True, False]
    assert finish(torch.tensor([5e-3, 5e-3]), value * torch.tensor([1.1, 1.005])).tolist() == [False, True]
    assert FinishRule(1e-2, 1e-2)(torch.tensor([1e-5, 0.0]), value).all()


def test_a_zero_right_hand_side_has_a_zero_solution() -> None:
    model = small()
    system = LinearSystem.of(model, torch.zeros(2, 25, dtype=torch.float64))
    assert (ConjugateGradients().prepare(model).solve(model, system).z == 0).all()


def test_single_precision_is_near_double() -> None:
    single, double = decaying(dtype=torch.float32), decaying()
    found = [passes_to(model, ConjugateGradients(rank=20), 4)[1] for model in (single, double)]
    assert found[0].z.dtype == torch.float32
    assert error(double, found[0].z.double(), found[1].z) < 5e-3


class Rounded(DenseFeatures):
    """Products of few digits, as a GPU's bfloat16 gives them: those there and back are not one matrix's any more."""

    def blocks(self, order: Sequence[Tensor] | None = None) -> Iterator[RowBlock]:
        for block in super().blocks(order):
            yield RoundedBlock(block)


class RoundedBlock:
    """Vectors and products in bfloat16."""

    def __init__(self, block: RowBlock) -> None:
        self.block, self.index = block, block.index

    def forward(self, z: Tensor) -> Tensor:
        return self.block.forward(z.bfloat16().double()).bfloat16().double()

    def backward(self, v: Tensor) -> Tensor:
        return self.block.backward(v.bfloat16().double()).bfloat16().double()


def test_products_too_coarse_for_the_prior_end_the_solve() -> None:
    exactly = decaying(alpha=1e-3)
    coarse = replace(exactly, features=Rounded(exactly.features.phi, 2000))
    system = SampleRandomness(exactly, 4).system(exactly)
    solver = ConjugateGradients(rank=20, tolerance=1e-4, refresh=10)
    report = solver.prepare(coarse).solve(coarse, system).report
    assert report.stood_still
    assert not report.converged
    assert report.passes < 100  # of a thousand iterations that it might take
    assert "too few digits" in unfinished_warnings(report)[-1]
    # What comes back is the best that was seen, near the solution at once where the start was.
    true = exact(exactly, system)
    again = solver.prepare(coarse).solve(coarse, system, true)
    assert error(exactly, again.z, true) < 0.02
    torch.testing.assert_close(again.image, coarse.curvature(again.z))
    # Those that can be solved are, beside those that cannot.
    fine = solver.prepare(exactly).solve(exactly, system).report
    assert fine.converged
    assert not fine.stood_still


def test_the_sketch_is_near_the_curvature_and_exact_at_full_rank() -> None:
    model = small()
    M = curvature(model)
    full = sketch(model, 25)
    torch.testing.assert_close(full.vectors * full.values @ full.vectors.T, M)
    torch.testing.assert_close(full.vectors.T @ full.vectors, torch.eye(25).double())
    part, mu = sketch(decaying(), 30), torch.linalg.eigvalsh(curvature(decaying())).flip(0)
    assert float(part.values[0]) == pytest.approx(float(mu[0]), rel=0.02)
    assert (part.values <= mu[:30] * (1 + 1e-9)).all()  # Nystrom eigenvalues are never too large


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system does not say")
def test_a_sketch_takes_two_arrays_of_its_size() -> None:
    """And what is solved for at a time, of the size of one of them here."""
    phi, rank, cpu = normal(40, 250_000).float(), 32, torch.device("cpu")
    model = LinearModel(DenseFeatures(phi), RowNoise(torch.ones(40, 1)), torch.ones(1))
    sketch(model, 2)

    def taken() -> int:
        reset_peak(cpu)
        before = peak_bytes(cpu)
        sketch(model, rank, at_once=2)
        return peak_bytes(cpu) - before

    # The least of three: the peak is that of the whole process, whatever else it does meanwhile.
    assert min(taken() for _ in range(3)) < 4 * (4 * 250_000 * rank)


def test_a_sketch_that_does_not_fit_is_refused_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caveat.engine.cost.free_bytes", lambda device: 1000)
    with pytest.raises(MemoryError, match=r"a sketch of rank 10 for 25 weights needs 5\.0 kB.*lower rank"):
        sketch(small(), 10)


def test_a_sketch_of_more_than_the_curvatures_rank() -> None:
    phi = normal(50, 3) @ normal(3, 20, seed=1)
    model = LinearModel(DenseFeatures(phi), RowNoise(torch.ones(50, 1).double()), torch.ones(1).double())
    found = sketch(model, 12)
    torch.testing.assert_close(found.vectors * found.values @ found.vectors.T, phi.T @ phi, rtol=1e-6, atol=1e-6)
    nothing = LinearModel(DenseFeatures(0 * phi), model.noise, model.precision)
    assert (sketch(nothing, 4).values < 1e-300).all()
    system = SampleRandomness(nothing, 3).system(nothing)  # no data: the prior
    torch.testing.assert_close(ConjugateGradients().prepare(nothing).solve(nothing, system).z, system.prior)


@pytest.mark.parametrize("per_parameter", [False, True])
def test_the_preconditioner_is_the_inverse_it_says(per_parameter: bool) -> None:
    vectors = torch.linalg.qr(normal(25, 6))[0]
    values = torch.linspace(50, 2, 6, dtype=torch.float64)
    A = normal(25, seed=3).exp() if per_parameter else torch.tensor([0.1]).double()
    P = vectors * (values - values[-1]) @ vectors.T + torch.diag((values[-1] + A).expand(25))
    v = normal(3, 25, seed=4)
    found = Nystrom(vectors, values).preconditioner(A)(v)
    torch.testing.assert_close(found, torch.linalg.solve(P, v.T).T)
    if not per_parameter:  # as it is usually written
        along = v @ vectors
        usual = along * ((values[-1] + A) / (values + A)) @ vectors.T + v - along @ vectors.T
        torch.testing.assert_close(found * (values[-1] + A), usual)


def test_the_largest_eigenvalue() -> None:
    model = decaying()
    top = float(torch.linalg.eigvalsh(curvature(model))[-1])
    assert top_eigenvalue(model, products=30) == pytest.approx(top, rel=0.01)


def test_progress_and_reports() -> None:
    seen: list[tuple[float, float]] = []
    model = decaying()
    prepared = ConjugateGradients(rank=10).prepare(model)
    prepared.progress = lambda passes, residual: seen.append((passes, residual))
    report = prepared.solve(model, SampleRandomness(model, 2).system(model)).report
    assert len(seen) == len(report.history) == report.iterations + 1
    assert seen[-1][0] == pytest.approx(report.passes)
    assert report.history[0][1] > report.history[-1][1]


def test_steps_that_are_too_long_are_shortened() -> None:
    model = small()
    system = SampleRandomness(model, 2).system(model)
    solver = StochasticDescent("dual", 8, step_size=50.0, tolerance=1e-6, passes=4000)
    solution = solver.prepare(model).solve(model, system)
    assert solution.report.converged
    torch.testing.assert_close(solution.z, exact(model, system), rtol=1e-3, atol=1e-4)


def test_products_that_are_not_finite_are_named() -> None:
    model = small()
    assert isinstance(model.noise, RowNoise)
    system = SampleRandomness(model, 2).system(model)
    model.noise.factors[20] = math.nan
    for solver in (ConjugateGradients(rank=0), ConjugateGradients(rank=3), StochasticDescent(batch_rows=60)):
        with pytest.raises(ValueError, match="features of row 20 give products"):
            solver.prepare(model).solve(model, system)
    with pytest.raises(ValueError, match="tolerance"):
        ConjugateGradients(tolerance=0.0)


def few_rows(decay: int, alpha: float, dtype: torch.dtype) -> LinearModel:
    """Forty rows, 300 parameters: a sketch of the whole curvature, and a prior that is small beside it."""
    turned = torch.linalg.qr(normal(300, 300, seed=1))[0]
    phi = (30 * normal(40, 300) / torch.arange(1, 301) ** decay @ turned).to(dtype)
    return LinearModel(DenseFeatures(phi), RowNoise(torch.ones(40, 1, dtype=dtype)), torch.tensor([alpha], dtype=dtype))


def test_single_precision_with_a_curvature_of_a_million_priors() -> None:
    fine, coarse = (few_rows(3, 0.01, dtype) for dtype in (torch.float64, torch.float32))
    assert 1e6 < top_eigenvalue(fine) / 0.01 < 1e7
    exactly, found = (
        ConjugateGradients().prepare(model).solve(model, SampleRandomness(model, 4).system(model))
        for model in (fine, coarse)
    )
    assert found.report.iterations < 20  # where the preconditioner is exact but for rounding
    assert error(fine, found.z.double(), exactly.z) < 0.05
    gammas = [float(solution.effective_dimension()) for solution in (exactly, found)]
    assert gammas[0] == pytest.approx(gammas[1], rel=5e-3)


def test_numbers_that_are_too_coarse_are_said() -> None:
    model = few_rows(2, 1e-4, torch.float32)
    report = (
        ConjugateGradients(iterations=50).prepare(model).solve(model, SampleRandomness(model, 4).system(model)).report
    )
    assert not report.converged
    assert "float32 is too coarse for a prior precision of 0.0001 beside a curvature of 4.7e+04" in report.warnings[0]
    fine = few_rows(2, 1e-4, torch.float64)
    assert not ConjugateGradients().prepare(fine).solve(fine, SampleRandomness(fine, 4).system(fine)).report.warnings


def shown(error: float) -> str:
    """An error as the table of docs/bayesian_linear_model.md writes it."""
    if error < 0.0005:
        return "< .001"
    return f"{error:.{2 if error > 0.1 else 3}f}".removeprefix("0")


@pytest.mark.parametrize(
    ("name", "solver"),
    [
        ("`ConjugateGradients(rank=0)`", ConjugateGradients(rank=0, tolerance=0.01)),
        *((f"`rank={rank}`", ConjugateGradients(rank=rank, tolerance=0.01)) for rank in (10, 40, 64)),
        ('`StochasticDescent("dual")`', StochasticDescent("dual", 20)),
        ('`StochasticDescent("reduced")`', StochasticDescent("reduced", 20)),
        pytest.param('`StochasticDescent("plain")`', StochasticDescent("plain", 20), marks=pytest.mark.slow),
    ],
)
def test_the_table_of_solvers(name: str, solver: ConjugateGradients | StochasticDescent) -> None:
    """Passes and errors with eight samples, as the page has them."""
    model = decaying()
    system = SampleRandomness(model, 8).system(model)
    solution = exact(model, system)
    prepared = solver.prepare(model)
    stopped = prepared.solve(model, system)
    assert stopped.report.converged
    preparation = prepared.preparation / 8
    cells = [f"{preparation:.{1 if preparation < 5 else 0}f}", f"{stopped.report.passes:.0f}"]
    cells.append(shown(error(model, stopped.z, solution)))
    for passes in (10, 20, 40):
        if isinstance(solver, ConjugateGradients):
            cut: Solver = replace(solver, tolerance=1e-12, iterations=passes)
        else:
            cut = replace(solver, tolerance=1e-12, passes=passes, look_every=passes)
        cells.append(shown(error(model, cut.prepare(model).solve(model, system).z, solution)))
    page = (Path(__file__).parents[3] / "docs" / "bayesian_linear_model.md").read_text(encoding="utf-8")
    assert f"| {name} | {' | '.join(cells)} |" in page
