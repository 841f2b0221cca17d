"""SWAG: draws with the covariance of the formula, moments of the real iterates, statistics refreshed for each draw."""

import math

import pytest
import torch
from torch import Tensor, nn

import caveat
from caveat import Training
from caveat.engine.training import Variables
from caveat.methods import swag


def trained_task(module: nn.Module) -> caveat.Task:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(96, 3, generator=rng, dtype=torch.float64)
    return caveat.Task(module.double(), (x, (x[:, 0] > 0).long()), caveat.Categorical())


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_draws_have_the_mean_and_covariance_of_the_formula(rank: int, scale: float) -> None:
    rng = torch.Generator().manual_seed(1)
    shapes = {"a": (2, 2), "b": (3,)}
    state = {
        "mean": {n: torch.randn(s, generator=rng, dtype=torch.float64) for n, s in shapes.items()},
        "variance": {n: torch.rand(s, generator=rng, dtype=torch.float64) for n, s in shapes.items()},
        "buffers": {},
        "hyper": {},
    }
    if rank:
        state["deviations"] = {
            n: torch.randn((rank, *s), generator=rng, dtype=torch.float64) for n, s in shapes.items()
        }
    method = caveat.SWAG(rank=rank, scale=scale)
    count = 60_000
    draws = torch.stack([torch.cat([v.flatten() for v in d.values()]) for d in method.draws(state, None, count, rng)])  # type: ignore[arg-type]
    flat = {
        group: torch.cat([v.reshape(len(v), -1) if group == "deviations" else v.reshape(1, -1) for v in t.values()], 1)
        for group, t in state.items()
        if t
    }
    covariance = scale * torch.diag(flat["variance"][0])
    if rank:
        covariance = covariance / 2 + scale / (2 * (rank - 1)) * flat["deviations"].T @ flat["deviations"]
    spread = covariance.diagonal().sqrt()
    assert float(((draws.mean(0) - flat["mean"][0]) / spread * math.sqrt(count)).abs().max()) < 4.5
    # The standard error of a covariance entry is at most sqrt(2 c_ii c_jj / count).
    error = (torch.cov(draws.T) - covariance) / (spread[:, None] * spread) * math.sqrt(count / 2)
    assert float(error.abs().max()) < 4.5


def test_moments_are_those_of_the_iterates(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    task = trained_task(nn.Linear(3, 2))
    iterates: list[torch.Tensor] = []
    collect = swag._collect

    def spied(epoch: int, variables: Variables) -> None:
        iterates.append(variables.weights["weight"].detach().clone())
        collect(epoch, variables)

    monkeypatch.setattr(swag, "_collect", spied)
    training = Training(epochs=7, optimizer="sgd", learning_rate=0.1, schedule="constant", warmup=0.0)
    start = caveat.MAP(training=Training(epochs=30))
    posterior = caveat.fit(task, caveat.SWAG(rank=3, scale=1.0, training=training), start=start, progress=False)
    path = torch.stack(iterates)
    torch.testing.assert_close(posterior.state["mean"]["weight"], path.mean(0))
    torch.testing.assert_close(posterior.state["variance"]["weight"], path.var(0, correction=0), atol=1e-12, rtol=1e-6)
    running = torch.stack([path[: k + 1].mean(0) for k in range(7)])
    expected = {tuple((path[k] - running[k]).flatten().tolist()) for k in (4, 5, 6)}
    kept = posterior.state["deviations"]["weight"]
    for row in kept:
        assert any(torch.allclose(row.flatten(), torch.tensor(e, dtype=torch.float64)) for e in expected)


def test_batchnorm_statistics_are_those_of_each_draw() -> None:
    torch.manual_seed(0)
    task = trained_task(nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(inplace=True), nn.Linear(5, 2)))
    training = Training(epochs=4, optimizer="sgd", learning_rate=0.5, schedule="constant", warmup=0.0)
    method = caveat.SWAG(rank=2, default_draws=4, training=training)
    posterior = caveat.fit(task, method, start=caveat.MAP(training=Training(epochs=30)), progress=False)
    x, _ = task.train.everything()
    means = []
    for draw in posterior.sample(4):
        hidden = torch.nn.functional.linear(x, draw["0.weight"], draw["0.bias"])
        torch.testing.assert_close(draw["1.running_mean"], hidden.mean(0))
        means.append(draw["1.running_mean"])
    assert not torch.allclose(means[0], means[1])
    assert {tuple(m.tolist()) for m in means} == {tuple(d["1.running_mean"].tolist()) for d in posterior.sample(8)}, (
        "draws are the prepared ones"
    )


