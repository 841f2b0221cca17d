"""Variational dropout: the optimum of its bound, what it drops, and that what is left is the same network."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import caveat
from caveat import Training, VariationalDropout
from caveat.engine.variational import log_alpha, log_uniform_kl
from caveat.storage import stored_bytes

NOISE = 0.5
FLAT = Training(epochs=800, learning_rate=0.05, batch_size=50)


def regression() -> tuple[Tensor, Tensor]:
    """Of eight columns only the first three matter, the third hardly."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(50, 8, generator=rng, dtype=torch.float64)
    y = x[:, :3] @ torch.tensor([[1.5], [-0.8], [0.2]], dtype=torch.float64)
    return x, y + NOISE * torch.randn(50, 1, generator=rng, dtype=torch.float64)


def bound(mean: Tensor, log_std: Tensor) -> Tensor:
    """What is minimised, exactly: the expected squared error has a closed form for a linear layer."""
    x, y = regression()
    error = (y[:, 0] - x @ mean).square().sum() + (x.square() @ (2 * log_std).exp()).sum()
    return error / (2 * NOISE**2) + log_uniform_kl(log_alpha(mean, log_std)).sum()


def linear(**knobs: Any) -> caveat.Posterior:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 1, bias=False)).double()
    task = caveat.Task(module, regression(), caveat.Gaussian(noise=NOISE))
    return caveat.fit(task, VariationalDropout(**{"training": FLAT} | knobs), progress=False)


def optimum() -> tuple[Tensor, Tensor]:
    x, y = regression()
    mean = torch.linalg.lstsq(x, y).solution[:, 0].clone().requires_grad_()
    log_std = torch.full((8,), -2.0, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([mean, log_std], max_iter=300, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = bound(mean, log_std)
        value.backward()
        return value

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return mean.detach(), log_std.detach()


def test_it_reaches_the_optimum_of_its_bound_and_drops_what_that_says() -> None:
    active = linear(threshold=50.0).state["active"]
    assert len(active["mean"]) == 8
    mean, log_std = optimum()
    best = float(bound(mean, log_std))
    assert float(bound(active["mean"], active["log_std"])) < best + 0.15
    assert float(bound(active["mean"], torch.full_like(log_std, -5.0))) > best + 3, "the widths matter"
    posterior, alpha = linear(threshold=2.0), log_alpha(mean, log_std)
    dropped = sorted(set(range(8)) - set(posterior.state["active"]["indices"].tolist()))
    assert dropped == alpha.gt(2.0).nonzero()[:, 0].tolist()
    assert len(dropped) == 3
    assert posterior.info.diagnostics["sparsity"] == pytest.approx(3 / 8)
    assert posterior.info.coverage[0]["treatment"] == "Gaussian, 5 of 8 weights"


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 2)
    )  # fmt: skip


