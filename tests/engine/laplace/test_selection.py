"""Scores by hand, dead weights left out, and the distance that the variance rule minimises."""

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import caveat
from caveat.engine.laplace import selection
from caveat.engine.laplace.selection import Selection, gaussian_wasserstein, path_variance, select_weights
from caveat.engine.laplace.sweep import Sweep
from caveat.engine.linearised import marginal_variances
from caveat.engine.run import Run

N, DEAD = 24, [6, 7, 8, 11, 14, 17]  # the third unit's inputs, bias and outputs
RNG = torch.Generator().manual_seed(0)
X = torch.randn(N, 3, generator=RNG, dtype=torch.float64)


class Setting:
    """A network of 20 weights, whose third hidden unit never fires, at a point with uneven priors."""

    def __init__(self, dense: Any) -> None:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)).double()
        with torch.no_grad():
            module[0].bias.copy_(torch.tensor([0.5, 0.7, -100.0]))
        self.task = caveat.Task(module, (X, (X[:, 0] > 0).long()), caveat.Categorical())
        self.network = self.task.network
        self.run = Run()
        self.sweep = Sweep(self.network, self.network.params(), {}, self.task.train, self.run)
        self.prior = torch.linspace(0.5, 3, 20, dtype=torch.float64)
        self.weights = torch.cat([p.flatten() for p in self.network.params().values()])
        self.dense = dense(self.network, self.network.params(), {})

    def diagonals(self, rows: Tensor | slice = slice(None)) -> tuple[Tensor, Tensor]:
        x, y = self.task.train.everything()
        j = self.dense.jacobian(x[rows])
        return self.dense.ggn(x[rows], y[rows]).diagonal(), j.square().sum((0, 1))

    def select(self, count: int, score: Any, **options: Any) -> Selection:
        sampled = {"marginal_variances": self.variances} if str(score).startswith("sampled") else {}
        return select_weights(self.task, self.sweep, count, score, self.prior, self.run, **sampled, **options)

    def variances(self, task: caveat.Task, sweep: Sweep, prior: Tensor, run: Run) -> Tensor:
        return marginal_variances(task, sweep.network, sweep.params, sweep.hyper, prior, run)


@pytest.fixture
def setting(dense: Any) -> Setting:
    return Setting(dense)


def best(values: Tensor, count: int, dead: bool = False) -> list[int]:
    left_out = [] if dead else DEAD
    order = [i for i in values.argsort(descending=True).tolist() if i not in left_out]
    return sorted(order[:count])


@pytest.mark.parametrize("count", [1, 5, 13])
@pytest.mark.parametrize("score", ["energy", "gradient", "variance", "obd", "magnitude"])
def test_scores_are_those_by_hand(setting: Setting, score: str, count: int) -> None:
    ggn, energy = setting.diagonals()
    values = {
        "energy": energy / (ggn + setting.prior),
        "gradient": energy,
        "variance": 1 / (ggn + setting.prior),
        "obd": setting.weights.square() * ggn / 2,
        "magnitude": setting.weights.abs(),
    }[score]
    found = setting.select(count, score)
    assert found.index.tolist() == best(values, count)
    assert not setting.run.warnings
    report = found.report
    variance, kept = 1 / (ggn + setting.prior), found.index
    dropped = torch.ones(20, dtype=torch.bool).index_fill(0, kept, False)
    assert report["wasserstein"] == pytest.approx(float(variance[dropped].sum().sqrt()))
    assert report["share_of_variance"] == pytest.approx(float(variance[kept].sum() / variance.sum()))
    moved = energy * variance
    assert report["share_of_energy"] == pytest.approx(float(moved[kept].sum() / moved.sum()))
    assert (report["weights"], report["of"], report["score"]) == (count, 20, score)
    assert (report["without_curvature"], report["score_from"]) == (6, f"{N} rows, exact")
    kept_dead = setting.select(count, score, keep_dead=True)
    assert kept_dead.index.tolist() == best(values, count, dead=True)
    assert kept_dead.report["without_curvature"] == 6


def test_the_variance_rule_alone_would_take_dead_weights(setting: Setting) -> None:
    setting.prior = torch.ones_like(setting.prior)
    assert setting.select(6, "variance", keep_dead=True).index.tolist() == DEAD
    assert not set(setting.select(6, "variance").index.tolist()) & set(DEAD)


