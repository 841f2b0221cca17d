"""LastLayerLaplace: Bayesian linear regression on features, the layer that acts last, the others as they were."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import caveat
from caveat import LastLayerLaplace


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def fit(task: caveat.Task, start: Any = None, **knobs: Any) -> caveat.Posterior:
    method = LastLayerLaplace(**{"skip": 0.0, "precision": "given"} | knobs)
    return caveat.fit(task, method, start=start or caveat.MAP(training=caveat.Training(epochs=40)), progress=False)


def assert_close(found: Tensor, wanted: Tensor, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max()))


def mlp(outputs: int, hidden: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, hidden), nn.Tanh(), nn.Linear(hidden, outputs)
    ).double()


X = normal(30, 3)
TARGETS = {
    "Gaussian": X[:, :1] + 0.2 * normal(30, 1, seed=1),
    "Categorical": (X[:, 0] > 0).long() + (X[:, 1] > 1).long(),
}


@pytest.mark.parametrize("structure", ["full", "kronecker"])
@pytest.mark.parametrize("n", [3, 30])
def test_it_is_linear_regression_on_the_features(structure: str, n: int) -> None:
    y = TARGETS["Gaussian"]
    task = caveat.Task(mlp(1), (X[:n], y[:n]), caveat.Gaussian(noise=0.3), caveat.GaussianPrior({"4.*": 0.7, "*": 9.0}))
    posterior = fit(task, structure=structure, prediction="closed")
    module = posterior.network.with_fixed(posterior.state["params"]).module

    def features(x: Tensor) -> Tensor:
        h = module[:4](x)
        return torch.cat([h, torch.ones_like(h[:, :1])], 1)

    precision = features(X[:n]).T @ features(X[:n]) / 0.09 + 0.7 * torch.eye(5, dtype=torch.float64)
    new = normal(6, 3, seed=2)
    covariance = features(new) @ precision.inverse() @ features(new).T
    found = posterior.predict(new)
    assert_close(found.mean, module(new))
    assert_close(found.variance, covariance.diagonal().unsqueeze(1) + 0.09)
    assert_close(posterior.moments(new, joint=True)[1], covariance)
    draws = [draw["4.weight"] for draw in posterior.sample(2)]
    assert not torch.equal(*draws)
    fixed = [name for name in posterior.network.names if not name.startswith("4.")]
    sampled = next(posterior.sample(1))
    assert all(torch.equal(sampled[name], posterior.state["params"][name]) for name in fixed)


@pytest.mark.parametrize("structure", ["full", "diagonal"])
@pytest.mark.parametrize("layer", ["auto", "2", "0"])
def test_moments_are_those_of_the_layers_block(structure: str, layer: str, dense: Any, tmp_path: Path) -> None:
    task = caveat.Task(mlp(3), (X, TARGETS["Categorical"]), caveat.Categorical(), caveat.GaussianPrior(0.5))
    posterior = fit(task, structure=structure, layer=layer)
    chosen = "4" if layer == "auto" else layer
    assert posterior.info.diagnostics["layer"] == chosen
    own = posterior.network.restricted([f"{chosen}.weight", f"{chosen}.bias"])
    by_hand = dense(own, posterior.state["params"], {})
    ggn = by_hand.ggn(*task.train.everything())
    ggn = ggn.diagonal().diag() if structure == "diagonal" else ggn
    new = normal(5, 3, seed=2)
    j = by_hand.jacobian(new)
    assert_close(posterior.moments(new)[1], j @ (ggn + 0.5 * torch.eye(len(ggn)).double()).inverse() @ j.mT)
    treatments = {entry["layer"]: entry["treatment"] for entry in posterior.info.coverage}
    others = {"0", "2", "4"} - {chosen}
    assert treatments == {chosen: f"Gaussian, {structure} covariance"} | dict.fromkeys(others, "fixed at the MAP")
    posterior.save(tmp_path / "posterior")
    loaded = caveat.load(tmp_path / "posterior", mlp(3))
    assert torch.equal(loaded.predict(new).samples, posterior.predict(new).samples)
    updated = loaded.update((new, torch.arange(5) % 3), progress=False)
    more = by_hand.ggn(new, torch.arange(5) % 3)
    ggn = ggn + (more.diagonal().diag() if structure == "diagonal" else more)
    assert_close(updated.moments(new)[1], j @ (ggn + 0.5 * torch.eye(len(ggn)).double()).inverse() @ j.mT)


class HeadFirst(nn.Module):
    """The layer that acts last is the first to be registered, after one that no rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.body, self.never = nn.Linear(4, 2), nn.LSTM(3, 4, batch_first=True), nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)[0][:, -1])


