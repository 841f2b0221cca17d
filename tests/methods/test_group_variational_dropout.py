"""Group variational dropout: the optimum of its bound, the units it takes out, and the network that is left."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import caveat
from caveat import GroupVariationalDropout, StructuredBayesianPruning, Training
from caveat.engine.variational import (
    gaussian_kl,
    log_alpha,
    log_uniform_kl,
    lognormal_kl,
    lognormal_log_moment,
    lognormal_log_snr,
)
from caveat.storage import stored_bytes

NOISE = 0.5
FLAT = Training(epochs=800, learning_rate=0.05, batch_size=50)
ALL = GroupVariationalDropout(threshold=50.0, training=FLAT)
QUICK = Training(epochs=15, batch_size=20, learning_rate=0.02)
GROUP = GroupVariationalDropout(std_learning_rate=0.2, training=QUICK)
PRUNING = StructuredBayesianPruning(noise_learning_rate=0.3, training=QUICK)
both = pytest.mark.parametrize("method", [GROUP, PRUNING], ids=["group", "pruning"])


def regression() -> tuple[Tensor, Tensor]:
    """Of eight columns only the first three matter."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(50, 8, generator=rng, dtype=torch.float64)
    y = x[:, :3] @ torch.tensor([[1.5, 1.0], [-0.8, 2.0], [0.7, 0.0]], dtype=torch.float64)
    return x, y + NOISE * torch.randn(50, 2, generator=rng, dtype=torch.float64)


def linear(method: caveat.Method) -> caveat.Posterior:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 2, bias=False)).double()
    prior = caveat.GaussianPrior(0.1)
    return caveat.fit(caveat.Task(module, regression(), caveat.Gaussian(noise=NOISE), prior), method, progress=False)


def expected_error(mean: Tensor, square: Tensor) -> Tensor:
    """Of a linear layer with weights of these first and second moments, [2, 8]."""
    x, y = regression()
    return ((y - x @ mean.T).square().sum() + (x.square() @ (square - mean.square()).T).sum()) / (2 * NOISE**2)


def group_bound(mean: Tensor, log_std: Tensor, scale: Tensor, scale_log_std: Tensor) -> Tensor:
    squares = (scale.square() + (2 * scale_log_std).exp()) * (mean.square() + (2 * log_std).exp())
    kl = log_uniform_kl(log_alpha(scale, scale_log_std)).sum() + gaussian_kl(mean, log_std, mean.new_ones(()))
    return expected_error(scale * mean, squares) + kl


def pruning_bound(mean: Tensor, location: Tensor, log_scale: Tensor) -> Tensor:
    location, log_scale = location.clamp(-20, 0), log_scale.clamp(-8, 4)  # as the method: finite gradients
    first, second = (lognormal_log_moment(location, log_scale, k).exp() for k in (1, 2))
    error = expected_error(mean * first, mean.square() * second)
    return error + lognormal_kl(location, log_scale).sum() + 0.05 * mean.square().sum()


