"""A task checks its data, splits off validation rows, and scales batches so that they are unbiased for the whole."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Subset,
    TensorDataset,
)

from caveat import Bernoulli, Categorical, EmpCovPrior, Gaussian, GaussianPrior, LaplacePrior, Task
from tests.task_data import Lazy, N, data, every_kind, linear, task


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_inputs_that_are_not_finite_are_found_before_training(value: float) -> None:
    x, y = data()
    x[9, 2] = value
    lazy = Lazy()
    lazy.x = x
    for rows in ((x, y), lazy, DataLoader(lazy, 4), Subset(TensorDataset(x, y), range(3, N))):
        with pytest.raises(ValueError, match=r"training data.*NaN or infinity, first in row 9: clean or impute"):
            task(rows)
    clean = data()
    with pytest.raises(ValueError, match=r"validation data.*row 9"):
        task(clean, validation=(x, y))


def test_networks_that_cannot_be_used_are_refused() -> None:
    x, y = data()

    class Shaped(nn.Module):
        def __init__(self, make) -> None:
            super().__init__()
            self.layer, self.make = nn.Linear(4, 3), make

        def forward(self, x: Tensor) -> Tensor:
            return self.make(self.layer(x))

    for make, said in (
        (lambda out: out.mean(), "are not one for each row"),
        (lambda out: torch.cat([out, out]), r"outputs \(4, 3\) for inputs \[\(2, 4\)\] are not one for each row"),
        (lambda out: out * float("nan"), "are NaN"),
        (lambda out: out["logits"], "could not take the first training rows"),
        (lambda out: (out, out), "must return one tensor"),
    ):
        with pytest.raises(ValueError, match=said):
            task((x, y), model=Shaped(make))
    in_place = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 3))
    with pytest.raises(ValueError, match="changes its inputs in place"):
        task((x, y), model=in_place)
    task((x, y), model=nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True), nn.Linear(3, 3)))


def test_one_row_is_enough() -> None:
    x, y = data(1)
    made = task((x, y))
    assert made.n == 1
    assert [len(targets) for _, targets in made.train.ordered()] == [1]


def test_validation_share_is_disjoint_complete_and_repeatable() -> None:
    kinds = every_kind()
    made = task(kinds["loader"], validation=0.3)
    assert made.validation is not None
    train, held_out = made.train.indices.tolist(), made.validation.indices.tolist()
    assert len(held_out) == 4  # round(0.3 * 13)
    assert made.n == 9
    assert sorted(train + held_out) == list(range(N))
    torch.manual_seed(12345)
    again = task(kinds["loader"], validation=0.3)
    assert again.train.indices.tolist() == train
    assert again.validation is not None
    assert again.validation.indices.tolist() == held_out
    assert task(kinds["loader"], validation=0.3, split_seed=1).train.indices.tolist() != train
    rows = torch.cat([y for _, y in made.validation.ordered()])
    assert torch.equal(rows, data()[1][held_out])
    with pytest.raises(ValueError, match=r"validation=0\.01 of 13 rows: must be above 0 and below 1"):
        task(kinds["loader"], validation=0.01)
    with pytest.raises(ValueError, match="leave rows on both sides"):
        task(kinds["loader"], validation=1.0)


def test_validation_data_of_their_own() -> None:
    x, y = data(6)
    made = task(data(), validation=DataLoader(TensorDataset(x, y), 4))
    assert made.n == N
    assert made.validation is not None
    assert len(made.validation) == 6
    with pytest.raises(ValueError, match="validation data do not fit: labels run from 1 to 3"):
        task(data(), validation=(x, y + 1))


def exact(made: Task, params: dict, hyper: dict) -> Tensor:
    """log p(D, theta) by a plain sum over rows, in float64."""
    x, y = made.train.everything()
    log_likelihood = sum(
        made.network.likelihood.log_prob(made.network(params, x[i : i + 1]), y[i : i + 1], hyper) for i in range(len(y))
    )
    return log_likelihood.sum() + made.network.prior.log_prob(params)


@pytest.mark.parametrize("likelihood", [Categorical(), Gaussian(), Bernoulli()])
def test_log_joint_is_unbiased_and_exact_on_the_whole(likelihood) -> None:
    n = 12
    x, y = data(n, torch.float64)
    targets = y if isinstance(likelihood, Categorical) else torch.stack([y % 2, y // 2, y * 0], 1).double()
    made = Task(linear(torch.float64), (x, targets), likelihood, LaplacePrior(0.7))
    params, hyper = made.network.params(), made.hyper
    whole = exact(made, params, hyper)
    estimates = [made.log_joint(made.network(params, a), b, params, hyper) for a, b in made.train.ordered(4)]
    assert len(estimates) == 3
    torch.testing.assert_close(torch.stack(estimates).mean(), whole, rtol=1e-12, atol=0)
    everything = made.log_joint(made.network(params, x), targets, params, hyper)
    torch.testing.assert_close(everything, whole, rtol=1e-12, atol=0)
    mean = made.log_likelihood(made.network, params, hyper)
    prior = made.network.prior.log_prob(params)
    assert mean.dtype == torch.float64
    torch.testing.assert_close(n * mean + prior, whole, rtol=1e-12, atol=0)


def test_unequal_batches_are_unbiased_when_weighted_by_their_rows() -> None:
    made = Task(linear(torch.float64), data(N, torch.float64), Categorical())
    params = made.network.params()
    batches = list(made.train.ordered(5))  # 5, 5 and a partial batch of 3
    estimates = torch.stack([made.log_joint(made.network(params, x), y, params, {}) for x, y in batches])
    weights = torch.tensor([len(y) / N for _, y in batches], dtype=torch.float64)
    torch.testing.assert_close((weights * estimates).sum(), exact(made, params, {}), rtol=1e-12, atol=0)


def test_parts_of_a_batch_on_two_ranks_sum_to_the_batch() -> None:
    made = Task(linear(torch.float64), data(N, torch.float64), Categorical(), GaussianPrior(3.0))
    params = {name: p.requires_grad_() for name, p in made.network.params().items()}
    (x, y) = next(made.train.ordered(5))
    whole = made.log_joint(made.network(params, x), y, params, {})
    gradients = torch.autograd.grad(whole, list(params.values()))
    parts = [
        made.log_joint(made.network(params, a), b, params, {}, batch_rows=5, share=0.5)
        for a, b in zip(x.tensor_split(2), y.tensor_split(2), strict=True)
    ]
    torch.testing.assert_close(parts[0] + parts[1], whole, rtol=1e-12, atol=0)
    for part, gradient in zip(torch.autograd.grad(parts[0] + parts[1], list(params.values())), gradients, strict=True):
        torch.testing.assert_close(part, gradient, rtol=1e-12, atol=1e-12)
    empty = made.log_joint(made.network(params, x[:0]), y[:0], params, {}, batch_rows=5, share=0.0)
    assert float(empty.detach()) == 0.0


def test_log_joint_counts_the_prior_of_selected_parameters_only() -> None:
    made = Task(linear(torch.float64), data(N, torch.float64), Categorical(), parameters="2.*")
    params = made.network.params() | {"0.weight": torch.full((5, 4), 100.0, dtype=torch.float64)}
    x, y = made.train.everything()
    outputs = made.network(params, x)
    value = made.log_joint(outputs, y, params, {})
    prior = GaussianPrior().log_prob(made.network.params())
    torch.testing.assert_close(value, Categorical().log_prob(outputs, y, {}).sum() + prior, rtol=1e-12, atol=0)


def test_log_likelihood_of_given_rows_even_of_none() -> None:
    made = task(data(), validation=0.3)
    params = made.network.params()
    assert made.validation is not None
    x, y = made.validation.everything()
    expected = Categorical().log_prob(made.network(params, x), y, {}).mean()
    torch.testing.assert_close(made.log_likelihood(made.network, params, {}, made.validation), expected.double())
    none = made.log_likelihood(made.network, params, {}, made.train.part(torch.arange(0)))
    assert bool(none.isnan())  # and not the mean over the training rows


def test_fitted_hyper_is_the_noise_of_the_residuals() -> None:
    x, _ = data(N, torch.float64)
    y = x[:, :3] * 2
    made = Task(linear(torch.float64), DataLoader(TensorDataset(x, y), 4), Gaussian())
    params = made.network.params()
    residuals = made.network(params, x) - y
    fitted = made.fitted_hyper(made.network, params)
    torch.testing.assert_close(fitted["log_noise"].exp() ** 2, residuals.square().mean(0), rtol=1e-10, atol=0)
    torch.testing.assert_close(made.hyper["log_noise"].exp(), y.std(0, correction=0), rtol=1e-10, atol=0)
    assert task(data()).fitted_hyper(made.network, params) == {}


def test_baseline_is_what_ignoring_the_inputs_gives() -> None:
    y = data()[1]
    share = torch.bincount(y).double() / N
    assert task(data()).baseline == pytest.approx(float((share * share.log()).sum()))


def test_fingerprint_tells_tasks_apart() -> None:
    x, y = data()
    changed = x.clone()
    changed[0, 0] += 1
    original = task((x, y)).fingerprint()
    for key, other in (
        ("data", task((changed, y))),
        ("data", task((x, y.int()))),
        ("data", task((x[:-1], y[:-1]))),
        ("prior", task((x, y), prior=GaussianPrior(2.0))),
        ("prior", task((x, y), prior=LaplacePrior(1.0))),
        ("likelihood", task((x, y), Categorical(class_weights=(1.0, 2.0, 3.0)))),
        ("network", task((x, y), parameters="0.*")),
    ):
        found = other.fingerprint()
        assert [name for name in original if found[name] != original[name]] == [key]
    split = [task((x, y), validation=0.3, split_seed=seed).fingerprint() for seed in (0, 1)]
    assert split[0]["validation"] != split[1]["validation"]
    covariances = [EmpCovPrior("0.weight", scale * torch.eye(4)) for scale in (1.0, 2.0)]
    assert len({task((x, y), prior=prior).fingerprint()["prior"] for prior in covariances}) == 2


def test_fingerprint_takes_any_type_and_any_prior() -> None:
    x, y = data()
    made = Task(linear(torch.bfloat16), (x.bfloat16(), y), Categorical())
    assert made.fingerprint()["data"] == made.fingerprint()["data"]

    class Own:
        def log_prob(self, params: dict) -> Tensor:
            return torch.zeros(())

        def sample(self, like: dict, rng: torch.Generator) -> dict:
            return like

    assert task((x, y), prior=Own()).fingerprint()["prior"] == "Own"


@pytest.mark.parametrize("validation", [0.2, None])
@pytest.mark.parametrize("in_memory", [True, False])
def test_a_broken_target_has_the_number_of_its_row_in_the_data(validation: float | None, in_memory: bool) -> None:
    """The held-out rows were not counted, so that another row was named."""
    x, y = torch.randn(60, 2), torch.randn(60, 1)
    y[43] = math.nan
    rows = TensorDataset(x, y)
    given = rows if in_memory else [rows[i] for i in range(60)]
    with pytest.raises(ValueError, match="data do not fit: Gaussian needs finite targets, but row 43 holds nan"):
        Task(nn.Linear(2, 1), given, Gaussian(), validation=validation)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_loss_is_the_joint_density_over_minus_the_rows(share: float) -> None:
    module = nn.Linear(3, 4).double()
    x, y = torch.randn(30, 3, dtype=torch.float64), torch.arange(30) % 4
    problem = Task(module, (x, y), Categorical(), GaussianPrior(2.0))
    outputs, params = module(x[:7]), problem.network.params()
    for rows in (None, 14):
        joint = problem.log_joint(outputs, y[:7], params, {}, batch_rows=rows, share=share)
        loss = problem.loss(outputs, y[:7], params, {}, batch_rows=rows, share=share)
        torch.testing.assert_close(loss, joint / -30, rtol=1e-12, atol=0)
