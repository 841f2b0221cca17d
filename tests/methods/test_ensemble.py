"""Ensembles of any method: the mixture of its members, in draws, in closed form, on disk and after a kill."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import caveat
from caveat import Ensemble, Training
from caveat.engine import run as run_module
from caveat.engine.members import as_one_state, state_of_member
from caveat.engine.predictors import pick

SHORT = Training(epochs=3)
POINTS = Training(epochs=40, learning_rate=0.02)
OF: dict[str, tuple[caveat.Method | None, dict[str, Training]]] = {
    "points": (None, {"training": POINTS}),
    "map": (caveat.MAP(temperature=True, training=SHORT), {}),
    "swag": (replace(caveat.SWAG.quick, training=SHORT), {"training": POINTS}),
    "laplace": (caveat.LastLayerLaplace(), {"training": POINTS}),
    "ssvi": (replace(caveat.SSVI.quick, interval=3, training=SHORT), {}),
    "sgmcmc": (replace(caveat.SGMCMC.quick, learning_rate=0.01, length=5), {}),
    "ensemble": (Ensemble(members=2, training=SHORT), {}),
}


def inputs(n: int = 60) -> Tensor:
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(0))


def network(outputs: int = 3) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, outputs))


def task(module: nn.Module | None = None, **knobs: Any) -> caveat.Task:
    x = inputs()
    y = torch.bucketize(x[:, 0] + x[:, 1] ** 2, torch.tensor([0.0, 1.5]))
    return caveat.Task(module or network(), (x, y), caveat.Categorical(), validation=0.2, **knobs)


def regression(**knobs: Any) -> caveat.Task:
    x = inputs()
    return caveat.Task(network(1), (x, x[:, :1] + 0.3 * x[:, 2:3]), caveat.Gaussian(), validation=0.2, **knobs)


def ensemble(kind: str, members: int = 3) -> Ensemble:
    of, knobs = OF[kind]
    return Ensemble(of=of, members=members, **knobs)


def members_of(posterior: caveat.Posterior) -> list[caveat.Posterior]:
    """The members as posteriors of their own."""
    method = posterior.method
    assert isinstance(method, Ensemble)
    assert method.of is not None
    states = [state_of_member(posterior.state, m) for m in range(method.members)]
    return [caveat.Posterior(method.of, state, posterior.network, posterior.info) for state in states]


@pytest.mark.parametrize("kind", [kind for kind in OF if kind != "points"])
def test_predictions_are_those_of_all_members(kind: str) -> None:
    posterior, x = caveat.fit(task(), ensemble(kind), progress=False), inputs(7)
    rng = torch.Generator().manual_seed(5)
    assert pick(3, 6, rng) == [0, 1, 2, 0, 1, 2]
    parts = []
    for member in members_of(posterior):
        outputs, hyper = member.predictor.outputs(x, 2, rng)
        parts.append(member.network.likelihood.predictive(outputs, hyper).samples)
    found = posterior.predict(x, draws=6, seed=5)
    torch.testing.assert_close(found.samples, torch.cat(parts), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(found.probs, torch.cat(parts).mean(0))
    assert (parts[0].mean(0) - parts[1].mean(0)).abs().max() > 1e-3, "members start from different weights"
    assert posterior.method.default_draws == 3 * posterior.method.of.default_draws  # type: ignore[attr-defined]
    assert posterior.predict(x, draws=2).samples.shape == (2, 7, 3)


def test_each_member_has_its_own_temperature_and_noise() -> None:
    posterior, x = caveat.fit(task(), ensemble("map"), progress=False), inputs(7)
    states = [state_of_member(posterior.state, m) for m in range(3)]
    temperatures = [state["hyper"]["temperature"] for state in states]
    assert len({float(t) for t in temperatures}) == 3
    logits = [posterior.network(state["params"], x) for state in states]
    by_hand = [(f / t).softmax(-1) for f, t in zip(logits, temperatures, strict=True)]
    torch.testing.assert_close(posterior.predict(x).samples, torch.stack(by_hand))
    noisy = caveat.fit(regression(), ensemble("laplace"), progress=False)
    noise = [state_of_member(noisy.state, m)["hyper"]["log_noise"] for m in range(3)]
    assert len({float(each) for each in noise}) == 3
    scale = state_of_member(noisy.state, 0)["hyper"]["target_scale"]
    variances = noisy.predict(x, draws=6).variances
    expected = torch.stack([scale**2 * (2 * each).exp() for each in noise]).repeat_interleave(2, 0)
    torch.testing.assert_close(variances, expected[:, None].expand_as(variances).to(variances))


@pytest.mark.parametrize(("kind", "draws"), [("points", 6), ("map", 6), ("swag", 6), ("ssvi", 6), ("laplace", 7)])
def test_an_ensemble_is_a_module(kind: str, draws: int) -> None:
    posterior, x = caveat.fit(task(), ensemble(kind), progress=False), inputs(7)
    module, expected = posterior.module(draws=draws, seed=2), posterior.predict(x, draws=draws, seed=2)
    found = module(x)
    for name in ("aleatoric", "epistemic"):
        torch.testing.assert_close(found[name], getattr(expected, name), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["mean"], expected.probs, rtol=1e-4, atol=1e-5)


def test_members_that_are_linearised_keep_their_own_noise_in_a_module() -> None:
    posterior, x = caveat.fit(regression(), ensemble("laplace"), progress=False), inputs(7)
    found, expected = posterior.module(draws=7)(x), posterior.predict(x, draws=7)
    for name in ("mean", "aleatoric", "epistemic"):
        torch.testing.assert_close(found[name], getattr(expected, name), rtol=1e-4, atol=1e-5)


def test_an_ensemble_of_what_has_no_module_has_none() -> None:
    members = caveat.Laplace(precision=1.0, prediction="bridge")
    posterior = caveat.fit(task(), Ensemble(of=members, members=2, training=POINTS), progress=False)
    with pytest.raises(TypeError, match="prediction='bridge' draws from a distribution of each row's own"):
        posterior.module(draws=4)


@pytest.mark.parametrize("joint", [False, True])
def test_moments_are_those_of_the_mixture(joint: bool) -> None:
    posterior, x = caveat.fit(task(), ensemble("laplace"), progress=False), inputs(3)
    own = [member.moments(x, joint=joint) for member in members_of(posterior)]
    mean, covariance = posterior.moments(x, joint=joint)
    torch.testing.assert_close(mean, torch.stack([m for m, _ in own]).mean(0))
    rng = torch.Generator().manual_seed(0)
    draws = []
    for m, c in own:  # [B, D] and [B, D, D], or joint
        flat = m.flatten().double() if joint else m.double()
        scale = torch.linalg.cholesky(c.double() + 1e-9 * torch.eye(c.shape[-1]))
        noise = torch.randn(20_000, *flat.shape, generator=rng, dtype=torch.float64)
        draws.append(flat + torch.einsum("...ij,n...j->n...i", scale, noise))
    centred = torch.cat(draws) - torch.cat(draws).mean(0)
    expected = torch.einsum("n...i,n...j->...ij", centred, centred) / len(centred)
    torch.testing.assert_close(covariance.double(), expected, rtol=0.05, atol=0.03 * float(expected.abs().max()))
    with pytest.raises(TypeError, match="no closed form"):
        caveat.fit(task(), ensemble("points"), progress=False).moments(x)


def test_uncertainty_is_split_over_members_and_their_draws() -> None:
    posterior, x = caveat.fit(task(), ensemble("swag"), progress=False), inputs(9)
    whole = posterior.predict(x, draws=60)
    torch.testing.assert_close(whole.entropy, whole.aleatoric + whole.epistemic)
    alone = [whole.samples[20 * m : 20 * m + 20] for m in range(3)]
    within = torch.stack([_entropy(p.mean(0)) - _entropy(p).mean(0) for p in alone]).mean(0)
    between = _entropy(whole.probs) - torch.stack([_entropy(p.mean(0)) for p in alone]).mean(0)
    torch.testing.assert_close(whole.epistemic, within + between, rtol=1e-4, atol=1e-5)
    assert float(within.mean()) > 0
    assert float(between.mean()) > 0


def _entropy(probs: Tensor) -> Tensor:
    return torch.special.entr(probs).sum(-1)


@pytest.mark.parametrize("kind", OF)
def test_saves_loads_and_honours_the_filter(kind: str, tmp_path: Path) -> None:
    posterior, x = caveat.fit(task(parameters="3.*"), ensemble(kind, 2), progress=False), inputs(7)
    assert {entry["layer"]: entry["treatment"] for entry in posterior.info.coverage}["0"] == "fixed"
    assert not any(name.startswith("0.") for draw in posterior.sample(2) for name in draw)
    posterior.save(tmp_path / "posterior")
    loaded = caveat.load(tmp_path / "posterior", network())
    assert loaded.method == posterior.method
    assert torch.equal(loaded.predict(x).samples, posterior.predict(x).samples)
    again = caveat.fit(task(parameters="3.*"), ensemble(kind, 2), progress=False)
    assert torch.equal(again.predict(x).samples, posterior.predict(x).samples)


@pytest.mark.parametrize("kind", ["points", "swag", "ssvi"])
def test_goes_on_after_kills_as_if_nothing_had_happened(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, whole = inputs(7), caveat.fit(task(), _brief(kind), progress=False)
    monkeypatch.setattr(run_module.Run, "checkpoint_due", lambda self: self.folder is not None)
    append, attempts, kept = run_module.Run.append, 0, 0

    def killed(self: run_module.Run, *given: Any) -> None:
        nonlocal kept
        append(self, *given)
        kept += 1
        if kept == 2 + attempts % 3:  # in the midst of a member's training, and between two members
            raise KeyboardInterrupt

    monkeypatch.setattr(run_module.Run, "append", killed)
    resumed = None
    while resumed is None:
        attempts, kept = attempts + 1, 0
        assert attempts < 40
        try:
            resumed = caveat.fit(task(), _brief(kind), folder=tmp_path / "posterior", progress=False)
        except KeyboardInterrupt:
            assert not (tmp_path / "posterior").exists()
    assert attempts > 2
    assert torch.equal(resumed.predict(x).samples, whole.predict(x).samples)
    assert resumed.info.diagnostics.keys() == whole.info.diagnostics.keys()
    assert resumed.info.gradient_evaluations == whole.info.gradient_evaluations


def _brief(kind: str) -> Ensemble:
    of, knobs = OF[kind]
    return Ensemble(of=of, members=2, training=Training(epochs=3) if knobs else Training())


def trained(seed: int, outputs: int = 3) -> nn.Module:
    """A network that somebody trained, with statistics of its own."""
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(4, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, outputs))
    module(3 + inputs(30) * seed)
    return module.eval()


def test_networks_that_are_trained_already_are_members_as_they_are(tmp_path: Path) -> None:
    modules, x = [trained(seed) for seed in (1, 2, 3)], inputs(7)
    before = [{name: value.clone() for name, value in module.state_dict().items()} for module in modules]
    posterior = caveat.fit(task(modules[0]), Ensemble.from_modules(modules), progress=False)
    torch.testing.assert_close(posterior.predict(x).samples, torch.stack([m(x).softmax(-1) for m in modules]))
    assert posterior.info.gradient_evaluations == 0
    assert all(torch.equal(m.state_dict()[n], v) for m, b in zip(modules, before, strict=True) for n, v in b.items())
    posterior.save(tmp_path / "posterior")
    loaded = caveat.load(tmp_path / "posterior", trained(9))
    assert torch.equal(loaded.predict(x).samples, posterior.predict(x).samples)
    with pytest.raises(ValueError, match=r"not at hand.*call it again"):
        caveat.fit(task(), loaded.method, progress=False)
    method = Ensemble.from_modules(modules)
    with torch.no_grad():
        modules[1][0].weight.add_(1)
    with pytest.raises(ValueError, match=r"were changed since Ensemble\.from_modules"):
        caveat.fit(task(), method, progress=False)


def test_a_method_is_fitted_at_each_given_network() -> None:
    modules = [caveat.fit(task(), caveat.MAP(training=POINTS), seed=s, progress=False) for s in (0, 1)]
    networks = [m.network.with_fixed(m.state["params"]).module for m in modules]
    posterior = caveat.fit(task(), Ensemble.from_modules(networks, of=caveat.Laplace()), progress=False)
    for member, module in zip(members_of(posterior), networks, strict=True):
        torch.testing.assert_close(member.moments(inputs(7))[0], module.eval()(inputs(7)))
    assert posterior.info.coverage[0]["treatment"].startswith("2 times: ")


def test_noise_is_fitted_to_each_given_network() -> None:
    posterior = caveat.fit(regression(), Ensemble.from_modules([trained(seed, 1) for seed in (1, 2)]), progress=False)
    noise = posterior.state["params"]["hyper/log_noise"]
    assert noise.shape == (2, 1)
    assert not torch.equal(noise[0], noise[1])


@dataclass(frozen=True)
class ForNumbersOnly(caveat.MAP):
    likelihoods = ("Gaussian",)


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(ValueError, match="must be a method, such as"):
        Ensemble(of="swag")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"these members are of SSVI, which trains by itself"):
        Ensemble(of=caveat.SSVI(), training=SHORT)
    with pytest.raises(ValueError, match="SGMCMC draws its own starting weights"):
        Ensemble.from_modules([network()], of=caveat.SGMCMC())
    with pytest.raises(TypeError, match="give a list of trained modules"):
        Ensemble.from_modules([])
    with pytest.raises(ValueError, match="ForNumbersOnly does not support Categorical: it supports Gaussian"):
        caveat.fit(task(), Ensemble(of=ForNumbersOnly()), progress=False)
    other = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))
    with pytest.raises(ValueError, match=r"network 2 of the ensemble is not one of the task's: they differ in '0\.wei"):
        caveat.fit(task(), Ensemble.from_modules([network(), other]), progress=False)
    with pytest.raises(ValueError, match=r"network 1 of the ensemble has other values of '0\.weight'"):
        caveat.fit(task(parameters="3.*"), Ensemble.from_modules([trained(2)]), progress=False)
    with pytest.raises(ValueError, match="draws its own starting weights: leave start= out"):
        caveat.fit(task(), Ensemble(), start=caveat.MAP(), progress=False)
    posterior = caveat.fit(task(), ensemble("swag", 2), progress=False)
    state = posterior.state | {"member-3.params": {}}
    with pytest.raises(caveat.CorruptFile, match="none of the 2 members"):
        posterior.method.check_state(state, posterior.network)
    with pytest.raises(caveat.CorruptFile, match="no member 2"):
        posterior.method.check_state(as_one_state([state_of_member(state, 0)]), posterior.network)


def test_fine_tunings_of_one_base_have_adapters_of_their_own() -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    module = peft.get_peft_model(base, peft.LoraConfig(target_modules=["0"], r=2))
    for parameter in module.base_model.model[2].parameters():
        parameter.requires_grad_(True)
    untrained = Ensemble(members=3, training=Training(epochs=0))
    posterior = caveat.fit(task(module), untrained, progress=False)
    weights, trunk = posterior.state["params"], dict(module.named_parameters())
    a, b = (next(v for n, v in weights.items() if f"lora_{k}" in n) for k in "AB")
    head = next(v for n, v in weights.items() if n.endswith("2.weight"))
    assert not torch.equal(a[0], a[1])
    assert not torch.equal(head[0], head[1])
    assert float(b.abs().max()) == 0, "an adapter begins without effect"
    assert not any("base_layer" in name for name in weights), "the trunk is in no member"
    adapters_only = task(module, initialise="*lora_*")
    weights = caveat.fit(adapters_only, untrained, progress=False).state["params"]
    name = next(name for name in weights if name.endswith("2.weight"))
    assert torch.equal(weights[name], trunk[name].detach().expand(3, -1, -1)), "the head stays as it came"