def test_more_than_are_alive_is_a_warning_and_none_alive_an_error(setting: Setting) -> None:
    found = setting.select(17, "energy")
    assert found.index.tolist() == [i for i in range(20) if i not in DEAD]
    assert setting.run.warnings == [
        "weights=17 were asked for, but only 14 of 20 can be chosen: the others have no curvature on the 24 rows "
        "looked at (keep_dead=True takes them too)"
    ]
    assert len(setting.select(17, "energy", keep_dead=True).index) == 17
    nothing = {name: value * 0 for name, value in setting.sweep.params.items()}
    sure = nothing | {"2.bias": torch.tensor([800.0, -800.0]).double()}  # of every row
    setting.sweep = dataclasses.replace(setting.sweep, params=sure)
    with pytest.raises(ValueError, match="no weight can be chosen: all have no curvature on the 24 rows"):
        setting.select(3, "energy")


def test_random_takes_any_that_are_alive_and_the_same_for_a_seed(setting: Setting) -> None:
    first, again = setting.select(7, "random").index, setting.select(7, "random").index
    assert torch.equal(first, again)
    assert not set(first.tolist()) & set(DEAD)
    setting.run = Run(seed=1)
    assert not torch.equal(setting.select(7, "random").index, first)


@pytest.mark.parametrize("keep_dead", [False, True])
def test_a_score_may_be_given(setting: Setting, keep_dead: bool) -> None:
    values = torch.randn(20, generator=torch.Generator().manual_seed(1))
    for given in (values, values.double().reshape(4, 5)):
        found = setting.select(8, given, keep_dead=keep_dead)
        assert found.index.tolist() == best(values, 8, dead=keep_dead)
        assert found.report["score"] == "given"
        if keep_dead:  # nothing is asked of the data
            assert "wasserstein" not in found.report
            continue
        variance = 1 / (setting.diagonals()[0] + setting.prior)
        dropped = [i for i in range(20) if i not in found.index.tolist()]
        assert found.report["wasserstein"] == pytest.approx(float(variance[dropped].sum().sqrt()))
    with pytest.raises(ValueError, match=r"score has 19 numbers, but the network has 20 weights"):
        setting.select(3, values[1:], keep_dead=keep_dead)
    values[4] = torch.nan
    with pytest.raises(ValueError, match="holds NaN"):
        setting.select(3, values, keep_dead=keep_dead)


def test_a_score_may_be_a_mask_or_leave_weights_out(setting: Setting) -> None:
    mask = torch.arange(20) % 2 == 0
    for keep_dead in (False, True):
        allowed = [i for i in range(0, 20, 2) if keep_dead or i not in DEAD]
        assert setting.select(len(allowed), mask, keep_dead=keep_dead).index.tolist() == allowed
        assert not setting.run.warnings
        left_out = torch.where(mask, 0.0, -torch.inf)  # dead weights would tie with those that are left out
        assert setting.select(len(allowed) + 1, left_out, keep_dead=keep_dead).index.tolist() == allowed
        assert setting.run.warnings.pop().endswith("a score of -inf")
    whole = 2**24 + torch.arange(20)  # whole numbers that float32 cannot tell apart
    assert setting.select(3, whole, keep_dead=True).index.tolist() == [17, 18, 19]
    with pytest.raises(ValueError, match="no weight can be chosen: all have a score of -inf"):
        setting.select(3, torch.full((20,), -torch.inf), keep_dead=True)


def test_sampled_scores_are_marginal_variances_of_the_whole_posterior(setting: Setting) -> None:
    x, y = setting.task.train.everything()
    exact = torch.linalg.inv(setting.dense.ggn(x, y) + setting.prior.diag()).diagonal()
    params = setting.network.params()
    found = marginal_variances(setting.task, setting.network, params, {}, setting.prior, Run(), samples=2000)
    # A variance from K samples is chi-squared with K degrees of freedom, over K.
    assert (found / exact - 1).abs().max() < 4.5 * (2 / 2000) ** 0.5
    ggn, energy = setting.diagonals()
    diagonal = 1 / (ggn + setting.prior)
    few = marginal_variances(setting.task, setting.network, params, {}, setting.prior, Run())
    alive = [i for i in range(20) if i not in DEAD]
    errors = [(values / exact - 1)[alive].abs().mean() for values in (few, diagonal)]
    assert errors[0] < 0.6 * errors[1]  # and the diagonal's is of one sign: it says too little
    assert (diagonal[alive] < exact[alive]).all()
    part = setting.run.child("marginal")
    own = marginal_variances(setting.task, setting.network, params, {}, setting.prior, part)
    assert setting.select(5, "sampled").index.tolist() == best(own, 5)
    assert setting.select(5, "sampled_energy").index.tolist() == best(own * energy, 5)
    assert setting.run.gradient_evaluations > 64


