"""Training arrives somewhere: enough steps on few rows, the best epoch on validation rows, a word where it does not."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import caveat
from caveat import Training
from caveat.engine.training import arrival, gain_left
from caveat.rows import Rows
from tests.engine.variational.training_cases import interrupted, same


def linear_problem(n: int = 60) -> tuple[Tensor, Tensor]:
    """Targets that are linear in five inputs, with noise of .1."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(n, 5, generator=rng)
    weights = torch.tensor([[1.0, -0.5, 0.8, 0.3, -1.2]])
    return x, x @ weights.T + 0.4 + 0.1 * torch.randn(n, 1, generator=rng)


def linear_task(**knobs: object) -> caveat.Task:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return caveat.Task(nn.Linear(5, 1), linear_problem(), caveat.Gaussian(), **knobs)  # type: ignore[arg-type]


def fitted(task: caveat.Task, training: Training) -> caveat.Posterior:
    return caveat.fit(task, caveat.MAP(training=training), progress=False)


def test_a_linear_model_on_sixty_rows_reaches_its_noise() -> None:
    task = linear_task()
    posterior = fitted(task, Training())
    x, y = linear_problem()
    error = float((posterior.predict(x).mean - y).square().mean().sqrt())
    inputs = torch.cat([x, torch.ones(60, 1)], 1)
    least = float((inputs @ torch.linalg.lstsq(inputs, y).solution - y).square().mean().sqrt())
    assert error < 1.01 * least  # after 100 steps it was ten times as large
    assert posterior.info.warnings == []
    assert posterior.info.diagnostics["epochs"] == 2000  # of one step each
    assert len(posterior.info.diagnostics["history"]) == 100
    assert float(posterior.state["hyper"]["log_noise"].exp()) == pytest.approx(error, rel=1e-3)


def test_epochs_that_are_given_are_what_they_say() -> None:
    posterior = fitted(linear_task(validation=0.2), Training(epochs=5))
    assert [record["epoch"] for record in posterior.info.diagnostics["history"]] == [1, 2, 3, 4, 5]
    assert posterior.info.diagnostics["taken_epoch"] == 5
    assert posterior.info.diagnostics["taken_by"] == "the end of training"
    assert Training().epochs_for(400) == 100
    assert Training().epochs_for(15) == 134  # 2,010 steps
    assert Training(epochs=0).epochs_for(1) == 0


def test_the_gain_is_that_of_the_best_step_along_the_gradient() -> None:
    """A linear model with noise given: log p is a parabola along the gradient, its highest point in closed form."""
    x, y = (t.double() for t in linear_problem())
    model = nn.Linear(5, 1, bias=False).double()
    task = caveat.Task(model, (x, y), caveat.Gaussian(noise=0.5), caveat.GaussianPrior(2.0))
    params = {name: value.detach() for name, value in model.named_parameters()}
    weights = params["weight"].flatten()
    gradient = (x.T @ (y[:, 0] - x @ weights) / 0.25 - 2 * weights) / 60
    curvature = (x.T @ x / 0.25 + 2 * torch.eye(5, dtype=torch.float64)) / 60
    exact = float(gradient @ gradient) ** 2 / float(gradient @ curvature @ gradient) / 2
    assert gain_left(task, task.network, params) == pytest.approx(exact, rel=1e-4)


def test_there_is_nothing_to_gain_at_an_optimum() -> None:
    x, y = (t.double() for t in linear_problem())
    task = caveat.Task(nn.Linear(5, 1, bias=False).double(), (x, y), caveat.Gaussian(noise=0.5))
    best = torch.linalg.solve(x.T @ x / 0.25 + torch.eye(5, dtype=torch.float64), x.T @ y / 0.25)
    assert gain_left(task, task.network, {"weight": best.T}) < 1e-12


def test_training_that_is_too_short_says_so_and_so_does_what_starts_from_it() -> None:
    task = linear_task()
    short = fitted(task, Training(epochs=20))
    assert any("the point after 20 epochs of training is no optimum" in text for text in short.info.warnings)
    posterior = caveat.fit(task, caveat.Laplace(), start=short, progress=False)
    assert any("the point that Laplace starts from is no optimum" in text for text in posterior.info.warnings)
    arrived = fitted(task, Training())
    posterior = caveat.fit(task, caveat.Laplace(), start=arrived, progress=False)
    assert not any("no optimum" in text for text in posterior.info.warnings)


def noisy_task() -> tuple[caveat.Task, tuple[Tensor, Tensor]]:
    """Sixty rows that are mostly noise, a network that can learn them by heart, and thirty validation rows."""
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(90, 8, generator=rng)
    y = x[:, :1] + torch.randn(90, 1, generator=rng)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 50), nn.ReLU(), nn.Linear(50, 1))
    held_out = (x[60:], y[60:])
    prior = caveat.GaussianPrior(0.1)
    return caveat.Task(model, (x[:60], y[:60]), caveat.Gaussian(), prior, validation=held_out), held_out


def test_a_network_that_learns_noise_by_heart_is_taken_where_validation_rows_are_predicted_best() -> None:
    task, held_out = noisy_task()
    posterior = fitted(task, Training())
    about = posterior.info.diagnostics
    assert about["taken_by"] == "validation"
    assert about["taken_epoch"] < 0.5 * about["epochs"]
    records = {record["epoch"]: record for record in about["history"]}
    # The record is the loss with the noise that the validation rows show, which is the posterior's.
    losses = -posterior.predict(held_out[0]).log_prob(held_out[1])
    assert records[about["taken_epoch"]]["validation"] == pytest.approx(float(losses.mean()), rel=1e-4)
    lowest = min(record["validation"] for record in records.values())
    assert lowest <= float(losses.mean()) <= lowest + float(losses.std())
    assert about["taken_epoch"] == max(epoch for epoch, record in records.items() if "kept" in record)
    assert records[about["epochs"]]["validation"] > lowest + 0.1
    noise = float(posterior.state["hyper"]["log_noise"].exp())
    residuals = float((posterior.predict(held_out[0]).mean - held_out[1]).square().mean().sqrt())
    assert math.isclose(noise, residuals, rel_tol=1e-3)


def test_training_that_is_interrupted_after_the_epoch_to_take_goes_on_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = fitted(noisy_task()[0], Training())
    after = int(whole.info.diagnostics["taken_epoch"]) + 100
    resumed = interrupted(lambda: noisy_task()[0], caveat.MAP(), tmp_path / "p", monkeypatch, after)
    same(whole, resumed)
    assert resumed.info.diagnostics["taken_epoch"] == whole.info.diagnostics["taken_epoch"]


def test_a_gpu_makes_few_passes_of_training_batches() -> None:
    rows = Rows((torch.randn(300, 2), torch.zeros(300)))
    assert arrival._rows_of_pass(rows, torch.device("cuda")) == rows.batch_size == 128
    assert arrival._rows_of_pass(rows, torch.device("cpu")) == 32
