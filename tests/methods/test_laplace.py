"""Laplace end to end: moments, predictions and draws against dense references in float64; updates; refusals."""

import contextlib
import dataclasses
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import caveat
from caveat import Laplace
from caveat.engine.laplace.laplace_bridge import bridge
from caveat.engine.laplace.laplace_state import LaplaceState
from caveat.engine.row_gradients import Jacobian
from caveat.engine.run import Run

PRIOR = caveat.GaussianPrior({"0.*": 0.5, "2.*": 2.0})
LIKELIHOODS: dict[str, tuple[Any, int]] = {
    "Categorical": (caveat.Categorical(class_weights=(1.0, 2.0, 0.5)), 3),
    "Bernoulli": (caveat.Bernoulli(), 2),
    "Gaussian": (caveat.Gaussian(standardise=True), 1),
    "HeteroscedasticGaussian": (caveat.HeteroscedasticGaussian(), 2),
    "Poisson": (caveat.Poisson(), 1),
}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def data(likelihood: str, n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    x, noise = normal(n, 3, seed=seed), 0.3 * normal(n, 1, seed=seed + 1)
    signal = x[:, :1] + x[:, 1:2] ** 2 + noise
    targets = {
        "Categorical": (signal[:, 0] > 0).long() + (signal[:, 0] > 1).long(),
        "Bernoulli": torch.cat([signal > 0.5, x[:, 2:] > 0], 1).double(),
        "Gaussian": 7 + 5 * signal,
        "HeteroscedasticGaussian": signal,
        "Poisson": signal.abs().round(),
    }
    return x, targets[likelihood]


@cache
def trained(likelihood: str, n: int = 30) -> tuple[caveat.Task, caveat.Posterior]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, LIKELIHOODS[likelihood][1])).double()
    task = caveat.Task(module, data(likelihood, n), LIKELIHOODS[likelihood][0], PRIOR)
    return task, caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=60)), progress=False)


def fit(task: caveat.Task, start: caveat.Posterior | None = None, **knobs: Any) -> caveat.Posterior:
    method = Laplace(**{"skip": 0.0, "precision": "given", "structure": "full"} | knobs)
    return caveat.fit(task, method, start=start, progress=False)


def at(dense: Any, posterior: caveat.Posterior) -> Any:
    return dense(posterior.network, posterior.state["params"], posterior.state["hyper"])


def flat_prior(posterior: caveat.Posterior) -> Tensor:
    own = posterior.network.params()
    return torch.cat([torch.full((v.numel(),), 0.5 if n[0] == "0" else 2.0) for n, v in own.items()]).double()


def precision(dense: Any, posterior: caveat.Posterior, task: caveat.Task, structure: str = "full") -> Tensor:
    ggn = at(dense, posterior).ggn(*task.train.everything())
    return (ggn.diagonal().diag() if structure == "diagonal" else ggn) + flat_prior(posterior).diag()


def assert_close(found: Tensor, wanted: Tensor, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max()))


def assert_covariance(draws: Tensor, covariance: Tensor) -> None:
    """Draws [S, n] around zero; the standard error of an entry is at most sqrt(2 c_ii c_jj / S)."""
    spread = covariance.diagonal().sqrt()
    error = (draws.T @ draws / len(draws) - covariance) / (spread.unsqueeze(1) * spread) * math.sqrt(len(draws) / 2)
    assert float(error.abs().max()) < 5


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize(("structure", "n"), [("full", 4), ("full", 40), ("diagonal", 40), ("low_rank", 40)])
def test_moments_are_those_of_the_dense_posterior(likelihood: str, structure: str, n: int, dense: Any) -> None:
    task, start = trained(likelihood, n)
    posterior = fit(task, start, structure=structure, rank=60)
    covariance = precision(dense, posterior, task, structure).inverse()
    x, _ = data(likelihood, 5, seed=7)
    j = at(dense, posterior).jacobian(x)
    mean, found = posterior.moments(x)
    assert_close(mean, start.network(start.state["params"], x))
    assert_close(found, j @ covariance @ j.mT)
    mean, found = posterior.moments(x, joint=True)
    assert_close(found, j.flatten(0, 1) @ covariance @ j.flatten(0, 1).T)
    expected = {"full": "rows" if n == 4 else "full", "diagonal": "layered", "low_rank": "rows"}
    assert posterior.info.diagnostics["form"] == expected[structure]
    assert posterior.moments(x[:0])[1].shape == (0, mean.shape[1], mean.shape[1])