def minimum(bound: Callable[..., Tensor], starts: list[Tensor]) -> float:
    tensors = [t.clone().requires_grad_() for t in starts]
    optimizer = torch.optim.LBFGS(tensors, max_iter=400, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = bound(*tensors)
        value.backward()
        return value

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return float(bound(*tensors).detach())


def test_group_dropout_reaches_the_optimum_of_its_bound() -> None:
    x, y = regression()
    state = linear(ALL).state
    found = [state["active"][k].view(2, 8) for k in ("mean", "log_std")]
    found += [state["noise"][k] for k in ("mean", "log_std")]
    weights = torch.linalg.lstsq(x, y).solution.T
    low = torch.full((2, 8), -2.0, dtype=torch.float64)
    best = minimum(group_bound, [weights, low, torch.ones(8, dtype=torch.float64), low[0]])
    assert float(group_bound(*found)) < best + 1.0
    assert float(group_bound(found[0], low - 3, found[2], low[0] - 3)) > best + 20, "the widths matter"


def test_pruning_reaches_the_optimum_of_its_bound() -> None:
    x, y = regression()
    state = linear(StructuredBayesianPruning(threshold=0.0, training=FLAT)).state
    found = [state["active"]["mean"].view(2, 8), state["noise"]["location"], state["noise"]["log_scale"]]
    weights = torch.linalg.lstsq(x, y).solution.T
    zero = torch.zeros(8, dtype=torch.float64)
    best = min(minimum(pruning_bound, [weights, zero - a, zero - 2]) for a in (0.1, 3.0))
    assert float(pruning_bound(*found)) < best + 1.0
    assert float(pruning_bound(found[0], found[1], zero - 5)) > best + 10, "the widths matter"


def test_inputs_that_do_not_matter_go() -> None:
    for method in (dataclasses.replace(ALL, threshold=-1.0), StructuredBayesianPruning(training=FLAT)):
        posterior = linear(method)
        weight = next(posterior.sample(1))["0.weight"]
        assert weight.any(0).tolist() == [True] * 3 + [False] * 5
        assert posterior.info.diagnostics["units"] == {"inputs of 0": "3 of 8"}
        assert len(posterior.state["active"]["mean"]) == 6
        assert posterior.state["active"]["columns/0"].tolist() == [0, 1, 2]
        assert posterior.info.diagnostics["sparsity"] == pytest.approx(5 / 8)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 8), nn.ReLU(), nn.Linear(8, 2)
    )  # fmt: skip


