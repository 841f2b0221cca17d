"""A posterior that predicts worse than the point it starts from says so."""

import torch
from torch import nn

import caveat
from caveat import Training
from caveat.engine.training.against_point import point_is_better

SAID = "worse than those of the point"


def said(posterior: caveat.Posterior) -> list[str]:
    return [warning for warning in posterior.info.warnings if SAID in warning]


def three_classes(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (rows,), generator=rng)
    return torch.randn(rows, 6, generator=rng) + 4 * nn.functional.one_hot(y, 6), y


def trained() -> nn.Module:
    """A network that is right nearly always, and wide enough that every weight alone is of little account."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        x, y = three_classes(80, 0)
        for _ in range(60):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model


def test_a_gaussian_that_is_too_wide_is_told_and_a_narrow_one_is_not() -> None:
    wide, narrow = caveat.Laplace(precision=1e-3), caveat.Laplace(precision=1e4)
    for validation, rows in ((None, "training"), (three_classes(80, 1), "validation")):
        task = caveat.Task(trained(), three_classes(80, 0), caveat.Categorical(), validation=validation)
        (warning,) = said(caveat.fit(task, wide, progress=False))
        assert f" {rows} rows" in warning
        fine = caveat.fit(task, narrow, progress=False)
        assert not said(fine)
        compared = fine.info.diagnostics["against_marginals"]
        assert abs(compared["gain_of_point"] - compared["gain"]) < 0.05


def test_methods_that_start_from_no_point_are_compared_with_none() -> None:
    task = caveat.Task(trained(), three_classes(80, 0), caveat.Categorical())
    fitted = caveat.fit(task, caveat.MAP(training=Training(epochs=2)), progress=False)
    assert "gain_of_point" not in fitted.info.diagnostics["against_marginals"]


def test_what_is_lost_must_be_clear_and_more_than_a_tenth() -> None:
    point = torch.full((40,), 2.0, dtype=torch.float64)
    noise = torch.linspace(-1, 1, 40, dtype=torch.float64)
    assert point_is_better(point - 0.5 + 0.1 * noise, point, "training") is not None
    assert point_is_better(point - 0.1 + 0.1 * noise, point, "training") is None  # a twentieth
    assert point_is_better(point - 0.5 + 8 * noise, point, "training") is None  # not to be told from chance
    assert point_is_better(point + 0.5, point, "training") is None
    assert point_is_better(-point - 0.5, -point, "training") is None  # the point itself is of no use
