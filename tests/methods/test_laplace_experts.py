"""Laplace of networks whose layers see some of the rows only, however rows come: the first ones may not show it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import caveat
from caveat import Laplace
from tests.methods.laplace_reference import normal


class Routed(nn.Module):
    """A second layer for rows whose first input is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.every, self.some, self.last = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x[:, 0] > 0).nonzero()[:, 0]
        return self.last(self.every(x).index_add(0, chosen, self.some(x[chosen])).tanh())


def fitted(x: Tensor, **knobs: Any) -> caveat.Posterior:
    """At the point that some rows have trained, with a curvature of these rows."""
    rows = normal(60, 3)
    torch.manual_seed(0)
    module = Routed().double()
    task = caveat.Task(module, (rows, (rows[:, 1] > 0).long()), caveat.Categorical())
    start = caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=30)), progress=False)
    task = caveat.Task(module, (x, (x[:, 1] > 0).long()), caveat.Categorical())
    return caveat.fit(task, Laplace(precision="given", **knobs), start=start, progress=False)


def treatments(posterior: caveat.Posterior) -> dict[str, str]:
    return {line["layer"]: line["treatment"] for line in posterior.info.coverage}


def test_an_expert_that_the_first_rows_do_not_show_has_a_diagonal_all_the_same() -> None:
    x = normal(60, 3)
    shown = torch.cat([x[:, :1].sort(descending=True, dim=0).values, x[:, 1:]], 1)  # the first rows all take the expert
    posterior, other_way = fitted(shown), fitted(shown.flip(0))
    factored = "Gaussian, Kronecker-factored"
    assert treatments(posterior) == treatments(other_way)
    assert treatments(posterior)["some"].startswith("diagonal Gaussian")
    assert treatments(posterior)["every"] == treatments(posterior)["last"] == factored
    for one, other in zip(posterior.moments(x), other_way.moments(x), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("factors", ["whole", 2])
def test_rows_that_reach_a_layer_as_no_training_row_did_have_their_own_covariance(factors: Any) -> None:
    x = normal(60, 3)
    posterior = fitted(torch.cat([x[:, :1].abs(), x[:, 1:]], 1), factors=factors)
    assert treatments(posterior)["some"] == "Gaussian, Kronecker-factored"
    mean, covariance = posterior.moments(x[:8])
    assert bool((x[:8, 0] > 0).any())
    assert bool((x[:8, 0] < 0).any())
    alone = [posterior.moments(row[None]) for row in x[:8]]  # all rows of a pass reach the layer, or none
    torch.testing.assert_close(mean, torch.cat([pair[0] for pair in alone]))
    torch.testing.assert_close(covariance, torch.cat([pair[1] for pair in alone]))