def images(prior: Any = None) -> caveat.Task:
    x = torch.randn(60, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    return caveat.Task(build(), (x, (x.mean((1, 2, 3)) > 0).long()), caveat.Categorical(), prior)


def score(method: caveat.Method, noise: dict[str, Tensor]) -> Tensor:
    if isinstance(method, GroupVariationalDropout):
        return log_alpha(noise["mean"], noise["log_std"])
    return -lognormal_log_snr(noise["location"], noise["log_scale"]).exp()


@both
def test_what_is_left_is_a_narrower_network_of_the_same_function(method: Any, tmp_path: Path) -> None:
    group = method is GROUP
    keep_all = 50.0 if group else 0.0
    whole = caveat.fit(images(), dataclasses.replace(method, threshold=keep_all), progress=False)
    scores = score(method, whole.state["noise"])
    assert len(scores) == 6 + 8 + 96
    middle = float(scores.median())
    few = caveat.fit(images(), dataclasses.replace(method, threshold=middle if group else -middle), progress=False)
    assert not few.info.warnings
    assert len(few.state["noise"]["of/4"]) == 16 * len(few.state["rest"]["0.bias"])
    x, _ = images().train.everything()
    # The wide state with the numbers of units that went at zero.
    keep = scores < middle
    noise = dict(whole.state["noise"])
    noise["mean"] = keep * (noise["mean"] if "mean" in noise else lognormal_log_moment(*_pair(noise), 1).exp())
    noise["log_std"] = torch.full_like(noise["mean"], -torch.inf)
    noise = {k: v for k, v in noise.items() if k not in ("location", "log_scale")}
    zeroed = caveat.Posterior(whole.method, whole.state | {"noise": noise}, whole.network, whole.info)
    with torch.no_grad():
        torch.testing.assert_close(caveat.deploy(few)(x), caveat.deploy(zeroed)(x), atol=1e-4, rtol=1e-4)
    narrow = next(m for m in caveat.deploy(few).modules() if isinstance(m, nn.Conv2d))
    assert f"{narrow.out_channels} of 6" == few.info.diagnostics["units"]["0"]
    draws = [*few.sample(2, seed=3)]
    assert draws[0]["0.weight"].shape == (6, 1, 3, 3)
    outputs = torch.stack([few.network(draw, x) for draw in draws]).softmax(-1)
    torch.testing.assert_close(few.predict(x, draws=2, seed=3).samples, outputs, atol=1e-5, rtol=1e-4)
    assert not torch.equal(draws[0]["6.weight"], draws[1]["6.weight"])
    assert stored_bytes(few.state) < 0.8 * stored_bytes(whole.state)
    few.save(tmp_path / "few")
    loaded = caveat.load(tmp_path / "few", build())
    assert torch.equal(loaded.predict(x).samples, few.predict(x).samples)


def _pair(noise: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return noise["location"], noise["log_scale"]


@both
def test_draws_have_the_moments_of_the_posterior(method: caveat.Method) -> None:
    posterior = caveat.fit(images(), method, progress=False)
    many = torch.stack([draw["6.weight"] for draw in posterior.sample(1000, seed=1)])
    active, noise = posterior.state["active"], posterior.state["noise"]
    count = int(active["counts"][-1])
    mean = active["mean"][-count:].view(2, -1)
    of = noise["of/6"][:, 0].long()
    if method is GROUP:
        first, second = noise["mean"], noise["mean"].square() + (2 * noise["log_std"]).exp()
        square = mean.square() + (2 * active["log_std"][-count:]).exp().view(2, -1)
    else:
        first, second = (lognormal_log_moment(*_pair(noise), k).exp() for k in (1, 2))
        square = mean.square()
    kept = many.any(0).any(0)
    std = (second[of] * square - (first[of] * mean).square()).sqrt()
    assert bool(((many.mean(0)[:, kept] - first[of] * mean).abs() < 5 * std / 1000**0.5 + 1e-6).all())
    torch.testing.assert_close(many.std(0)[:, kept].double(), std.double(), rtol=0.15, atol=1e-6)


@both
def test_same_seed_same_result_and_any_prior(method: caveat.Method) -> None:
    one, two = (caveat.fit(images(), method, seed=1, progress=False) for _ in range(2))
    for group in ("active", "noise", "rest"):
        assert all(torch.equal(value, two.state[group][name]) for name, value in one.state[group].items())
    x, _ = images().train.everything()
    for prior in (caveat.LaplacePrior(), caveat.GaussianPrior({"0.*": 2.0, "*": 1.0})):
        assert bool(caveat.fit(images(prior), method, progress=False).predict(x).probs.isfinite().all())


@both
def test_the_account_has_the_training_of_all_units_and_the_bytes_of_few(method: caveat.Method) -> None:
    few = caveat.fit(images(), method, progress=False)
    made = few.info.diagnostics["account"]
    gaussian = method is GROUP
    other = caveat.MeanFieldVI(training=QUICK) if gaussian else caveat.RigL(density=1.0, training=QUICK)
    dense = caveat.fit(images(), other, progress=False)
    assert few.info.flops == dense.info.flops
    assert made["total"]["training_bytes"] == dense.info.diagnostics["account"]["total"]["training_bytes"]
    hyper = sum(t.numel() * t.element_size() for t in few.state["hyper"].values())
    counted = made["total"]["stored_bytes"] + 8 * len(few.state["active"]["counts"]) + hyper
    assert few.info.stored_bytes == pytest.approx(counted, abs=16)


@both
def test_bad_input(method: Any) -> None:
    impossible = -100.0 if method is GROUP else 1e30
    empty = caveat.fit(images(), dataclasses.replace(method, threshold=impossible), progress=False)
    assert empty.info.diagnostics["units"] == {"0": "1 of 6", "4": "1 of 8", "inputs of 4": "1 of 96"}
    assert any("would have emptied the channels of 0" in w for w in empty.info.warnings)
    x, y = images().train.everything()
    none = caveat.Task(nn.Sequential(nn.Flatten(), nn.LayerNorm(36)), (x, y), caveat.Categorical())
    with pytest.raises(ValueError, match="no linear or convolutional layer"):
        caveat.fit(none, method, progress=False)
    lone = nn.Sequential(nn.Conv2d(1, 2, 6), nn.Flatten())
    with pytest.raises(ValueError, match="no units that could be pruned"):
        caveat.fit(caveat.Task(lone, (x, y), caveat.Categorical()), method, progress=False)
    with pytest.raises(ValueError, match="kl_warmup=2"):
        dataclasses.replace(method, kl_warmup=2)
