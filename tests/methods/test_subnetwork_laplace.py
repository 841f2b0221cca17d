"""SubnetworkLaplace: the dense posterior of the chosen weights, however they are chosen, stored with which they are."""

import dataclasses
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import caveat
from caveat import SubnetworkLaplace
from caveat.engine.flat_weights import flat_places
from caveat.engine.laplace.memory import uses_rows

N_WEIGHTS = 31


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X = normal(40, 3)
Y = (X[:, 0] > 0).long() + (X[:, 1] > 1).long()
NEW = normal(5, 3, seed=2)
PRIOR = caveat.GaussianPrior({"0.*": 0.5, "2.*": 2.0})


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()


@cache
def trained(n: int = 40) -> tuple[caveat.Task, caveat.Posterior]:
    task = caveat.Task(module(), (X[:n], Y[:n]), caveat.Categorical(), PRIOR)
    return task, caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=60)), progress=False)


def fit(n: int = 40, method: type = SubnetworkLaplace, **knobs: Any) -> caveat.Posterior:
    task, start = trained(n)
    return caveat.fit(task, method(**{"skip": 0.0, "precision": "given"} | knobs), start=start, progress=False)


def chosen(posterior: caveat.Posterior) -> Tensor:
    """Which weights, by what is stored, as positions among all of them."""
    where = flat_places(posterior.network)
    pieces = []
    for name, entries in posterior.state["subnetwork"].items():
        size = where[name].stop - where[name].start
        pieces.append(where[name].start + (entries.long() if len(entries) else torch.arange(size)))
    return torch.cat(pieces)


def block(dense: Any, posterior: caveat.Posterior, rows: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """The chosen weights' dense precision, and their columns of the Jacobian at new inputs."""
    by_hand = dense(posterior.network, posterior.state["params"], posterior.state["hyper"])
    prior = torch.cat([torch.full((16,), 0.5), torch.full((15,), 2.0)]).double()
    index = chosen(posterior)
    whole = by_hand.ggn(X[:rows], Y[:rows]) + scale * prior.diag()
    return whole[index][:, index], by_hand.jacobian(NEW)[..., index]


def assert_close(found: Tensor, wanted: Tensor, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max()))


@pytest.mark.parametrize("rows", [5, 40])
@pytest.mark.parametrize(
    ("weights", "count"),
    [(7, 7), (1, 1), (0.4, 12), (1e-6, 1), (1.0, 31), ("0.*", 16), ("*.bias", 7), ("2.weight", 12)],
)
def test_moments_are_those_of_the_chosen_block(weights: int | float | str, count: int, rows: int, dense: Any) -> None:
    posterior = fit(rows, weights=weights)
    if count == N_WEIGHTS:
        assert "subnetwork" not in posterior.state or len(chosen(posterior)) == N_WEIGHTS
    else:
        precision, j = block(dense, posterior, rows)
        assert len(precision) == count
        inverse = precision.inverse()
        assert_close(posterior.moments(NEW)[1], j @ inverse @ j.mT)
        assert_close(posterior.moments(NEW, joint=True)[1], j.flatten(0, 1) @ inverse @ j.flatten(0, 1).T)
    assert posterior.info.diagnostics["subnetwork"]["weights"] == count
    assert posterior.info.diagnostics["form"] == ("rows" if uses_rows(count, 2 * rows, 8) else "full")
    counted = {e["layer"]: e["treatment"] for e in posterior.info.coverage}
    said = [
        f"Gaussian, full covariance over {n} of {of} weights" if n else "fixed at the MAP"
        for n, of in by_layer(posterior)
    ]
    assert list(counted.values()) == said


SIGNAL = X[:, :1] + X[:, 1:2].square()
LIKELIHOODS: dict[str, tuple[Any, int, Tensor]] = {
    "Bernoulli": (caveat.Bernoulli(), 2, torch.cat([SIGNAL > 0.5, X[:, 2:] > 0], 1).double()),
    "Gaussian": (caveat.Gaussian(standardise=True), 1, 7 + 5 * SIGNAL),
    "HeteroscedasticGaussian": (caveat.HeteroscedasticGaussian(), 2, SIGNAL),
    "Poisson": (caveat.Poisson(), 1, SIGNAL.abs().round()),
}


