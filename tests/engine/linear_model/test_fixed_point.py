"""The search for a fixed point of an update, in logarithms: how many evaluations it takes, and where it stays."""

import pytest
import torch

from caveat.engine.linear_model.fixed_point import FixedPointSearch, Hyperparameters

WANTED = 110.0


def evaluations(slope: float, first: float, tolerance: float = 1e-2) -> tuple[int, float, list[float]]:
    """How many, the end, and the way; log(update / x) falls by `slope` as log x grows."""
    search, hyper, way = (
        FixedPointSearch(1e3, tolerance),
        Hyperparameters(torch.tensor([first], dtype=torch.float64)),
        [],
    )
    for number in range(1, 50):
        way.append(float(hyper.prior))
        step = slope * (hyper.prior / WANTED).log()
        gamma = hyper.prior * step.exp()  # as for a mean of one size
        hyper = search.next(hyper, gamma, hyper.prior * step.exp(), None)
        if search.resting:
            return number, float(hyper.prior), way
    raise AssertionError(f"did not come to rest: {way}")


@pytest.mark.parametrize("first", [1.0, 30.0, 1000.0])
@pytest.mark.parametrize("slope", [-2.5, -1.5, -1.0, -0.7, -0.3])
def test_a_fixed_point_is_found_in_a_few_evaluations(slope: float, first: float) -> None:
    count, end, _ = evaluations(slope, first)
    assert end == pytest.approx(WANTED, rel=1e-2)
    assert count <= (5 if slope <= -0.7 else 8)


@pytest.mark.parametrize("first", [1.0, 1000.0])
def test_where_updates_overshoot_as_those_of_networks_do_it_does_not(first: float) -> None:
    _, _, way = evaluations(-1.5, first)
    assert all(min(first, 0.99 * WANTED) <= x <= max(first, 1.01 * WANTED) for x in way)