def test_closed_predictions_are_their_formulas(dense: Any) -> None:
    x, _ = data("Categorical", 6, seed=7)

    def closed(likelihood: str) -> tuple[Any, Tensor, Tensor, caveat.Posterior]:
        task, start = trained(likelihood)
        posterior = fit(task, start, prediction="closed")
        j = at(dense, posterior).jacobian(x)
        covariance = j @ precision(dense, posterior, task).inverse() @ j.mT
        return posterior.predict(x), posterior.moments(x)[0], covariance.diagonal(dim1=1, dim2=2), posterior

    found, mean, variance, _ = closed("Categorical")
    assert len(found.samples) == 1
    assert_close(found.probs, (mean / (1 + math.pi / 8 * variance).sqrt()).softmax(-1))
    found, mean, variance, _ = closed("Bernoulli")
    assert_close(found.probs, (mean / (1 + math.pi / 8 * variance).sqrt()).sigmoid())
    found, mean, variance, posterior = closed("Gaussian")
    hyper = posterior.state["hyper"]
    assert_close(found.mean, mean * hyper["target_scale"] + hyper["target_mean"])
    noise = (2 * hyper["log_noise"]).exp()
    assert_close(found.variance, (variance + noise) * hyper["target_scale"] ** 2)
    assert_close(found.aleatoric, (noise * hyper["target_scale"] ** 2).expand_as(found.mean))
    found, mean, variance, _ = closed("HeteroscedasticGaussian")
    assert_close(found.mean, mean[:, :1])
    assert_close(found.variance, variance[:, :1] + (mean[:, 1:] + variance[:, 1:] / 2).exp())
    assert posterior.predict(x, draws=7).samples.shape[0] == 7


@pytest.mark.parametrize("structure", ["full", "diagonal"])
@pytest.mark.parametrize("n", [4, 30])
def test_linearised_samples_are_jointly_those_of_the_moments(structure: str, n: int, dense: Any) -> None:
    task, start = trained("Categorical", n)
    posterior = fit(task, start, structure=structure)
    x, _ = data("Categorical", 3, seed=7)
    rng = torch.Generator().manual_seed(0)
    outputs, _ = posterior.predictor.outputs(x, 20_000, rng)
    j = at(dense, posterior).jacobian(x).flatten(0, 1)
    deviations = (outputs - posterior.moments(x)[0]).flatten(1)
    assert_covariance(deviations, j @ precision(dense, posterior, task, structure).inverse() @ j.T)
    again, _ = posterior.predictor.outputs(x, 5, torch.Generator().manual_seed(1))
    torch.testing.assert_close(posterior.predict(x, draws=5, seed=1).samples, again.softmax(-1))


@pytest.mark.parametrize(("structure", "n"), [("full", 4), ("full", 30), ("diagonal", 30), ("low_rank", 30)])
def test_weight_draws_have_the_dense_covariance_and_predict_by_themselves(structure: str, n: int, dense: Any) -> None:
    task, start = trained("Categorical", n)
    posterior = fit(task, start, structure=structure, rank=60, prediction="weights")
    names = posterior.network.names
    flat = torch.stack([torch.cat([d[k].flatten() for k in names]) for d in posterior.sample(1500)])
    point = torch.cat([start.state["params"][k].flatten() for k in names])
    assert_covariance(flat - point, precision(dense, posterior, task, structure).inverse())
    x, _ = data("Categorical", 5, seed=7)
    by_hand = torch.stack([posterior.network(draw, x).softmax(-1) for draw in posterior.sample(6, seed=3)])
    assert_close(posterior.predict(x, draws=6, seed=3).samples, by_hand)


def test_bridge_takes_logits_whose_sum_is_always_zero() -> None:
    half = torch.randn(5, 3, 6, generator=torch.Generator().manual_seed(0))
    half, mean = half - half.mean(1, keepdim=True), torch.tensor([[4.0, -1.0, -2.999999]]).expand(5, 3)
    noise = 1e-9 * torch.eye(3)  # what rounding may leave of the sum's variance, of either sign
    for sign in (-1, 1):
        drawn = bridge(mean, half @ half.mT / 6 + sign * noise, 500, torch.Generator().manual_seed(0))
        assert bool((drawn.exp().mean(0).argmax(-1) == 0).all())
        assert bool(drawn.isfinite().all())