class Bare(nn.Module):
    """The last to act is a matrix of the module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = nn.Linear(3, 4), nn.ParameterDict({"matrix": nn.Parameter(torch.randn(4, 2))})

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x[:, -1]).tanh() @ self.out["matrix"]


class OfTheModule(nn.Module):
    """No layers at all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        return (x[:, -1] @ self.first).tanh() @ self.last


class Tied(nn.Module):
    """The head's weight is another layer's, under whose name it goes."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.middle, self.head = nn.Linear(3, 2), nn.Linear(2, 3), nn.Linear(3, 2)
        self.head.weight = self.body.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.body(x[:, -1]).tanh()))


def normed() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(15, 4), nn.Tanh(), weight_norm(nn.Linear(4, 2)))


@pytest.mark.parametrize(
    ("module", "last", "owners", "count"),
    [
        (HeadFirst(), "head", {"head"}, 10),
        (Bare(), "out", {"out"}, 8),
        (OfTheModule(), "last", {"(module)"}, 8),
        (Tied(), "body and head", {"body", "head"}, 6 + 2 + 2),
        (normed(), "3", {"3", "3.parametrizations.weight"}, 2 + 2 + 8),
    ],
    ids=["head first", "matrix", "no layers", "tied", "weight norm"],
)
def test_the_last_layer_is_the_last_to_act(module: nn.Module, last: str, owners: set[str], count: int) -> None:
    x = normal(40, 5, 3).float()
    posterior = fit(caveat.Task(module, (x, (x[:, -1, 0] > 0).long()), caveat.Categorical()))
    assert posterior.info.diagnostics["layer"] == last
    assert posterior.state["gaussian"]["prior"].numel() == count
    treated = {entry["layer"] for entry in posterior.info.coverage if entry["treatment"].startswith("Gaussian")}
    assert treated == owners
    assert posterior.predict(x[:3]).probs.shape == (3, 2)


def test_a_weight_of_the_module_is_a_layer_of_its_own() -> None:
    x = normal(40, 5, 3).float()
    task = caveat.Task(OfTheModule(), (x, (x[:, -1, 0] > 0).long()), caveat.Categorical())
    posterior, draw = fit(task, layer="last"), next(fit(task).sample(1))
    assert posterior.info.coverage[0]["treatment"] == "Gaussian, full covariance over 8 of 20 weights"
    assert torch.equal(draw["first"], posterior.state["params"]["first"])
    assert not torch.equal(draw["last"], posterior.state["params"]["last"])


def test_another_layer_in_place_of_a_frozen_one_is_said() -> None:
    module = mlp(3)
    for layer in ("4", "2"):
        posterior = fit(caveat.Task(module, (X, TARGETS["Categorical"]), caveat.Categorical()))
        assert posterior.info.diagnostics["layer"] == layer
        said = [w for w in posterior.info.warnings if w.startswith("the last layer to act, 4, has no weights")]
        assert len(said) == (layer == "2")
        module[4].requires_grad_(False)


def test_it_stays_within_the_weights_that_inference_is_about() -> None:
    task = caveat.Task(
        mlp(3), (X, TARGETS["Categorical"]), caveat.Categorical(), parameters=["0.*", "2.*"], validation=0.2
    )
    start = caveat.fit(
        caveat.Task(mlp(3), (X, TARGETS["Categorical"]), caveat.Categorical()),
        caveat.MAP(training=caveat.Training(epochs=40)),
        progress=False,
    )
    assert fit(task, start).info.diagnostics["layer"] == "2"
    with pytest.raises(
        ValueError, match=r"layer='4' has no weights that inference is about: the layers are \['0', '2'\]"
    ):
        fit(task, start, layer="4")
    with pytest.raises(ValueError, match=r"LastLayerLaplace\(structure='low_rank'\)"):
        LastLayerLaplace(structure="low_rank")  # type: ignore[arg-type]


def test_the_inverse_of_its_factor_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    task = caveat.Task(mlp(3), (X, TARGETS["Categorical"]), caveat.Categorical())
    first, second = fit(task), fit(task, precision=5.0)
    wanted = first.moments(X)[1]  # of more outputs than weights
    assert float((second.moments(X)[1] - wanted).abs().max()) > 0.01, "each posterior has its own"
    first.moments(X)

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("solved for all weights at every prediction")

    monkeypatch.setattr(torch.linalg, "solve_triangular", refused)
    assert torch.equal(first.moments(X)[1], wanted)
    assert torch.equal(first.moments(X[:20])[1], wanted[:20])