@pytest.mark.parametrize("weights", [9, 1.0])
@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_moments_and_evidence_are_dense_ones_for_every_likelihood(kind: str, weights: int | float, dense: Any) -> None:
    likelihood, outputs, y = LIKELIHOODS[kind]
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, outputs)
    )
    net[3].bias.requires_grad_(False)
    task = caveat.Task(net.double(), (X, y), likelihood, caveat.GaussianPrior(0.7))
    start = caveat.MAP(training=caveat.Training(epochs=40, batch_size=20))
    method = SubnetworkLaplace(weights=weights, skip=0.0, precision="given")
    posterior = caveat.fit(task, method, start=start, progress=False)
    params, hyper, index = posterior.state["params"], posterior.state["hyper"], chosen(posterior)
    assert float(params["1.running_mean"].abs().max()) > 0.01, "the statistics are to matter"
    by_hand = dense(posterior.network, params, hyper)
    precision = by_hand.ggn(X, y)[index][:, index] + 0.7 * torch.eye(len(index), dtype=torch.float64)
    j = by_hand.jacobian(NEW)[..., index]
    assert_close(posterior.moments(NEW)[1], j @ precision.inverse() @ j.mT)
    w = torch.cat([params[name].flatten() for name in posterior.network.names])[index]
    fit = likelihood.log_prob(posterior.network(params, X), y, hyper).sum() - 0.35 * w.square().sum()
    evidence = float(fit + 0.5 * len(w) * math.log(0.7) - 0.5 * precision.logdet())
    assert posterior.info.diagnostics["log_marginal_likelihood"] == pytest.approx(evidence, rel=1e-9)


def by_layer(posterior: caveat.Posterior) -> list[tuple[int, int]]:
    if "subnetwork" not in posterior.state:
        return [(16, 16), (15, 15)]
    index = chosen(posterior)
    return [(int((index < 16).sum()), 16), (int((index >= 16).sum()), 15)]


@pytest.mark.parametrize("weights", [N_WEIGHTS, 1.0, "*"])
@pytest.mark.parametrize("rows", [5, 40])
def test_all_weights_are_laplace_with_full_covariance(weights: int | float | str, rows: int) -> None:
    whole = fit(rows, caveat.Laplace, structure="full")
    found = fit(rows, weights=weights)
    for joint in (False, True):
        assert_close(found.moments(NEW, joint=joint)[1], whole.moments(NEW, joint=joint)[1])
    assert_close(found.predict(NEW, seed=4).samples, whole.predict(NEW, seed=4).samples)


def test_draws_move_the_chosen_weights_only_and_have_their_covariance(dense: Any) -> None:
    posterior = fit(weights=8, prediction="weights")
    precision, _ = block(dense, posterior, 40)
    index, names = chosen(posterior), posterior.network.names
    point = torch.cat([posterior.state["params"][k].flatten() for k in names])
    draws = torch.stack([torch.cat([d[k].flatten() for k in names]) for d in posterior.sample(3000)]) - point
    rest = torch.ones(N_WEIGHTS, dtype=torch.bool).index_fill(0, index, False)
    assert not bool(draws[:, rest].any())
    covariance = precision.inverse()
    spread = covariance.diagonal().sqrt()
    error = (draws[:, index].T @ draws[:, index] / 3000 - covariance) / (spread.unsqueeze(1) * spread)
    assert float(error.abs().max()) * math.sqrt(1500) < 5
    by_hand = torch.stack([posterior.network(d, NEW).softmax(-1) for d in posterior.sample(4, seed=1)])
    assert_close(posterior.predict(NEW, draws=4, seed=1).samples, by_hand)


@pytest.mark.parametrize("weights", [9, "0.weight"])
def test_the_index_travels_with_the_posterior(weights: int | str, tmp_path: Path) -> None:
    posterior = fit(weights=weights)
    posterior.save(tmp_path / "posterior")
    torch.manual_seed(5)
    other = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    loaded = caveat.load(tmp_path / "posterior", other)
    assert torch.equal(chosen(loaded), chosen(posterior))
    assert torch.equal(loaded.moments(NEW)[1], posterior.moments(NEW)[1])
    assert torch.equal(loaded.predict(NEW).samples, posterior.predict(NEW).samples)
    with pytest.raises(caveat.CorruptFile, match="another model"):
        caveat.load(tmp_path / "posterior", nn.Linear(3, 3).double())


@pytest.mark.parametrize(("first", "weights"), [(3, 20), (5, 9), (30, 12)])
def test_an_update_is_a_fit_to_both_data_sets(first: int, weights: int, dense: Any) -> None:
    _, start = trained()
    task = caveat.Task(module(), (X[:first], Y[:first]), caveat.Categorical(), PRIOR)
    method = SubnetworkLaplace(weights=weights, skip=0.0, precision="given")
    before = caveat.fit(task, method, start=start, progress=False)
    updated = before.update((X[first:], Y[first:]), progress=False)
    precision, j = block(dense, updated, 40)
    assert torch.equal(chosen(updated), chosen(before))
    assert_close(updated.moments(NEW)[1], j @ precision.inverse() @ j.mT)
    once_more = updated.update((X[:1], Y[:1]), progress=False)
    assert once_more.info.diagnostics["updated_with_rows"] == 40 - first + 1