def test_bridge_is_the_dirichlet_of_the_dense_covariance(dense: Any) -> None:
    task, start = trained("Categorical")
    posterior = fit(task, start, prediction="bridge", n_draws=20_000)
    x, _ = data("Categorical", 4, seed=7)
    mean, j = posterior.moments(x)[0], at(dense, posterior).jacobian(x)
    covariance = j @ precision(dense, posterior, task).inverse() @ j.mT
    alphas = []
    for mu, sigma in zip(mean, covariance, strict=True):  # conditioned on logits that sum to zero, then matched
        ones = torch.ones(3, dtype=torch.float64)
        gain = sigma @ ones / (ones @ sigma @ ones)
        mu, sigma = mu - gain * mu.sum(), sigma - torch.outer(gain, sigma @ ones)
        alphas.append((1 - 2 / 3 + mu.exp() / 9 * (-mu).exp().sum()) / sigma.diagonal())
    alpha = torch.stack(alphas)
    dirichlet = torch.distributions.Dirichlet(alpha)
    samples = posterior.predict(x).samples
    error = (dirichlet.variance / 20_000).sqrt()
    assert float(((samples.mean(0) - dirichlet.mean) / error).abs().max()) < 5
    torch.testing.assert_close(samples.var(0), dirichlet.variance, rtol=0.1, atol=0)


@pytest.mark.parametrize("structure", ["full", "kronecker", "low_rank"])
def test_linear_regression_has_its_exact_posterior(structure: str) -> None:
    n = 25
    x = normal(n, 3)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]]).double() + 0.3 + 0.4 * normal(n, 1, seed=1)
    features = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    matrix = features.T @ features / 0.4**2 + 0.7 * torch.eye(4, dtype=torch.float64)
    weights = torch.linalg.solve(matrix, features.T @ y / 0.4**2)
    module = nn.Linear(3, 1).double()
    with torch.no_grad():
        module.weight.copy_(weights[:3].T)
        module.bias.copy_(weights[3])
    task = caveat.Task(module, (x, y), caveat.Gaussian(noise=0.4), caveat.GaussianPrior(0.7))
    posterior = fit(task, structure=structure, prediction="closed")
    new = normal(8, 3, seed=2)
    at_new = torch.cat([new, torch.ones_like(new[:, :1])], 1)
    found = posterior.predict(new)
    assert_close(found.mean, at_new @ weights)
    assert_close(found.variance, (at_new @ matrix.inverse() @ at_new.T).diagonal().unsqueeze(1) + 0.4**2)
    marginal = torch.distributions.MultivariateNormal(
        torch.zeros(n, dtype=torch.float64), features @ features.T / 0.7 + 0.4**2 * torch.eye(n, dtype=torch.float64)
    )
    exact = float(marginal.log_prob(y[:, 0]))
    assert posterior.info.diagnostics["log_marginal_likelihood"] == pytest.approx(exact, rel=1e-9)


# More data


@pytest.mark.parametrize("structure", ["full", "diagonal", "kronecker", "low_rank"])
@pytest.mark.parametrize(("first", "more"), [(4, 3), (4, 30), (30, 6)])
def test_an_update_is_a_fit_to_both_data_sets(structure: str, first: int, more: int) -> None:
    _, start = trained("Categorical")
    x, y = data("Categorical", first + more, seed=5)
    new, module = data("Categorical", 5, seed=7)[0], start.network.with_fixed(start.state["params"]).module
    prior = caveat.GaussianPrior({"0.*": 0.5, "2.*": 2.0})
    likelihood = caveat.Categorical(class_weights=(1.0, 2.0, 0.5))
    part = caveat.Task(module.requires_grad_(True), (x[:first], y[:first]), likelihood, prior)
    both = caveat.Task(module.requires_grad_(True), (x, y), likelihood, prior)
    before = fit(part, start, structure=structure, rank=60)
    updated = before.update((x[first:], y[first:]), progress=False)
    whole = fit(both, start, structure=structure, rank=60)
    assert_close(updated.moments(new)[1], whole.moments(new)[1])
    assert not torch.allclose(updated.moments(new)[1], before.moments(new)[1], rtol=1e-3)
    assert updated.info.diagnostics["updated_with_rows"] == more
    twice = before.update((x[first:-1], y[first:-1]), progress=False).update((x[-1:], y[-1:]), progress=False)
    assert_close(twice.moments(new)[1], whole.moments(new)[1])
    assert twice.info.diagnostics["updated_with_rows"] == more


