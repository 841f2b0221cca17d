"""A Laplace posterior that takes more rows is the one fitted to all of them."""

import pytest
import torch
from torch import Tensor, nn

import caveat
from tests.methods.laplace_reference import assert_close, data, fit, normal, trained


@pytest.mark.parametrize("structure", ["full", "diagonal", "kronecker", "low_rank"])
@pytest.mark.parametrize(("first", "more"), [(4, 3), (4, 30), (30, 6)])
def test_an_update_is_a_fit_to_both_data_sets(structure: str, first: int, more: int) -> None:
    _, start = trained("Categorical")
    x, y = data("Categorical", first + more, seed=5)
    new, module = data("Categorical", 5, seed=7)[0], start.network.with_fixed(start.state["params"]).module
    prior = caveat.GaussianPrior({"0.*": 0.5, "2.*": 2.0})
    likelihood = caveat.Categorical(class_weights=(1.0, 2.0, 0.5))
    part = caveat.Task(module.requires_grad_(True), (x[:first], y[:first]), likelihood, prior)
    both = caveat.Task(module.requires_grad_(True), (x, y), likelihood, prior)
    before = fit(part, start, structure=structure, rank=60)
    updated = before.update((x[first:], y[first:]), progress=False)
    whole = fit(both, start, structure=structure, rank=60)
    assert_close(updated.moments(new)[1], whole.moments(new)[1])
    assert not torch.allclose(updated.moments(new)[1], before.moments(new)[1], rtol=1e-3)
    assert updated.info.diagnostics["updated_with_rows"] == more
    twice = before.update((x[first:-1], y[first:-1]), progress=False).update((x[-1:], y[-1:]), progress=False)
    assert_close(twice.moments(new)[1], whole.moments(new)[1])
    assert twice.info.diagnostics["updated_with_rows"] == more


def test_new_rows_are_checked_all_of_them() -> None:
    torch.manual_seed(0)
    x = normal(20, 4, 3)
    y = (x[..., 0] > 0).long()
    y[:2] = -100  # nothing in the first rows
    task = caveat.Task(nn.Linear(3, 2).double(), (x, y), caveat.Categorical(class_axis=-1))
    start = caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=60)), progress=False)
    posterior = fit(task, start)
    doubled = caveat.Task(
        nn.Linear(3, 2).double(), (x.repeat(2, 1, 1), y.repeat(2, 1)), caveat.Categorical(class_axis=-1)
    )
    updated = posterior.update((x, y), progress=False)
    assert_close(updated.moments(x)[1], fit(doubled, start).moments(x)[1])
    y[9, 2] = 7
    with pytest.raises(ValueError, match="labels run from 0 to 7"):
        posterior.update((x, y), progress=False)
    with pytest.raises(ValueError, match="need labels of shape"):
        posterior.update((x, y[:, :3]), progress=False)


def test_an_update_that_leaves_the_dual_form_stays_positive_definite() -> None:
    x, y = data("Gaussian", 40)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    task = caveat.Task(
        module, (x[:15].float(), y[:15].float()), caveat.Gaussian(noise=0.01), caveat.GaussianPrior(1e-6)
    )
    start = caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=20)), progress=False)
    posterior = fit(task, start)
    assert posterior.info.diagnostics["form"] == "rows"
    updated = posterior.update((x[15:].float(), y[15:].float()), progress=False)
    assert "rows" not in updated.state["gaussian"]
    assert bool((updated.moments(x.float())[1] > 0).all())


class Named(nn.Module):
    """A layer called `inputs`, as stored factors are, and one that never acts."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.never, self.head = nn.Linear(3, 3), nn.Linear(2, 2), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inputs(x).tanh())


@pytest.mark.parametrize("structure", ["full", "diagonal", "kronecker", "low_rank"])
def test_any_name_and_weights_that_do_not_act(structure: str) -> None:
    torch.manual_seed(0)
    x, y = data("Categorical", 30)
    task = caveat.Task(Named().double(), (x, y), caveat.Categorical())
    start = caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=60)), progress=False)
    posterior = fit(task, start, structure=structure).update((x, y), progress=False)
    covariance = posterior.moments(x[:4], joint=True)[1]
    assert_close(covariance[:3, :3], posterior.moments(x[:4])[1][0])
    draws = torch.stack([draw["never.weight"] for draw in posterior.sample(400)])
    unmoved = start.state["params"]["never.weight"]
    assert 0.8 < float((draws - unmoved).std()) < 1.2, "what does not act has its prior"