def linear_regression(noise: float) -> tuple[caveat.Task, Tensor, Tensor]:
    """A task, its inputs, and the precision matrix of its posterior."""
    rng = torch.Generator().manual_seed(0)
    mix = torch.eye(5) + 0.4 * torch.randn(5, 5, generator=rng)
    x = torch.randn(80, 5, generator=rng) @ mix
    y = x @ torch.randn(5, 1, generator=rng) + noise * torch.randn(80, 1, generator=rng)
    torch.manual_seed(0)
    task = caveat.Task(nn.Linear(5, 1, bias=False), (x, y), caveat.Gaussian(noise=noise))
    return task, x.double(), x.double().T @ x.double() / noise**2 + torch.eye(5, dtype=torch.float64)


def logistic_regression() -> tuple[caveat.Task, Tensor, Tensor]:
    """A task, its inputs, and the precision matrix of its posterior at the mode."""
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(150, 5, generator=rng)
    y = (torch.rand(150, generator=rng) < torch.sigmoid(x @ torch.tensor([2.0, -1, 0, 1, 0]))).float()[:, None]
    mode, inputs = torch.zeros(5, dtype=torch.float64), x.double()
    for _ in range(30):
        p = torch.sigmoid(inputs @ mode)
        precision = (inputs * (p * (1 - p))[:, None]).T @ inputs + torch.eye(5, dtype=torch.float64)
        mode = mode - torch.linalg.solve(precision, inputs.T @ (p - y[:, 0].double()) + mode)
    torch.manual_seed(0)
    return caveat.Task(nn.Linear(5, 1, bias=False), (x, y), caveat.Bernoulli()), inputs, precision


@pytest.mark.parametrize("kind", ["little noise", "much noise", "logistic"])
@pytest.mark.parametrize("rate", [0.005, 0.1])
def test_the_default_is_as_wide_as_the_posterior_whatever_the_learning_rate(kind: str, rate: float) -> None:
    task, x, precision = logistic_regression() if kind == "logistic" else linear_regression(0.2 if "li" in kind else 1)
    method = caveat.SWAG(training=Training(**{**vars(caveat.SWAG().training), "learning_rate": rate}))
    start = caveat.MAP(training=Training(epochs=500, learning_rate=0.03))
    posterior = caveat.fit(task, method, start=start, progress=False)
    draws = torch.stack([draw["weight"][0].double() for draw in posterior.sample(1000)])
    exact = ((x @ precision.inverse()) * x).sum()
    width = float(((draws - draws.mean(0)) @ x.T).square().mean(0).sum() / exact)
    assert 0.8 < width**0.5 < 1.25, "the standard deviation of the outputs, against the posterior's own"
    told = posterior.info.diagnostics
    assert told["directions"] <= 5
    paper = caveat.fit(task, caveat.SWAG(scale=1.0, training=method.training), start=start, progress=False)
    torch.testing.assert_close(
        paper.state["variance"]["weight"] * told["scale"], posterior.state["variance"]["weight"], rtol=1e-4, atol=0
    )
    assert paper.info.diagnostics["scale"] == 1.0


class Bounded(nn.Module):
    """Logits that no weights can make large, as those of a transformer whose last layer is a norm and frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 40), nn.Linear(40, 6)

    def forward(self, x: Tensor) -> Tensor:
        return 1.5 * nn.functional.normalize(self.second(torch.tanh(self.first(x))), dim=-1)


def test_few_rows_do_not_make_draws_that_know_nothing() -> None:
    """Rows x outputs are more than what they can teach: no draw loses as much as those of a posterior would."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(90, 10, generator=rng)
    y = (x[:, :6] + 0.5 * torch.randn(90, 6, generator=rng)).argmax(1)
    torch.manual_seed(0)
    task = caveat.Task(Bounded(), (x, y), caveat.Categorical())
    start = caveat.MAP(training=Training(epochs=100, learning_rate=0.02))
    posterior = caveat.fit(task, caveat.SWAG(rank=5, training=Training(epochs=8)), start=start, progress=False)
    told, scores = posterior.info, caveat.evaluate(posterior, {"again": (x, y)})["again"]
    assert any("draws lose half" in warning for warning in told.warnings)
    assert not any("no scale makes draws" in warning for warning in told.warnings)
    fits = [float(task.log_likelihood(task.network, draw, {})) for draw in posterior.sample(8, seed=0)]
    learned = float(task.log_likelihood(task.network, posterior.state["mean"], {})) - task.baseline
    lost = learned - (sum(fits) / 8 - task.baseline)
    assert lost / learned == pytest.approx(0.5, rel=0.06), "of the very draws that it was found with"
    assert scores["accuracy"].mean > 0.8
    far = caveat.SWAG(rank=2, training=Training(epochs=3, learning_rate=50.0))
    ruined = caveat.fit(task, far, start=start, progress=False).info
    assert ruined.diagnostics["scale"] == 1.0
    assert any("no better than the label marginals: its scale is 1" in warning for warning in ruined.warnings)