def test_new_rows_are_checked_all_of_them() -> None:
    torch.manual_seed(0)
    x = normal(20, 4, 3)
    y = (x[..., 0] > 0).long()
    y[:2] = -100  # nothing in the first rows
    task = caveat.Task(nn.Linear(3, 2).double(), (x, y), caveat.Categorical(class_axis=-1))
    start = caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=60)), progress=False)
    posterior = fit(task, start)
    doubled = caveat.Task(
        nn.Linear(3, 2).double(), (x.repeat(2, 1, 1), y.repeat(2, 1)), caveat.Categorical(class_axis=-1)
    )
    updated = posterior.update((x, y), progress=False)
    assert_close(updated.moments(x)[1], fit(doubled, start).moments(x)[1])
    y[9, 2] = 7
    with pytest.raises(ValueError, match="labels run from 0 to 7"):
        posterior.update((x, y), progress=False)
    with pytest.raises(ValueError, match="need labels of shape"):
        posterior.update((x, y[:, :3]), progress=False)


def test_an_update_that_leaves_the_dual_form_stays_positive_definite() -> None:
    x, y = data("Gaussian", 40)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    task = caveat.Task(
        module, (x[:20].float(), y[:20].float()), caveat.Gaussian(noise=0.01), caveat.GaussianPrior(1e-6)
    )
    start = caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=20)), progress=False)
    posterior = fit(task, start)
    assert posterior.info.diagnostics["form"] == "rows"
    updated = posterior.update((x[20:].float(), y[20:].float()), progress=False)
    assert "rows" not in updated.state["gaussian"]
    assert bool((updated.moments(x.float())[1] > 0).all())


