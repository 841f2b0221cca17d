"""The training loop: what it does with batches, validation data, precision and numbers that blow up."""

import copy
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import caveat
from caveat import Training
from caveat.engine.distributed import Ranks
from caveat.engine.run import Run
from caveat.engine.training.loop import BatchPart, Moments, Variables, optimise, steps_per_epoch
from caveat.storage import State


def rows(n: int = 65) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] + x[:, 1] > 0).long()


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Linear(16, 2))


def fit(task: caveat.Task, training: Training) -> caveat.Posterior:
    return caveat.fit(task, caveat.MAP(training=training), progress=False)


def test_a_leftover_row_is_not_a_batch_of_its_own() -> None:
    task = caveat.Task(network(), DataLoader(TensorDataset(*rows(65)), 32), caveat.Categorical())
    posterior = fit(task, Training(epochs=2))  # 65 = 32 + 32 + 1: BatchNorm could not take the last
    assert int(posterior.state["params"]["1.num_batches_tracked"]) == 6


def test_every_row_is_seen_once_an_epoch() -> None:
    seen: list[int] = []

    def augment(x: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
        seen.extend(x[:, 0].int().tolist())
        return x + 0 * torch.rand(x.shape, generator=rng)

    x = torch.arange(23, dtype=torch.float32)[:, None].repeat(1, 4)
    task = caveat.Task(network(), (x, rows(23)[1]), caveat.Categorical(), augment=augment)
    fit(task, Training(epochs=3, batch_size=5))
    for epoch in range(3):
        assert sorted(seen[23 * epoch : 23 * (epoch + 1)]) == list(range(23))
    assert seen[:23] != seen[23:46], "the order changes"


def test_ranks_augment_their_rows_each_in_its_own_way() -> None:
    class Alone(Ranks):
        def add(self, tensors: Iterable[torch.Tensor]) -> None:
            """The other rank is only imagined."""

    drawn: list[torch.Tensor] = []

    def augment(x: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
        drawn.append(torch.rand(2, generator=rng))
        return x

    task = caveat.Task(network(), rows(8), caveat.Categorical(), augment=augment)
    start: State = {"params": task.network.params() | task.network.buffers(), "hyper": task.hyper}
    for rank in range(2):
        caveat.MAP(training=Training(epochs=1, batch_size=8)).fit(task, start, Run(ranks=Alone(rank, 2)))
    assert not torch.equal(*drawn)


def test_early_stopping_puts_the_best_epoch_back() -> None:
    x, y = rows(60)
    noisy = torch.randint(0, 2, (60,), generator=torch.Generator().manual_seed(3))
    task = caveat.Task(network(), (x, noisy), caveat.Categorical(), caveat.GaussianPrior(1e-4), validation=(x + 0.5, y))
    posterior = fit(task, Training(epochs=200, patience=5, learning_rate=0.05, schedule="constant"))
    history = posterior.info.diagnostics["history"]
    losses = [record["validation"] for record in history]
    assert len(history) < 200
    assert len(losses) - 1 - losses.index(min(losses)) == 5
    at_end = -float(posterior.predict(x + 0.5).log_prob(y).double().mean())
    assert at_end == pytest.approx(min(losses), rel=1e-5)
    with pytest.raises(ValueError, match=r"patience=3.*validation=0\.1"):
        fit(caveat.Task(network(), (x, y), caveat.Categorical()), Training(patience=3))


def test_a_loss_that_blows_up_is_an_error_with_advice() -> None:
    x, _ = rows()
    task = caveat.Task(nn.Linear(4, 1), (x, 1e3 * x[:, :1]), caveat.Gaussian(noise=1e-3))
    with pytest.raises(FloatingPointError, match=r"lower learning_rate \(now 1000\)"):
        fit(task, Training(epochs=50, optimizer="sgd", learning_rate=1000.0, warmup=0.0))
    broken = caveat.Task(network(), rows(), caveat.Categorical(), augment=lambda x, rng: x / 0)
    with pytest.raises(FloatingPointError, match=r"inputs of row .* augment="):
        fit(broken, Training(epochs=1))


def test_adamw_says_that_it_is_not_map_and_needs_one_precision() -> None:
    task = caveat.Task(network(), rows(), caveat.Categorical(), caveat.GaussianPrior(10.0))
    posterior = fit(task, Training(epochs=1, optimizer="adamw"))
    assert "not the MAP" in posterior.info.warnings[0]
    with pytest.raises(ValueError, match="needs a Gaussian prior of one precision"):
        fit(
            caveat.Task(network(), rows(), caveat.Categorical(), caveat.LaplacePrior()),
            Training(epochs=1, optimizer="adamw"),
        )


def test_bfloat16_and_channels_last_change_speed_not_results() -> None:
    x = torch.randn(32, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    y = (x.mean((1, 2, 3)) > 0).long()
    torch.manual_seed(0)
    conv = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
    task = caveat.Task(conv, (x, y), caveat.Categorical())
    long = Training(epochs=30, batch_size=8, learning_rate=0.03)
    plain = fit(task, long)
    last = fit(task, replace(long, channels_last=True))
    half = fit(task, replace(long, precision="bfloat16"))
    assert float((plain.predict(x).probs.argmax(1) == y).double().mean()) > 0.9, "it has learned"
    torch.testing.assert_close(last.predict(x).probs, plain.predict(x).probs, atol=1e-4, rtol=0)
    torch.testing.assert_close(half.predict(x).probs, plain.predict(x).probs, atol=0.02, rtol=0)
    assert half.state["params"]["0.weight"].dtype == torch.float32
    assert not torch.equal(half.predict(x).probs, plain.predict(x).probs), "bfloat16 was really used"


def test_channels_last_is_left_out_where_torch_overruns_its_memory() -> None:
    x = torch.randn(99, 8, 16, 16, generator=torch.Generator().manual_seed(0))
    y = (x.mean((1, 2, 3)) > 0).long()
    torch.manual_seed(0)
    narrow = nn.Sequential(nn.Conv2d(8, 16, 1, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 2))
    task = caveat.Task(narrow, (x, y), caveat.Categorical())
    plain, last = (fit(task, Training(epochs=3, batch_size=33, channels_last=flag)) for flag in (False, True))
    assert "channels_last=True was left out: on a CPU torch's gradient of 0," in last.info.warnings[0]
    assert torch.equal(last.state["params"]["0.weight"], plain.state["params"]["0.weight"])
    assert not any("channels_last" in said for said in plain.info.warnings)


def test_compiled_training_gives_the_same() -> None:
    task = caveat.Task(network(), rows(64), caveat.Categorical())
    plain = fit(task, Training(epochs=2, batch_size=32))
    compiled = fit(task, Training(epochs=2, batch_size=32, compile=True))
    for name, value in plain.state["params"].items():
        torch.testing.assert_close(compiled.state["params"][name], value, atol=1e-4, rtol=1e-3)


def test_floating_point_operations_are_counted() -> None:
    task = caveat.Task(nn.Linear(4, 2), rows(64), caveat.Categorical())
    posterior = fit(task, Training(epochs=5))
    assert posterior.info.flops == 3 * 5 * 64 * 2 * 4 * 2  # forward 2 * in * out a row, backward twice that
    assert posterior.info.gradient_evaluations == 5


def test_dropout_inside_the_module_does_not_touch_the_global_random_state() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    task = caveat.Task(copy.deepcopy(module), rows(), caveat.Categorical())
    state = torch.random.get_rng_state()
    first, second = fit(task, Training(epochs=3)), fit(task, Training(epochs=3))
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.equal(first.state["params"]["0.weight"], second.state["params"]["0.weight"])


def test_the_optimum_does_not_depend_on_the_batch_size() -> None:
    x, y = rows(64)
    found = []
    for batch_size in (64, 16):
        task = caveat.Task(nn.Linear(4, 2).double(), (x.double(), y), caveat.Categorical(), caveat.GaussianPrior(4.0))
        training = Training(epochs=800, optimizer="sgd", learning_rate=0.3, batch_size=batch_size, momentum=0.0)
        found.append(fit(task, training).state["params"]["weight"])
    torch.testing.assert_close(found[0], found[1], atol=5e-3, rtol=0)


def test_one_row_at_a_time_is_a_sentence_with_batchnorm() -> None:
    with pytest.raises(ValueError, match="batch_size of at least 2"):
        fit(caveat.Task(network(), rows(8), caveat.Categorical()), Training(epochs=1, batch_size=1))


class Quadratic:
    """Weights to reach 0 and logarithms of scales to reach log 3, in the loop of `optimise`."""

    def __init__(self, folder: Path | None = None, **training: object) -> None:
        self.task = caveat.Task(nn.Linear(4, 2), rows(24), caveat.Categorical())
        self.weights, self.log_scale = torch.ones(5).requires_grad_(), torch.zeros(5).requires_grad_()
        extra = {"seen": torch.zeros((), dtype=torch.int64)}
        self.variables = Variables({"w": self.weights}, {}, {}, extra, {"log_scale": self.log_scale}, 0.1)
        knobs = {"epochs": 10, "batch_size": 8, "learning_rate": 0.05, "schedule": "constant", "warmup": 0.0}
        self.training = Training(**knobs | training)  # type: ignore[arg-type]
        self.run = Run(folder=folder)
        self.moments: list[list[int]] = []

    def loss(
        self, x: torch.Tensor, y: torch.Tensor, part: BatchPart, rng: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scale = self.log_scale.exp()
        noise = 0.1 * torch.randn(5, generator=rng)
        return 0.5 * (self.weights + noise).square().sum() + 0.5 * (scale.square() / 9 - 2 * self.log_scale).sum(), x

    def after_step(self, moments: Moments) -> None:
        self.variables.extra["seen"] += 1
        self.moments.append([len(moments(self.weights)), len(moments(self.log_scale))])

    def train(self, **kwargs: object) -> list[dict[str, float]]:
        return optimise(
            self.task,
            self.task.network,
            self.variables,
            self.loss,
            self.training,
            self.run,
            after_step=self.after_step,
            **kwargs,  # type: ignore[arg-type]
        )


@pytest.mark.parametrize(("optimizer", "kept"), [("sgd", 1), ("adam", 2)])
def test_scales_are_moved_by_adam_at_a_rate_of_their_own(optimizer: str, kept: int) -> None:
    problem = Quadratic(epochs=60, optimizer=optimizer, schedule="cosine")
    history = problem.train()
    torch.testing.assert_close(problem.log_scale, torch.full((5,), 3.0).log(), atol=0.02, rtol=0)
    torch.testing.assert_close(problem.weights, torch.zeros(5), atol=0.1, rtol=0)
    assert int(problem.variables.extra["seen"]) == 180, "after every step"
    assert problem.moments == [[kept, 2]] * 180
    assert history[0]["rate"] <= 0.05
    first = Quadratic(epochs=1, batch_size=24, optimizer=optimizer)
    first.train()
    torch.testing.assert_close(first.log_scale, torch.full((5,), 0.1))  # Adam's first step is its rate


def test_weight_decay_does_not_reach_scales() -> None:
    found = []
    for decay in (None, {"w": 5.0}):
        problem = Quadratic(epochs=3)
        problem.train(decay=decay)
        found.append((problem.weights.detach().clone(), problem.log_scale.detach().clone()))
    assert not torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_a_change_after_a_step_and_of_its_moments_holds() -> None:
    problem = Quadratic(epochs=1, batch_size=12, optimizer="sgd")  # two steps
    halves: list[torch.Tensor] = []

    def after(moments: Moments) -> None:
        with torch.no_grad():
            (momentum,) = moments(problem.weights)
            halves.append(momentum.clone())
            problem.weights[0] = 7.0
            momentum[0] = 0.0

    problem.after_step = after  # type: ignore[method-assign]
    problem.train()
    assert float(halves[0][0]) != 0
    assert float(halves[1][0]) == pytest.approx(7.0, abs=0.5), "from 0 the momentum is the gradient of the new value"
    assert float(halves[1][1]) == pytest.approx(1.9, abs=0.4), "that of the others is kept"


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_two_optimisers_resume_exactly(optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Quadratic(optimizer=optimizer)
    whole.train()

    def killed(self: Run, carry: State, note: dict[str, object]) -> None:
        checkpoint(self, carry, note)
        if note["epoch"] == 4:
            raise KeyboardInterrupt

    checkpoint = Run.checkpoint
    with monkeypatch.context() as patch:
        patch.setattr(Run, "checkpoint", killed)
        patch.setattr(Run, "checkpoint_due", lambda self: True)
        with pytest.raises(KeyboardInterrupt):
            Quadratic(tmp_path / "run", optimizer=optimizer).train()
    resumed = Quadratic(tmp_path / "run", optimizer=optimizer)
    history = resumed.train()
    assert len(history) == 10
    assert len(resumed.moments) == 18, "six epochs of three steps were left"
    assert int(resumed.variables.extra["seen"]) == 30
    assert torch.equal(resumed.weights, whole.weights)
    assert torch.equal(resumed.log_scale, whole.log_scale)


def test_the_cost_of_a_row_can_be_given() -> None:
    problem = Quadratic(epochs=2)
    problem.train(training_flops=11.0)
    assert problem.run.flops == 2 * 24 * 11.0
    assert steps_per_epoch(65, 32) == 3
    assert steps_per_epoch(3, 2) == 1, "no batch of a single row"