def test_swag_scores_are_the_variance_along_one_epoch(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    iterates: list[Tensor] = []
    step = torch.optim.SGD.step

    def spied(self: torch.optim.SGD) -> None:
        step(self)
        iterates.append(torch.cat([p.detach().flatten() for group in self.param_groups for p in group["params"]]))

    monkeypatch.setattr(torch.optim.SGD, "step", spied)
    setting.task.train.batch_size = 4
    before = [p.detach().clone() for p in setting.network.module.parameters()]
    values = path_variance(setting.task, setting.sweep, Run())
    found = torch.cat([v.flatten() for v in values.values()])
    assert len(iterates) == 6
    torch.testing.assert_close(found.detach(), torch.stack(iterates).var(0, correction=0))
    assert all(torch.equal(*pair) for pair in zip(before, setting.network.module.parameters(), strict=True))
    assert not any(p.requires_grad for p in setting.network.module.parameters())
    chosen = setting.select(5, "swag")
    assert chosen.index.tolist() == best(found, 5)


def test_fewer_rows_and_random_cotangents_for_large_networks(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "ROWS", 5)
    some = torch.linspace(0, N - 1, 5, dtype=torch.float64).long()
    ggn, energy = (N / 5 * value for value in setting.diagonals(some))
    found = setting.select(4, "energy")
    assert found.index.tolist() == best(energy / (ggn + setting.prior), 4)
    assert found.report["score_from"] == "5 rows, exact"
    dropped = torch.ones(20, dtype=torch.bool).index_fill(0, found.index, False)
    assert found.report["wasserstein"] == pytest.approx(float((1 / (ggn + setting.prior))[dropped].sum().sqrt()))
    monkeypatch.setattr(selection, "EXACT_UP_TO", 0)
    rough = setting.select(14, "energy")
    assert rough.report["score_from"] == "5 rows, one random cotangent each"
    assert rough.index.tolist() == [i for i in range(20) if i not in DEAD], "random, but not dead"
    whole = setting.select(4, "energy", exact=True)
    ggn, energy = setting.diagonals()
    assert whole.index.tolist() == best(energy / (ggn + setting.prior), 4)
    assert whole.report["score_from"] == f"{N} rows, exact"


# Distances


def random_covariance(n: int) -> Tensor:
    half = torch.randn(n, n, generator=RNG, dtype=torch.float64)
    return half @ half.T


def test_wasserstein_of_commuting_covariances_is_the_distance_of_their_roots() -> None:
    basis = torch.linalg.qr(torch.randn(6, 6, generator=RNG, dtype=torch.float64)).Q
    a, b = (torch.rand(6, generator=RNG, dtype=torch.float64) for _ in range(2))
    b[:2] = 0  # as for weights that are dropped
    found = gaussian_wasserstein(basis @ a.diag() @ basis.T, basis @ b.diag() @ basis.T)
    assert found == pytest.approx(float((a.sqrt() - b.sqrt()).norm()), rel=1e-6)
    assert gaussian_wasserstein(a.diag(), a.diag()) == pytest.approx(0, abs=1e-6)


def test_wasserstein_is_the_cost_of_the_optimal_map() -> None:
    a, b = random_covariance(5), random_covariance(5)
    values, vectors = torch.linalg.eigh(a)
    root, inverse = ((vectors * values**power) @ vectors.T for power in (0.5, -0.5))
    values, vectors = torch.linalg.eigh(root @ b @ root)
    optimal = inverse @ ((vectors * values.sqrt()) @ vectors.T) @ inverse
    torch.testing.assert_close(optimal @ a @ optimal, b)  # it takes N(0, a) to N(0, b), and is symmetric
    away = torch.eye(5, dtype=torch.float64) - optimal
    cost = math.sqrt(float((away @ a @ away).trace()))
    assert gaussian_wasserstein(a, b) == pytest.approx(cost, rel=1e-8)
    assert gaussian_wasserstein(b, a) == pytest.approx(cost, rel=1e-8)


@pytest.mark.parametrize("count", [1, 3, 9])
def test_the_variance_rule_minimises_the_distance_over_all_subsets(dense: Any, count: int) -> None:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2, bias=False)).double()
    task = caveat.Task(module, (X[:, :2], (X[:, 0] > 0).long()), caveat.Categorical())
    network, (x, y) = task.network, task.train.everything()
    prior = torch.linspace(0.5, 3, 10, dtype=torch.float64)
    whole = 1 / (dense(network, network.params(), {}).ggn(x, y).diagonal() + prior)

    def distance(kept: tuple[int, ...]) -> float:
        taken = torch.zeros_like(whole).index_fill(0, torch.tensor(kept), 1)
        return gaussian_wasserstein(whole.diag(), (taken * whole).diag())

    by_distance = min(itertools.combinations(range(10), count), key=distance)
    sweep = Sweep(network, network.params(), {}, task.train, Run())
    found = select_weights(task, sweep, count, "variance", prior, Run())
    assert tuple(found.index.tolist()) == by_distance
    assert found.report["wasserstein"] == pytest.approx(distance(by_distance), rel=1e-6)
