"""RigL: with all weights it is MAP, priors of any kind are right, and it exchanges by magnitude and gradient."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import caveat
from caveat import GaussianPrior, RigL, Training
from caveat.engine.training import Moments
from caveat.engine.variational import WeightExchange
from caveat.priors import Prior


def regression(n: int = 80) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(n, 6, generator=rng, dtype=torch.float64)
    weights = torch.randn(6, 1, generator=rng, dtype=torch.float64)
    return x, x @ weights + 0.5 + 0.3 * torch.randn(n, 1, generator=rng, dtype=torch.float64)


def build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).double()


def task(prior: Prior | None = None, module: nn.Module | None = None) -> caveat.Task:
    return caveat.Task(module or build(), regression(), caveat.Gaussian(noise=0.7), prior)


def weights(posterior: caveat.Posterior) -> dict[str, Tensor]:
    return next(posterior.sample(1))


PRIORS = [
    GaussianPrior(5.0),
    GaussianPrior({"0.*": 20.0, "*.bias": 0.5, "*": 2.0}),
    GaussianPrior({"0.weight": torch.rand(8, 6, dtype=torch.float64) + 1, "0.bias": torch.ones(8) * 3, "*": 2.0}),
    caveat.LaplacePrior(0.1),
    caveat.StudentTPrior(0.1),
    caveat.EmpCovPrior("0.weight", torch.eye(6, dtype=torch.float64) + 1),
]


@pytest.mark.parametrize("prior", PRIORS, ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_with_all_weights_it_is_map(prior: Prior, optimizer: str) -> None:
    training = Training(epochs=6, batch_size=20, learning_rate=0.02, optimizer=optimizer)  # type: ignore[arg-type]
    point = caveat.fit(task(prior), caveat.MAP(training=training), progress=False)
    rigl = caveat.fit(task(prior), RigL(density=1.0, interval=2, training=training), progress=False)
    found = weights(rigl)
    for name, value in point.state["params"].items():
        torch.testing.assert_close(found[name], value, atol=1e-10, rtol=1e-8, msg=lambda m, n=name: f"{n}: {m}")
    if prior not in PRIORS[1:3]:  # these are weight decay in MAP, or without their constants in RigL
        losses = [[r["loss"] for r in p.info.diagnostics["history"]] for p in (point, rigl)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    assert rigl.info.diagnostics["exchanged"] == 0


@pytest.mark.parametrize("prior", PRIORS[:4], ids=lambda p: type(p).__name__)
def test_few_weights_with_a_prior_are_map_of_the_masked_network(prior: Prior) -> None:
    """Places that stay: every weight's gradient, its prior's included, is that of the whole network's at that place."""
    training = Training(epochs=1, batch_size=80, learning_rate=0.1, optimizer="sgd", momentum=0.0, warmup=0.0)
    method = RigL(density=0.4, replacement=0.0, training=training)
    before = weights(caveat.fit(task(prior), RigL(density=0.4, training=Training(epochs=0)), progress=False))
    posterior = caveat.fit(task(prior), method, progress=False)
    network, (x, y) = task(prior).network, regression()
    params = {name: before[name].requires_grad_() for name in network.names}
    buffers = {n: b for n, b in before.items() if n not in params}
    outputs = network(params | buffers, x, train=True)
    joint = task(prior).log_joint(outputs, y, params, task(prior).hyper)
    gradients = dict(zip(params, torch.autograd.grad(-joint / 80, [*params.values()]), strict=True))
    after, rate = weights(posterior), posterior.info.diagnostics["history"][0]["rate"]
    for name, value in params.items():
        step = -rate * gradients[name] * ((value != 0) if name in ("0.weight", "3.weight") else 1)
        torch.testing.assert_close(after[name], (value + step).detach(), msg=lambda m, n=name: f"{n}: {m}")
    assert int((after["0.weight"] != 0).sum()) == 19


def test_the_smallest_go(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    finish = WeightExchange.finish

    def spied(self: WeightExchange, moments: Moments) -> bool:
        layout, removed = self.substitute.layout, self._removed
        if removed is None:
            return finish(self, moments)
        for (name, part), (_, gone) in zip(layout.split(self.keep_scores()), layout.split(removed), strict=True):
            if not layout.is_dense(name) and gone.any():
                seen.append((name, float(part[gone].max()), float(part[~gone].min())))
        assert torch.equal(self.keep_scores(), self.weights.mean.detach().abs())
        return finish(self, moments)

    monkeypatch.setattr(WeightExchange, "finish", spied)
    training = Training(epochs=10, batch_size=20, learning_rate=1e-6)
    posterior = caveat.fit(task(), RigL(density=0.4, interval=4, training=training), progress=False)
    assert len(seen) == 5
    assert all(gone <= kept + 1e-5 for _, gone, kept in seen), "but for the step between choice and change"
    assert posterior.info.diagnostics["exchanges"] == 7
    assert not posterior.info.warnings


def test_a_point_has_no_epistemic_uncertainty_and_compact_state(tmp_path: Path) -> None:
    training = Training(epochs=10, batch_size=20)
    posterior = caveat.fit(task(), RigL(density=0.25, interval=4, training=training), progress=False)
    x, _ = regression()
    assert float(posterior.predict(x).epistemic.max()) == 0
    active = posterior.state["active"]
    assert {name: len(t) for name, t in active.items() if name != "counts"} == {"mean": 14, "indices": 14}
    assert active["indices"].dtype == torch.int32
    posterior.save(tmp_path / "p")
    loaded = caveat.load(tmp_path / "p", build(1))
    assert torch.equal(loaded.predict(x).mean, posterior.predict(x).mean)


def test_bad_knobs_are_refused() -> None:
    for density in (0, 1.5, -0.1):
        with pytest.raises(ValueError, match=r"RigL\(density=.*must be (a number )?in \(0, 1\]"):
            RigL(density=density)
    with pytest.raises(ValueError, match=r"replacement=1.*must be in \[0, 1\)"):
        RigL(replacement=1)
    with pytest.raises(ValueError, match="leaves no weight of layer '3'"):
        caveat.fit(task(), RigL(density=0.01), progress=False)
    with pytest.raises(ValueError, match="dense names nothing"):
        caveat.fit(task(), RigL(density=0.5, dense=("nothing",)), progress=False)
