"""SSVI against exact optima, on digits, and what its state, its knobs and its predictions are."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import caveat
from caveat import SSVI, GaussianPrior, Training
from caveat.engine.sparse.removal_criteria import CRITERIA
from caveat.engine.variational import kl_weight_for, std_rate_for
from caveat.storage import stored_bytes

NOISE, PRECISION = 0.5, 4.0


def regression() -> tuple[Tensor, Tensor]:
    """Correlated inputs."""
    rng = torch.Generator().manual_seed(0)
    mix = torch.eye(8, dtype=torch.float64) + 0.3 * torch.randn(8, 8, generator=rng, dtype=torch.float64)
    x = torch.randn(60, 8, generator=rng, dtype=torch.float64) @ mix
    y = x @ (0.3 * torch.randn(8, 1, generator=rng, dtype=torch.float64))  # what is left out is no more than noise
    return x, y + NOISE * torch.randn(60, 1, generator=rng, dtype=torch.float64)


LINEAR = SSVI(
    density=1.0,
    dense=(),
    initial_std=0.1,
    std_learning_rate=0.05,
    kl_weight=1.0,
    kl_warmup=0.0,
    interval=50,
    training=Training(epochs=1200, learning_rate=0.1, batch_size=60),
)


def linear(**knobs: Any) -> caveat.Posterior:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 1, bias=False)).double()
    task = caveat.Task(module, regression(), caveat.Gaussian(noise=NOISE), GaussianPrior(PRECISION))
    return caveat.fit(task, dataclasses.replace(LINEAR, **knobs), progress=False)


@pytest.mark.parametrize(("density", "replacement"), [(1.0, 0.3), (0.5, 0.0), (0.5, 0.3)])
def test_active_weights_reach_the_optimum_of_their_subspace(density: float, replacement: float) -> None:
    active = linear(density=density, replacement=replacement).state["active"]
    x, y = regression()
    columns = torch.arange(8) if density == 1 else active["indices"].long()
    assert len(columns) == 8 * density
    x = x[:, columns]
    hessian = x.T @ x / NOISE**2 + PRECISION * torch.eye(len(columns))
    std = hessian.diagonal().rsqrt()
    assert float((torch.linalg.inv(hessian).diagonal().sqrt() / std).max()) > 1.3, "the posterior is correlated"
    torch.testing.assert_close(active["log_std"].exp(), std, rtol=0.06, atol=0)
    mean = torch.linalg.solve(hessian, x.T @ y / NOISE**2)[:, 0]
    torch.testing.assert_close(active["mean"], mean, rtol=0, atol=0.3 * float(std.min()))


def test_exchange_finds_the_columns_that_matter() -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(100, 40, generator=rng)
    y = x[:, [3, 17, 29, 31]] @ torch.tensor([[2.0], [-1.5], [1.0], [2.5]]) + 0.1 * torch.randn(100, 1, generator=rng)
    task = caveat.Task(nn.Sequential(nn.Linear(40, 1)), (x, y), caveat.Gaussian(noise=0.1))
    training = Training(epochs=60, batch_size=20, learning_rate=0.05)
    posterior = caveat.fit(task, SSVI(density=0.1, interval=10, replacement=0.5, training=training), progress=False)
    assert posterior.state["active"]["indices"].tolist() == [3, 17, 29, 31]


@pytest.fixture(scope="module")
def digits() -> caveat.Task:
    data = caveat.data.load("digits")
    x, y = data.train.tensors
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return caveat.Task(module, (x[:600], y[:600]), caveat.Categorical(), GaussianPrior(25.0))


@pytest.mark.parametrize("method", [SSVI, caveat.MeanFieldVI])
def test_deviations_are_learned_on_digits(method: Any, digits: caveat.Task) -> None:
    knobs = {"density": 0.2} if method is SSVI else {}
    training = Training(epochs=40, batch_size=60, learning_rate=0.01)
    posterior = caveat.fit(digits, method(training=training, **knobs), progress=False)
    active, (x, y) = posterior.state["active"], digits.train.everything()
    change = float((active["log_std"] - math.log(0.01)).abs().median())
    assert change > 0.5
    assert posterior.info.diagnostics["median_std_change"] == pytest.approx(change)
    assert float(active["log_std"].std()) > 0.2, "and differ from weight to weight"
    assert float((posterior.predict(x).probs.argmax(-1) == y).float().mean()) > 0.95


def small(n: int = 40, prior: Any = None) -> caveat.Task:
    torch.manual_seed(0)
    x = torch.randn(n, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    module = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 2)
    )  # fmt: skip
    return caveat.Task(module, (x, (x.mean((1, 2, 3)) > 0).long()), caveat.Categorical(), prior)


QUICK = SSVI(density=0.3, interval=2, training=Training(epochs=4, batch_size=10, learning_rate=0.01))


@pytest.mark.parametrize("knobs", [*({"criterion": c} for c in CRITERIA), {"addition": "mean"}, {"addition": "batches"},
    {"allocation": "erk"}, {"scope": "global"}, {"new_std": 0.003}, {"prediction": "local"}, {"dense": ("6",)},
    {"training": Training(epochs=4, batch_size=10, optimizer="sgd", precision="bfloat16")},
], ids=str)  # fmt: skip
def test_every_way_trains_and_predicts(knobs: dict[str, Any]) -> None:
    posterior = caveat.fit(small(), dataclasses.replace(QUICK, **knobs), progress=False)
    x, _ = small().train.everything()
    assert bool(posterior.predict(x).probs.isfinite().all())
    assert posterior.info.diagnostics["exchanges"] == 5
    assert posterior.info.diagnostics["exchanged"] > 20
    assert posterior.state["active"]["log_std"].isfinite().all()
    assert int(posterior.state["rest"]["1.num_batches_tracked"]) == 16, "statistics are of the training passes alone"
    other = caveat.fit(small(), dataclasses.replace(QUICK, **knobs), progress=False)
    assert torch.equal(posterior.predict(x).samples, other.predict(x).samples), "the same seed gives the same"


def test_the_first_convolution_is_dense_unless_said_otherwise() -> None:
    treatments = {e["layer"]: e["treatment"] for e in caveat.fit(small(), QUICK, progress=False).info.coverage}
    assert treatments["0"] == "Gaussian, all weights; bias a point"
    assert treatments["1"] == "point"
    assert treatments["4"] == "Gaussian, 154 of 512 weights; bias a point"
    sparse = caveat.fit(small(), dataclasses.replace(QUICK, dense=()), progress=False)
    assert sparse.info.coverage[0]["treatment"] == "Gaussian, 11 of 36 weights; bias a point"


class OwnConv(nn.Conv1d):
    pass


def hooked(layer: nn.Module) -> nn.Module:
    layer.register_forward_pre_hook(lambda *_: None)
    return layer


DRAWN: dict[str, Callable[[], nn.Module]] = {
    "circular": lambda: nn.Conv1d(4, 8, 3, padding=1, padding_mode="circular"),
    "lopsided": lambda: nn.Conv1d(4, 8, 4, padding="same"),
    "transposed": lambda: nn.ConvTranspose1d(4, 8, 3, padding=1),
    "subclass": lambda: OwnConv(4, 8, 3, padding=1),
    "hooked": lambda: hooked(nn.Conv1d(4, 8, 3, padding=1)),
}


@pytest.mark.parametrize("kind", DRAWN)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_the_first_convolution_is_dense_of_whatever_kind_it_is(kind: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(20, 4, 6)
    module = nn.Sequential(DRAWN[kind](), nn.ReLU(), nn.Conv1d(8, 8, 3), nn.Flatten(), nn.Linear(32, 2))
    task = caveat.Task(module, (x, (x.mean((1, 2)) > 0).long()), caveat.Categorical())
    found = caveat.fit(task, dataclasses.replace(QUICK, density=0.25), progress=False)
    treatments = {entry["layer"]: entry["treatment"] for entry in found.info.coverage}
    assert treatments["0"] == "Gaussian, all weights; bias a point"
    assert treatments["2"] == "Gaussian, 48 of 192 weights; bias a point"
    assert treatments["4"] == "Gaussian, 16 of 64 weights; bias a point"
    assert not any("stay without a posterior" in warning for warning in found.info.warnings)


def wide(method: Any) -> caveat.Posterior:
    torch.manual_seed(0)
    x = torch.randn(32, 20)
    module = nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 2))
    task = caveat.Task(module, (x, (x[:, 0] > 0).long()), caveat.Categorical())
    return caveat.fit(task, method, progress=False)


def test_what_is_kept_is_compact(tmp_path: Path) -> None:
    training = Training(epochs=4, batch_size=16)
    sparse = wide(SSVI(density=0.05, interval=2, training=training))
    dense = wide(caveat.MeanFieldVI(training=training))
    largest = max(t.numel() for group in sparse.state.values() for t in group.values())
    active = round(0.05 * 6000) + round(0.05 * 90_000) + round(0.05 * 600)
    assert largest == active == len(sparse.state["active"]["mean"])
    assert sparse.state["active"]["indices"].dtype == torch.int32
    assert len(sparse.state["active"]["indices"]) == active
    assert stored_bytes(sparse.state) <= 0.08 * stored_bytes(dense.state)
    for name, posterior in (("sparse", sparse), ("dense", dense)):
        posterior.save(tmp_path / name)
    size = {n: sum(f.stat().st_size for f in (tmp_path / n).rglob("*.safetensors")) for n in ("sparse", "dense")}
    assert size["sparse"] <= 0.08 * size["dense"]
    module = nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 2))
    x = torch.randn(9, 20)
    for name, posterior in (("sparse", sparse), ("dense", dense)):
        loaded = caveat.load(tmp_path / name, module)
        assert torch.equal(loaded.predict(x).samples, posterior.predict(x).samples)
        assert torch.equal(next(loaded.sample(1))["2.weight"], next(posterior.sample(1))["2.weight"])


def test_the_optimiser_holds_no_whole_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    from caveat.engine.training import loop

    seen: list[int] = []
    move = loop.Loop._move

    def spied(self: Any) -> None:
        move(self)
        kept = [v for o in self.optimizers for state in o.state.values() for v in state.values()]
        groups = [t for group in self.variables.groups().values() for t in group.values()]
        gradients = [t.grad for t in groups if t.grad is not None]
        seen.append(max(t.numel() for t in (*kept, *groups, *gradients)))

    monkeypatch.setattr(loop.Loop, "_move", spied)
    wide(SSVI(density=0.05, interval=2, training=Training(epochs=4, batch_size=16)))
    assert len(seen) == 8
    assert set(seen) == {4830}


def test_draws_are_sparse_and_predictions_are_theirs() -> None:
    posterior = caveat.fit(small(), QUICK, progress=False)
    x, _ = small().train.everything()
    draws = [*posterior.sample(3, seed=4)]
    places = [d["4.weight"] != 0 for d in draws]
    assert all(torch.equal(p, places[0]) for p in places)
    assert int(places[0].sum()) == 154
    assert not torch.equal(draws[0]["4.weight"], draws[1]["4.weight"])
    outputs = torch.stack([posterior.network(draw, x) for draw in draws])
    torch.testing.assert_close(posterior.predict(x, draws=3, seed=4).samples, outputs.softmax(-1))


def test_local_predictions_have_the_same_mean_for_one_layer() -> None:
    posterior = linear(density=0.5, replacement=0.0, training=Training(epochs=100, batch_size=60, learning_rate=0.1))
    method = dataclasses.replace(posterior.method, prediction="local")
    local = caveat.Posterior(method, posterior.state, posterior.network, posterior.info)
    x, _ = regression()
    one, other = posterior.predict(x, draws=3000), local.predict(x, draws=3000)
    torch.testing.assert_close(one.mean, other.mean, rtol=0, atol=0.05)
    torch.testing.assert_close(one.epistemic, other.epistemic, rtol=0.2, atol=0)


def test_bad_knobs_are_refused() -> None:
    for density in (0, 1.5, -0.1, math.nan):
        with pytest.raises(ValueError, match=r"SSVI\(density=.*must be (a number )?in \(0, 1\]"):
            SSVI(density=density)
    with pytest.raises(ValueError, match=r"replacement=1.*must be in \[0, 1\)"):
        SSVI(replacement=1)
    with pytest.raises(ValueError, match=r"initial_std=0.*above 0"):
        SSVI(initial_std=0)
    with pytest.raises(ValueError, match=r"criterion='size'.*one of 'magnitude'"):
        SSVI(criterion="size")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="leaves no weight of layer '6', which has 16: take at least"):
        caveat.fit(small(), SSVI(density=0.01), progress=False)
    with pytest.raises(ValueError, match="weights for 2 layers, fewer than one each"):
        caveat.fit(small(), SSVI(density=0.001, allocation="erk"), progress=False)
    with pytest.raises(ValueError, match="dense names nothing"):
        caveat.fit(small(), SSVI(density=0.5, dense=("nothing",)), progress=False)
    with pytest.raises(ValueError, match=r"LaplacePrior: use caveat\.GaussianPrior"):
        caveat.fit(small(prior=caveat.LaplacePrior()), QUICK, progress=False)
    none = caveat.Task(nn.Sequential(nn.Flatten(), nn.LayerNorm(36)), small().train.everything(), caveat.Categorical())
    with pytest.raises(ValueError, match="none of the selected parameters is a weight"):
        caveat.fit(none, QUICK, progress=False)


@pytest.mark.parametrize("method", [SSVI(training=Training(epochs=80)), caveat.RigL(training=Training(epochs=80))])
def test_a_small_network_keeps_half_of_its_weights_and_exchanges_dozens_of_times(method: Any) -> None:
    torch.manual_seed(0)
    x, y = regression()
    module = nn.Sequential(nn.Linear(8, 20), nn.Tanh(), nn.Linear(20, 1)).double()
    told = caveat.fit(caveat.Task(module, (x, y), caveat.Gaussian()), method, progress=False).info.diagnostics
    assert (told["density"], told["interval"]) == (0.5, 1)
    assert told["exchanges"] == 59, "every step before three quarters of 80"
    given = dataclasses.replace(method, density=0.1, interval=30)
    told = caveat.fit(caveat.Task(module, (x, y), caveat.Gaussian()), given, progress=False).info.diagnostics
    assert (told["density"], told["interval"], told["exchanges"]) == (0.1, 30, 1)


def test_the_kl_weight_that_is_left_open_follows_rows_and_active_weights() -> None:
    assert kl_weight_for(None, 1000, 250) == 1.0
    assert kl_weight_for(None, 50_000, 11_000_000) == pytest.approx(0.0045, rel=0.02)
    assert kl_weight_for(0.1, 1000, 250) == 0.1
    assert [std_rate_for(None, steps) for steps in (10, 400, 2000, 10**6)] == [0.1, 0.05, 0.01, 0.01]
    assert std_rate_for(0.003, 10) == 0.003