def test_a_score_of_ones_own_is_kept_with_the_method(tmp_path: Path) -> None:
    score = torch.arange(N_WEIGHTS).double()
    for keep_dead in (False, True):
        posterior = fit(weights=4, score=score, keep_dead=keep_dead)
        assert chosen(posterior).tolist() == [27, 28, 29, 30]
    posterior.save(tmp_path / "posterior")
    loaded = caveat.load(tmp_path / "posterior", module())
    assert torch.equal(loaded.method.score, score)  # type: ignore[attr-defined]
    assert torch.equal(loaded.moments(NEW)[1], posterior.moments(NEW)[1])
    task, start = trained()
    method = dataclasses.replace(posterior.method)
    folder = caveat.fit(task, method, start=start, folder=tmp_path / "fit", progress=False)
    assert chosen(folder).tolist() == [27, 28, 29, 30]


def test_the_prior_may_be_scaled_to_the_share_of_weights(dense: Any) -> None:
    posterior = fit(weights=10, precision="scaled")
    assert posterior.info.diagnostics["prior_precision_multiple"] == pytest.approx(10 / N_WEIGHTS)
    precision, j = block(dense, posterior, 40, scale=10 / N_WEIGHTS)
    assert_close(posterior.moments(NEW)[1], j @ precision.inverse() @ j.mT)


def test_a_dead_unit_is_left_out_and_asking_for_more_is_a_warning() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    with torch.no_grad():
        network[0].bias[1] = -100.0
    task = caveat.Task(network, (X, Y), caveat.Categorical(), parameters=lambda name, _: True)
    start = caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=60)), progress=False)
    dead = {3, 4, 5, 13, 17, 21, 25}
    method = SubnetworkLaplace(weights=24, score="variance", skip=0.0, precision="given")
    posterior = caveat.fit(task, method, start=start, progress=False)
    assert not dead & set(chosen(posterior).tolist())
    fewer = dataclasses.replace(method, weights=27)
    with_warning = caveat.fit(task, fewer, start=start, progress=False)
    assert any("weights=27 were asked for, but only 24 of 31" in w for w in with_warning.info.warnings)
    kept = caveat.fit(task, dataclasses.replace(method, weights=7, keep_dead=True), start=start, progress=False)
    assert set(chosen(kept).tolist()) == dead
    assert_close(kept.moments(NEW)[1] + 1, torch.ones_like(kept.moments(NEW)[1]))  # no variance at all: it is the MAP


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"weights=50_000 is more than the network has \(31\)"):
        fit(weights=50_000)
    with pytest.raises(ValueError, match=r"weights='3\.\*' matches no parameter that inference is about"):
        fit(weights="3.*")
    for bad in (0, -3, 0.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match=r"must be a count, a share in \(0, 1\], or a pattern"):
            SubnetworkLaplace(weights=bad)
    for knobs in ({"weights": True}, {"score": "best"}, {"keep_dead": 1}):
        with pytest.raises(ValueError, match=r"SubnetworkLaplace\("):
            SubnetworkLaplace(**knobs)  # type: ignore[arg-type]
    for other in (numpy.ones(N_WEIGHTS), [1.0] * N_WEIGHTS):
        with pytest.raises(ValueError, match=r"score=a (ndarray|list).*torch\.as_tensor"):
            SubnetworkLaplace(score=other)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="score has 3 numbers"):
        fit(weights=2, score=torch.ones(3))
    monkeypatch.setattr("caveat.engine.cost.free_bytes", lambda device: 20_000)
    with pytest.raises(
        MemoryError, match=r"20 weights \(the precision matrix\) needs 28\.8 kB.*SubnetworkLaplace\(weights=14\)"
    ):
        fit(weights=20)
    assert len(chosen(fit(weights=14))) == 14, "the advice holds"


def test_a_pattern_leaves_nothing_for_a_score_to_choose() -> None:
    with pytest.raises(ValueError, match=r"weights='0\.weight' takes whole parameters"):
        caveat.SubnetworkLaplace("0.weight", "obd")


def test_methods_with_equal_score_tensors_are_equal() -> None:
    score = torch.arange(5.0)
    assert caveat.SubnetworkLaplace(2, score) == caveat.SubnetworkLaplace(2, score.clone())
    assert caveat.SubnetworkLaplace(2, score) != caveat.SubnetworkLaplace(2, score + 1)
    assert len({caveat.SubnetworkLaplace(2, score), caveat.SubnetworkLaplace(2, score.clone())}) == 1
