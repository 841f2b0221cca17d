"""The search for a step size against dense Hessians and against the recursion that the step drives."""

import pytest
import torch
from torch import Tensor

from caveat.engine.chains.step_search import StepSearch, share_of_stable_step, warnings_of_steps


def precision(condition: float = 1e4, size: int = 12) -> Tensor:
    """A dense precision matrix with known eigenvalues, of which the largest is the condition number."""
    rng = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(size, size, generator=rng, dtype=torch.float64)).Q
    return basis @ torch.diag(torch.logspace(0, torch.tensor(condition).log10().item(), size).double()) @ basis.T


def searched(matrix: Tensor, measurements: int = 1, mass: Tensor | None = None, **knobs: float) -> StepSearch:
    settings = {"given": None, "momentum": 0.9, "rows": 100, "batch": 100, "burn_in_steps": 50} | knobs
    search = StepSearch(**settings)  # type: ignore[arg-type]
    rng = torch.Generator().manual_seed(1)
    search.begin(torch.randn(2, len(matrix), generator=rng, dtype=torch.float64))
    position = torch.randn(2, len(matrix), generator=rng, dtype=torch.float64)
    for i in range(measurements):
        search.measure(lambda z: -z @ matrix, position, slice(0, 2), i, mass)
    return search


@pytest.mark.parametrize("with_mass", [False, True])
def test_the_largest_curvature_is_found(with_mass: bool) -> None:
    matrix = precision()
    mass = torch.linspace(0.2, 3, 12, dtype=torch.float64).expand(2, -1) if with_mass else None
    root = torch.ones(12, dtype=torch.float64) if mass is None else mass[0].sqrt()
    exact = torch.linalg.eigvalsh(matrix / root[:, None] / root).max()
    search = searched(matrix, 5, mass)
    torch.testing.assert_close(search.curvature, exact.expand(2), rtol=0.02, atol=0)
    # A tenth of the step at which chains run away.
    torch.testing.assert_close(search.step_size * exact, torch.full((2,), 0.38, dtype=torch.float64), rtol=0.02, atol=0)


def test_at_the_step_that_is_found_the_variance_is_as_stated() -> None:
    matrix = precision()
    eta, beta = float(searched(matrix, 5).step_size[0]), 0.9
    steepest = float(torch.linalg.eigvalsh(matrix).max())
    step = torch.tensor([[beta, -(eta**0.5) * steepest], [beta * eta**0.5, 1 - eta * steepest]]).double()
    assert float(torch.linalg.eigvals(step).abs().max()) < 1
    push = torch.tensor([1.0, eta**0.5]).double() * (2 * (1 - beta)) ** 0.5
    system = torch.eye(4, dtype=torch.float64) - torch.kron(step, step)
    variance = torch.linalg.solve(system, torch.outer(push, push).flatten()).view(2, 2)[1, 1]
    assert float(variance * steepest) == pytest.approx(1 / (1 - 0.1), rel=0.01)


def test_small_batches_ask_for_smaller_steps() -> None:
    matrix = precision()
    whole, few = (float(searched(matrix, 5, batch=batch, rows=10_000).step_size[0]) for batch in (10_000, 10))
    assert few == pytest.approx(whole * 30 * 0.2 / 999 / 0.38, rel=1e-6)


def test_a_larger_curvature_is_remembered_for_a_while() -> None:
    steep, flat = precision(), precision(10.0)
    search = searched(steep, 5)
    largest, position = float(search.curvature[0]), torch.zeros(2, 12, dtype=torch.float64)
    for step in (10, 20, 30):
        search.measure(lambda z: -z @ flat, position, slice(0, 2), step, None)
    assert float(search.curvature[0]) == pytest.approx(0.95**3 * largest)


def test_after_the_burn_in_steps_only_become_smaller_and_only_where_they_must() -> None:
    matrix, position = precision(), torch.zeros(2, 12, dtype=torch.float64)
    search = searched(matrix, 5)
    settled = float(search.curvature[0])
    for factor, wanted in ((0.1, settled), (2.5, settled), (8.0, 8 * settled), (1.0, 8 * settled)):
        search.measure(lambda z, factor=factor: -factor * z @ matrix, position, slice(0, 2), 100, None)
        assert float(search.curvature[0]) == pytest.approx(wanted, rel=0.01)


def test_it_looks_often_at_first_and_seldom_after_the_burn_in() -> None:
    search = StepSearch(None, 0.9, 1000, 10, burn_in_steps=20_000)
    due = [step for step in range(30_000) if search.due(step)]
    assert due[:50] == [*range(0, 500, 10)]
    assert [step for step in due[50:] if step < 20_000] == [*range(600, 20_000, 200)]
    assert [step for step in due if step >= 20_000] == [*range(20_000, 30_000, 100)]
    assert [step for step in range(100) if StepSearch(None, 0.9, 10, 10, burn_in_steps=0).due(step)] == [0]
    assert StepSearch(None, 0.9, 2048, 10, burn_in_steps=100).cost(range(25)) == (11 + 2 + 2) * 512 / 2048
    assert not any(StepSearch(1e-3, 0.9, 10, 10, burn_in_steps=100).due(step) for step in range(100))


def test_steps_that_are_too_large_are_said() -> None:
    matrix = precision()
    here, direction = torch.zeros(1, 12, dtype=torch.float64), torch.ones(1, 12, dtype=torch.float64)
    eta = torch.tensor([0.6 * 3.8 / 1e4], dtype=torch.float64)
    share = share_of_stable_step(lambda z: -z @ matrix, here, direction, eta, 0.9, None)
    assert float(share) == pytest.approx(0.6, rel=0.05)
    assert not warnings_of_steps(0.4, 0.1, given=True)
    assert "steps are 0.6 of those at which chains run away" in warnings_of_steps(float(share), 0.1, given=True)[0]
    assert "lower learning_rate" in warnings_of_steps(2.0, 0.1, given=True)[0]
    assert "longer burn_in" in warnings_of_steps(2.0, 0.1, given=False)[0]