def images(prior: Any = None) -> caveat.Task:
    x = torch.randn(60, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    return caveat.Task(build(), (x, (x.mean((1, 2, 3)) > 0).long()), caveat.Categorical(), prior)


QUICK = VariationalDropout(
    std_learning_rate=0.2, kl_weight=0.1, training=Training(epochs=15, batch_size=20, learning_rate=0.02)
)


def test_what_is_left_is_the_network_with_zeros(tmp_path: Path) -> None:
    whole = caveat.fit(images(), dataclasses.replace(QUICK, threshold=50.0), progress=False)
    few = caveat.fit(images(), dataclasses.replace(QUICK, threshold=0.0), progress=False)
    mean, log_std = whole.state["active"]["mean"], whole.state["active"]["log_std"]
    keep = log_alpha(mean, log_std) <= 0.0
    assert 0.02 < float(keep.float().mean()) < 0.9
    assert torch.equal(few.state["active"]["mean"], mean[keep]), "the same training, then the threshold"
    x, _ = images().train.everything()
    zeroed = whole.state | {"active": whole.state["active"] | {"mean": mean * keep, "log_std": log_std}}
    same = caveat.Posterior(whole.method, zeroed, whole.network, whole.info)
    with torch.no_grad():
        torch.testing.assert_close(caveat.deploy(few)(x), caveat.deploy(same)(x), atol=1e-5, rtol=1e-5)
    draws = [*few.sample(2, seed=3)]
    outputs = torch.stack([few.network(draw, x) for draw in draws]).softmax(-1)
    torch.testing.assert_close(few.predict(x, draws=2, seed=3).samples, outputs, atol=1e-5, rtol=1e-4)
    assert sum(int(draws[0][f"{n}.weight"].count_nonzero()) for n in ("0", "4", "6")) == int(keep.sum())
    assert few.state["active"]["indices"].dtype == torch.int32
    assert stored_bytes(few.state) < stored_bytes(whole.state) - 8 * int((~keep).sum()) + 4 * len(keep) + 100
    few.save(tmp_path / "few")
    assert torch.equal(caveat.load(tmp_path / "few", build()).predict(x).samples, few.predict(x).samples)


def test_the_account_has_the_training_of_all_weights_and_the_bytes_of_few() -> None:
    dense = caveat.fit(images(), caveat.MeanFieldVI(training=QUICK.training), progress=False)
    few = caveat.fit(images(), dataclasses.replace(QUICK, threshold=0.0), progress=False)
    made, all_of_it = few.info.diagnostics["account"], dense.info.diagnostics["account"]
    assert few.info.flops == dense.info.flops
    assert made["total"]["training_flops"] == all_of_it["total"]["training_flops"]
    active = sum(layer["active"] for layer in made["layers"])
    assert active == len(few.state["active"]["mean"])
    assert made["total"]["stored_bytes"] < all_of_it["total"]["stored_bytes"]
    assert made["total"]["inference_flops"] < all_of_it["total"]["inference_flops"]
    assert few.info.diagnostics["sparsity"] == pytest.approx(1 - active / (36 + 512 + 16))


def test_same_seed_same_result() -> None:
    one, two, other = (caveat.fit(images(), QUICK, seed=seed, progress=False) for seed in (1, 1, 2))
    assert torch.equal(one.state["active"]["mean"], two.state["active"]["mean"])
    assert not torch.equal(one.state["rest"]["6.bias"], other.state["rest"]["6.bias"])


def test_the_noise_is_held_back_while_the_divergence_warms_up() -> None:
    training = Training(epochs=6, batch_size=20, learning_rate=0.02)
    late, early = (
        caveat.fit(images(), dataclasses.replace(QUICK, kl_warmup=share, training=training), progress=False)
        for share in (1.0, 0.0)
    )
    losses = [p.info.diagnostics["history"][0]["loss"] for p in (late, early)]
    assert losses[0] < 0.5 * losses[1]


def test_bad_input() -> None:
    empty = caveat.fit(images(), dataclasses.replace(QUICK, threshold=-100.0), progress=False)
    assert empty.state["active"]["counts"].tolist() == [1, 1, 1]
    assert any("emptied 0, 4, 6: the best weight was kept" in w for w in empty.info.warnings)
    none = caveat.Task(nn.Sequential(nn.Flatten(), nn.LayerNorm(36)), images().train.everything(), caveat.Categorical())
    with pytest.raises(ValueError, match="none of the selected parameters is a weight"):
        caveat.fit(none, QUICK, progress=False)
    with pytest.raises(ValueError, match=r"kl_weight=-1"):
        VariationalDropout(kl_weight=-1)


def test_any_prior_is_that_of_biases_alone() -> None:
    for prior in (caveat.LaplacePrior(), caveat.GaussianPrior(1e6)):
        posterior = caveat.fit(images(prior), QUICK, progress=False)
        assert float(posterior.state["active"]["mean"].abs().max()) > 0.05
    assert float(posterior.state["rest"]["6.bias"].abs().max()) < 0.05


def test_a_threshold_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match=r"threshold=nan\): must be a number"):
        VariationalDropout(threshold=float("nan"))