class Named(nn.Module):
    """A layer called `inputs`, as stored factors are, and one that never acts."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.never, self.head = nn.Linear(3, 3), nn.Linear(2, 2), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inputs(x).tanh())


@pytest.mark.parametrize("structure", ["full", "diagonal", "kronecker", "low_rank"])
def test_any_name_and_weights_that_do_not_act(structure: str) -> None:
    torch.manual_seed(0)
    x, y = data("Categorical", 30)
    task = caveat.Task(Named().double(), (x, y), caveat.Categorical())
    start = caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=60)), progress=False)
    posterior = fit(task, start, structure=structure).update((x, y), progress=False)
    covariance = posterior.moments(x[:4], joint=True)[1]
    assert_close(covariance[:3, :3], posterior.moments(x[:4])[1][0])
    draws = torch.stack([draw["never.weight"] for draw in posterior.sample(400)])
    unmoved = start.state["params"]["never.weight"]
    assert 0.8 < float((draws - unmoved).std()) < 1.2, "what does not act has its prior"


# Cost


@pytest.mark.parametrize("structure", ["full", "kronecker", "low_rank"])
def test_a_killed_fit_goes_on_to_the_same_posterior(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, structure: str
) -> None:
    task, start = trained("Categorical")
    whole, (x, _) = fit(task, start, structure=structure), data("Categorical", 5)
    monkeypatch.setattr(Jacobian, "rows_at_once", lambda self, columns=0, layers=1: 11)
    monkeypatch.setattr(Run, "checkpoint_due", lambda self: self.folder is not None)
    keep, folder = Run.checkpoint, tmp_path / "posterior"

    def killed(self: Run, carry: Any, note: Any) -> None:
        keep(self, carry, note)
        raise KeyboardInterrupt

    monkeypatch.setattr(Run, "checkpoint", killed)
    attempts = 0
    while not folder.exists():
        attempts += 1
        assert attempts < 20
        method = Laplace(skip=0.0, precision="given", structure=structure)
        with contextlib.suppress(KeyboardInterrupt):
            resumed = caveat.fit(task, method, start=start, folder=folder, progress=False)
    assert attempts == (10 if structure == "low_rank" else 4)
    assert_close(resumed.moments(x)[1], whole.moments(x)[1])  # whose rows were one batch
    assert not folder.with_name("posterior.partial").exists()


@pytest.mark.parametrize("structure", ["full", "diagonal", "kronecker"])
def test_inputs_go_through_in_pieces(monkeypatch: pytest.MonkeyPatch, structure: str) -> None:
    posterior = fit(*trained("Categorical"), structure=structure)
    x, _ = data("Categorical", 7, seed=7)
    covariance, samples = posterior.moments(x)[1], posterior.predict(x).samples
    monkeypatch.setattr(Jacobian, "rows_at_once", lambda self, columns=0, layers=1: 3)
    assert_close(posterior.moments(x)[1], covariance)
    assert_close(posterior.predict(x).samples, samples)  # the same draws for all of them
    assert_close(posterior.predict(x[2:5]).samples, samples[:, 2:5])


@pytest.mark.parametrize(("structure", "n"), [("full", 4), ("full", 30), ("kronecker", 30), ("low_rank", 30)])
def test_a_prediction_factors_nothing(monkeypatch: pytest.MonkeyPatch, structure: str, n: int) -> None:
    posterior = fit(*trained("Categorical", n), structure=structure)
    x, _ = data("Categorical", 5)

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("a factorisation at every prediction")

    for name in ("cholesky", "cholesky_ex", "eigh", "eigvalsh", "inv", "inv_ex", "solve", "svd", "qr"):
        monkeypatch.setattr(torch.linalg, name, refused)
    for name in ("cholesky", "cholesky_inverse", "inverse", "svd", "qr"):
        monkeypatch.setattr(torch, name, refused)
    posterior.predict(x)
    posterior.moments(x, joint=True)
    next(posterior.sample(1))
    dataclasses.replace(posterior, method=dataclasses.replace(posterior.method, prediction="closed")).predict(x)


# Many outputs


@pytest.mark.parametrize("class_axis", [1, -1])
def test_closed_predictions_of_many_positions(class_axis: int, dense: Any) -> None:
    torch.manual_seed(0)
    if class_axis == 1:
        module, x = nn.Conv2d(1, 3, 3, padding=1), normal(20, 1, 2, 3)
        y = (x[:, 0] > 0).long() + (x[:, 0] > 1)
    else:
        module, x = nn.Linear(4, 3), normal(20, 6, 4)
        y = (x[..., 0] > 0).long() + (x[..., 1] > 1)
    task = caveat.Task(module.double(), (x, y), caveat.Categorical(class_axis=class_axis), caveat.GaussianPrior(2.0))
    start = caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=40)), progress=False)
    posterior = fit(task, start, prediction="closed")
    by_hand = at(dense, posterior)
    j, ggn = by_hand.jacobian(x[:3]), by_hand.ggn(x, y)
    covariance = j @ (ggn + 2 * torch.eye(len(ggn)).double()).inverse() @ j.mT
    mean = posterior.network(posterior.state["params"], x[:3])
    assert_close(posterior.moments(x[:3])[1], covariance)
    logits = mean / (1 + math.pi / 8 * covariance.diagonal(dim1=1, dim2=2).reshape(mean.shape)).sqrt()
    assert_close(posterior.predict(x[:3]).probs, logits.movedim(class_axis, -1).softmax(-1))


class Tagger(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        attention = nn.TransformerEncoderLayer(4, 2, 5, 0.1, batch_first=True)
        self.body = attention if kind == "attention" else nn.LSTM(4, 4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        return self.head(h[0] if isinstance(h, tuple) else h)


@pytest.mark.parametrize("kind", ["pixels", "attention", "lstm", "lstm, single"])
@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
def test_more_outputs_than_draws_take_tangents_to_the_same_end(kind: str, structure: str, dense: Any) -> None:
    torch.manual_seed(0)
    dtype, tolerance = (torch.float32, 1e-3) if "single" in kind else (torch.float64, 1e-6)
    if kind == "pixels":
        module, x, likelihood = nn.Conv2d(1, 2, 3, padding=1), normal(20, 1, 4, 4), caveat.Categorical()
        y = (x[:, 0] > 0).long()
    else:
        module, x, likelihood = Tagger(kind), normal(20, 6, 4).to(dtype), caveat.Categorical(class_axis=-1)
        y = (x[..., 0] > 0).long()
    task = caveat.Task(module.to(dtype), (x, y), likelihood)
    start = caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=40)), progress=False)
    posterior = fit(task, start, structure=structure)
    method, state, network = posterior.method, posterior.state, posterior.network
    outputs, _ = method.predictor(state, network).outputs(x[:3], 5, torch.Generator().manual_seed(2))
    _, gaussian = LaplaceState.of(state).posterior(network)
    rng = torch.Generator().manual_seed(2)
    if "single" in kind:  # torch has no forward derivative of it: one draw is tried, then the Jacobian's rows serve
        gaussian.deltas(1, rng)
        deltas = gaussian.deltas(5, rng)
        j = Jacobian(network, state["params"], x[:3]).at(x[:3]).rows()
    else:
        deltas = torch.cat([gaussian.deltas(1, rng) for _ in range(5)])
        j = at(dense, posterior).jacobian(x[:3])
    moved = torch.einsum("bdn,sn->sbd", j, gaussian.weights(deltas)).reshape(5, 3, *outputs.shape[2:])
    assert_close(outputs, network(state["params"], x[:3]) + moved, tolerance)
    wide, _ = method.predictor(state, network).outputs(x[:3], 40, torch.Generator().manual_seed(2))
    assert wide.shape == (40, *outputs.shape[1:]), "fewer outputs than draws"
    assert torch.backends.mha.get_fastpath_enabled()


# Knobs


def test_every_way_to_a_precision_is_reported(dense: Any) -> None:
    task, start = trained("Categorical")
    x, _ = data("Categorical", 4, seed=7)
    by_number = fit(task, start, precision=3.0)
    ggn = at(dense, by_number).ggn(*task.train.everything())
    j = at(dense, by_number).jacobian(x)
    assert_close(by_number.moments(x)[1], j @ (ggn + 3 * torch.eye(len(ggn)).double()).inverse() @ j.mT)
    assert by_number.info.diagnostics["prior_precision"] == 3.0
    given = fit(task, start).info.diagnostics
    assert (given["precision_from"], given["prior_precision_multiple"]) == ("given", 1.0)
    assert given["prior_precision"] == [0.5, 2.0]
    assert given["rows_skipped"] == {"rows": 0, "share_of_information": 0.0}
    for how in ("auto", "evidence"):
        report = fit(task, start, precision=how).info.diagnostics
        assert report["precision_from"] == "evidence"
        assert report["log_marginal_likelihood"] >= given["log_marginal_likelihood"]
    by_layer = fit(task, start, precision="layers").info.diagnostics
    assert set(by_layer["prior_precision"]) == {"0", "2"}
    assert by_layer["log_marginal_likelihood"] >= report["log_marginal_likelihood"] - 0.01
    split = caveat.Task(
        task.network.module.requires_grad_(True), data("Categorical", 40), caveat.Categorical(), PRIOR, validation=0.3
    )
    for how, prediction in (("auto", "samples"), ("validation", "weights"), ("validation", "closed")):
        report = fit(split, start, precision=how, prediction=prediction, structure="kronecker").info.diagnostics
        assert report["precision_from"] == "validation"
        assert report["validation_nll"] > 0


def test_skipped_rows_change_little_and_are_counted() -> None:
    torch.manual_seed(0)
    x, y = data("Categorical", 60)
    x = torch.cat([x, 20 * x[:40]])  # far out the network is sure
    y = torch.cat([y, y[:40]])
    task = caveat.Task(nn.Linear(3, 3).double(), (x, y), caveat.Categorical())
    start = caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=60)), progress=False)
    whole, fewer = fit(task, start), fit(task, start, skip=0.01)
    skipped = fewer.info.diagnostics["rows_skipped"]
    assert 5 < skipped["rows"] < 60
    assert 0 < skipped["share_of_information"] <= 0.01
    new = normal(5, 3, seed=3)
    torch.testing.assert_close(fewer.moments(new)[1], whole.moments(new)[1], rtol=0.3, atol=0)
    outputs = start.network(start.state["params"], x).softmax(-1)
    information = (outputs * (1 - outputs)).sum(-1).sort().values
    share = float(information[: skipped["rows"]].sum() / information.sum())
    assert skipped["share_of_information"] == pytest.approx(share)


@pytest.mark.parametrize("structure", ["full", "diagonal", "kronecker", "low_rank"])
def test_half_precision_and_one_random_cotangent_come_near(structure: str) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    x, y = data("Categorical", 400)
    single = caveat.Task(module, (x.float(), y), caveat.Categorical(), PRIOR)
    point = caveat.fit(single, caveat.MAP(training=caveat.Training(epochs=20)), progress=False)
    x = normal(5, 3, seed=7).float()
    exact = fit(single, point, structure=structure).moments(x)[1]
    half = fit(single, point, structure=structure, arithmetic="bfloat16").moments(x)[1]
    random = fit(single, point, structure=structure, fisher="mc").moments(x)[1]
    assert half.dtype == random.dtype == torch.float32
    torch.testing.assert_close(half, exact, rtol=0.1, atol=0.02 * float(exact.max()))
    torch.testing.assert_close(random, exact, rtol=0.8, atol=0.2 * float(exact.max()))
    assert not torch.equal(random, exact)
    assert fit(single, point, structure=structure, prediction="bridge").predict(x).samples.dtype == torch.float32


def test_coverage_says_what_each_layer_got() -> None:
    torch.manual_seed(0)
    x, y = data("Categorical", 40)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Linear(4, 3)).double()
    module[3].bias.requires_grad_(False)
    task = caveat.Task(module, (x, y), caveat.Categorical())
    start = caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=60)), progress=False)

    def said(structure: str) -> list[str]:
        return [entry["treatment"] for entry in fit(task, start, structure=structure).info.coverage]

    assert said("full") == ["Gaussian, full covariance"] * 2 + ["Gaussian, full covariance, in part"]
    assert said("diagonal")[:2] == ["diagonal Gaussian"] * 2
    assert said("low_rank")[:2] == ["Gaussian, low-rank precision"] * 2
    assert said("kronecker") == [
        "Gaussian, Kronecker-factored",
        "diagonal Gaussian (a BatchNorm1d has no Kronecker factors)",
        "Gaussian, Kronecker-factored, in part",
    ]


@pytest.mark.parametrize("structure", ["full", "kronecker"])
def test_loads_with_the_same_moments(structure: str, tmp_path: Path) -> None:
    posterior = fit(*trained("Categorical", 4), structure=structure)
    posterior.save(tmp_path / "posterior")
    torch.manual_seed(9)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    loaded, (x, y) = caveat.load(tmp_path / "posterior", module), data("Categorical", 9, seed=3)
    for kind in (False, True):
        assert torch.equal(loaded.moments(x, joint=kind)[1], posterior.moments(x, joint=kind)[1])
    updated = [p.update((x, y), progress=False).moments(x)[1] for p in (loaded, posterior)]
    assert_close(*updated)


# Refusals


def test_what_it_cannot_do_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    task, start = trained("Categorical")
    x, y = data("Categorical", 30)
    other = caveat.Task(task.network.module.requires_grad_(True), (x, y), caveat.Categorical(), caveat.LaplacePrior())
    with pytest.raises(ValueError, match=r"needs a Gaussian prior.*this is a LaplacePrior"):
        fit(other, start)
    with pytest.raises(ValueError, match=r"precision='validation' needs validation rows"):
        fit(task, start, precision="validation")
    with pytest.raises(ValueError, match=r"prediction='bridge' is for classes, and this is Gaussian"):
        fit(*trained("Gaussian"), prediction="bridge")
    with pytest.raises(ValueError, match="Poisson prediction has no closed form"):
        fit(*trained("Poisson"), prediction="closed")
    uneven = caveat.GaussianPrior({"*.weight": 1.0, "*": 2.0})
    mixed = caveat.Task(task.network.module.requires_grad_(True), (x, y), caveat.Categorical(), uneven)
    with pytest.raises(ValueError, match=r"one prior precision for 0\.weight and 0\.bias"):
        fit(mixed, start, structure="kronecker")
    for knobs, said in (
        ({"precision": -1.0}, "precision"),
        ({"structure": "half"}, "structure"),
        ({"skip": 2}, "skip"),
    ):
        with pytest.raises(ValueError, match=f"Laplace\\({said}="):
            Laplace(**knobs)
    monkeypatch.setattr("caveat.engine.cost.free_bytes", lambda device: 11_000)
    with pytest.raises(
        MemoryError, match=r"full structure over 31 weights \(the precision matrix\) needs 3.\.. kB, 11\.0 kB"
    ):
        fit(task, start)
    with pytest.raises(MemoryError, match=r"31 weights \(20 rows of gradients\) needs 11\.4 kB.*try.*'diagonal'"):
        fit(*trained("Categorical", 10))
    monkeypatch.setattr("caveat.engine.cost.free_bytes", lambda device: 5000)
    for structure in ("kronecker", "low_rank"):
        advice = r"needs .*try Laplace\(structure='diagonal'\) or SubnetworkLaplace\(weights=(\d+)\)"
        with pytest.raises(MemoryError, match=f"{structure} structure over 31 weights {advice}"):
            fit(task, start, structure=structure)
    assert fit(task, start, structure="diagonal").info.diagnostics["form"] == "layered", "the advice holds"


def test_gaussian_predictions_are_exact_by_default_and_as_good_as_they_were_tuned_to_be() -> None:
    """Of an interpolating network the noise is tiny: a mixture of draws would be a comb."""
    x, y = data("Gaussian", 40, seed=3)
    other = data("Gaussian", 60, seed=8)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 100), nn.Tanh(), nn.Linear(100, 1)).double()
    task = caveat.Task(module, (x, y), caveat.Gaussian(standardise=True), caveat.GaussianPrior(1e-3), validation=other)
    start = caveat.MAP(training=caveat.Training(epochs=400, learning_rate=0.02))
    posterior = caveat.fit(task, Laplace("full"), start=start, progress=False)
    prediction = posterior.predict(other[0])
    nll = -float(prediction.log_prob(other[1]).mean())
    assert nll == pytest.approx(posterior.info.diagnostics["validation_nll"], rel=1e-6)
    assert len(prediction.samples) == 1
    assert len(posterior.predict(other[0], draws=7).samples) == 7


def test_half_precision_weights_are_refused_with_advice() -> None:
    x, y = data("Categorical", 20)
    module = nn.Sequential(nn.Linear(3, 3)).bfloat16()
    task = caveat.Task(module, (x.bfloat16(), y), caveat.Categorical())
    with pytest.raises(ValueError, match=r"float32 or float64.*module\.float\(\)"):
        caveat.fit(task, Laplace(), start=caveat.MAP(training=caveat.Training(epochs=60)), progress=False)


def test_the_temperature_of_the_start_is_left_out_and_said() -> None:
    x, y = data("Categorical", 60)
    module = nn.Sequential(nn.Linear(3, 3)).double()
    task = caveat.Task(module, (x, y), caveat.Categorical(), validation=0.3)
    start = caveat.MAP(temperature=True, training=caveat.Training(epochs=60))
    posterior = caveat.fit(task, Laplace(), start=start, progress=False)
    assert "temperature" not in posterior.state["hyper"]
    assert any("temperature was left out" in warning for warning in posterior.info.warnings)


METHODS = [Laplace(structure="full"), Laplace(), caveat.LastLayerLaplace(), caveat.SampledLaplace(samples=4)]


@pytest.mark.parametrize("method", METHODS)
def test_predictions_are_the_same_in_inference_mode(method: Any) -> None:
    task, start = trained("Categorical")
    posterior = caveat.fit(task, method, start=start, progress=False)
    x = normal(4, 3, seed=5)
    with torch.inference_mode():
        made_there = x + 0
        found = [posterior.predict(given).probs for given in (x, made_there)]
        variances = posterior.moments(made_there)[1]
        with pytest.raises(ValueError, match=r"inference_mode\(\) makes none: use torch.no_grad\(\)"):
            caveat.fit(task, method, start=start, progress=False)
    assert torch.equal(found[0], posterior.predict(x).probs)
    assert torch.equal(found[1], found[0])
    assert torch.equal(variances, posterior.moments(x)[1])
    assert bool((variances.diagonal(dim1=1, dim2=2) > 0).all())


@pytest.mark.parametrize("method", [*METHODS, Laplace("low_rank", rank=3)])
def test_nothing_changes_under_autocast(method: Any) -> None:
    x, y = data("Categorical", 30)
    torch.manual_seed(0)
    task = caveat.Task(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), (x.float(), y), caveat.Categorical())

    def everything() -> list[Tensor]:
        start = caveat.MAP(training=caveat.Training(epochs=60))
        posterior = caveat.fit(task, method, start=start, progress=False)
        found = [
            posterior.moments(x.float())[1],
            posterior.predict(x.float()).probs,
            *next(posterior.sample(1)).values(),
        ]
        if isinstance(method, Laplace):
            found.append(posterior.update((x.float(), y), progress=False).moments(x.float())[1])
        return found

    alone = everything()
    with torch.autocast("cpu", torch.bfloat16):
        within = everything()
    assert all(torch.equal(a, b) for a, b in zip(alone, within, strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_what_inference_mode_loads_can_be_used_there_and_outside(method: Any, tmp_path: Path) -> None:
    task, start = trained("Categorical")
    posterior = caveat.fit(task, method, start=start, progress=False)
    posterior.save(tmp_path / "posterior")
    x = normal(4, 3, seed=5)
    with torch.inference_mode():
        module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        loaded = caveat.load(tmp_path / "posterior", module)
        found, elsewhere = loaded.predict(x).probs, loaded.to("meta")
    assert torch.equal(found, posterior.predict(x).probs)
    assert torch.equal(loaded.moments(x)[1], posterior.moments(x)[1])
    assert not any(value.is_inference() for value in elsewhere.state["params"].values())
