"""The training loop: what it does with batches, validation data, precision and numbers that blow up."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import caveat
from caveat import Training


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
    plain = fit(task, Training(epochs=5))
    last = fit(task, Training(epochs=5, channels_last=True))
    half = fit(task, Training(epochs=5, precision="bfloat16"))
    torch.testing.assert_close(last.predict(x).probs, plain.predict(x).probs, atol=1e-4, rtol=0)
    torch.testing.assert_close(half.predict(x).probs, plain.predict(x).probs, atol=0.02, rtol=0)
    assert half.state["params"]["0.weight"].dtype == torch.float32
    assert not torch.equal(half.predict(x).probs, plain.predict(x).probs), "bfloat16 was really used"


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