def test_batches_of_all_rows_are_warned_about_and_never_the_default() -> None:
    task, _, _ = linear_regression(1)
    start = caveat.MAP(training=Training(epochs=200, learning_rate=0.03))
    quiet = caveat.fit(task, caveat.SWAG(), start=start, progress=False)
    assert not quiet.info.warnings
    assert float(quiet.state["variance"]["weight"].min()) > 0
    training = Training(**{**vars(caveat.SWAG().training), "batch_size": 80})
    posterior = caveat.fit(task, caveat.SWAG(training=training), start=start, progress=False)
    assert any("batch_size=80 takes all 80 training rows" in warning for warning in posterior.info.warnings)


def test_bad_knobs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rank=20, epochs=1"):
        caveat.SWAG(training=Training(epochs=1))
    with pytest.raises(ValueError, match=r"rank=-1.*at least 0"):
        caveat.SWAG(rank=-1)
    with pytest.raises(ValueError, match=r"scale=0\.0.*above 0"):
        caveat.SWAG(scale=0.0)


def test_an_untrained_network_is_refused_with_advice() -> None:
    torch.manual_seed(0)
    module = nn.Linear(3, 2)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[3.0, 0, 0], [-3.0, 0, 0]]))
    with pytest.raises(ValueError, match=r"no better than the label marginals.*start=caveat\.MAP\(\)"):
        caveat.fit(trained_task(module), caveat.SWAG(), progress=False)


class Running(nn.Module):
    """A buffer of its own that training moves, other than BatchNorm's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("centre", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.centre = 0.5 * self.centre + 0.5 * (x.detach().mean(0) + 3)
        return self.layer(x - self.centre)


def test_buffers_that_training_moved_stay_with_the_draws() -> None:
    torch.manual_seed(0)
    task = trained_task(Running())
    start = caveat.fit(task, caveat.MAP(training=Training(epochs=30)), progress=False)
    still = Training(epochs=3, optimizer="sgd", learning_rate=1e-9, schedule="constant", warmup=0.0)
    posterior = caveat.fit(task, caveat.SWAG(scale=1.0, training=still), start=start, progress=False)
    x, _ = task.train.everything()
    assert "centre" in next(posterior.sample(1))
    torch.testing.assert_close(posterior.predict(x).probs, start.predict(x).probs, atol=0.05, rtol=0)


def test_the_variance_of_weights_far_from_zero_does_not_cancel() -> None:
    weights = {"w": (3 + 1e-4 * torch.randn(20, 1000, generator=torch.Generator().manual_seed(0)))}
    variables = Variables({}, extra={"mean/w": torch.zeros(1000), "spread/w": torch.zeros(1000)})
    for epoch, row in enumerate(weights["w"], start=1):
        variables.weights["w"] = row
        swag._collect(epoch, variables)
    exact = weights["w"].double().var(0, correction=0)
    torch.testing.assert_close(variables.extra["spread/w"].double() / 20, exact, rtol=0.05, atol=1e-11)


def test_it_cannot_stop_early() -> None:
    with pytest.raises(ValueError, match="cannot stop early"):
        caveat.SWAG(training=Training(epochs=9, patience=2))


def test_a_state_that_lacks_something_is_refused() -> None:
    torch.manual_seed(0)
    task = trained_task(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    method = caveat.SWAG(rank=2, default_draws=2, training=Training(epochs=3, optimizer="sgd", schedule="constant"))
    state = caveat.fit(task, method, progress=False).state
    again = swag.SWAGState.of(state).tensors()
    assert [*again] == ["mean", "deviations", "variance", "buffers", "seeds", "statistics", "hyper"]  # as in files
    for group in ("mean", "variance", "buffers", "statistics", "hyper"):
        lacking = {name: tensors for name, tensors in state.items() if name != group}
        with pytest.raises(caveat.CorruptFile, match=f"not the state of a SWAG posterior: it has no group '{group}'"):
            swag.SWAGState.of(lacking)
    fewer = {name: value for name, value in state["deviations"].items() if name != "0.weight"}
    with pytest.raises(caveat.CorruptFile, match="'deviations' is not about the same weights as its mean"):
        swag.SWAGState.of(state | {"deviations": fewer})
