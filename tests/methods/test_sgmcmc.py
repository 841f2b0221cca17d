"""SG-MCMC: the exact stationary covariance of its recursion, schedules, batches, resuming, and what it refuses."""

import math
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from threading import Barrier, Lock
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import caveat
from caveat import SGMCMC
from caveat.engine.chains import LogPosterior
from caveat.engine.distributed import Ranks
from caveat.engine.fresh_weights import FreshWeights
from caveat.engine.run import Run
from caveat.network import Params

NOISE, PRECISION = 0.8, 2.0
Carries = list[dict[str, Tensor]]


def inputs(rows: int = 20) -> Tensor:
    """Three correlated features."""
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 3, generator=rng, dtype=torch.float64)
    return x @ torch.tensor([[1.0, 0.5, 0.0], [0.0, 0.8, -0.4], [0.0, 0.0, 0.9]], dtype=torch.float64)


def regressions(outputs: int = 300, prior: caveat.Prior | None = None) -> caveat.Task:
    """Bayesian linear regression, as many independent problems of three weights as there are outputs."""
    x = inputs()
    y = (x @ x.new_tensor([1.0, -0.5, 0.3]))[:, None].expand(-1, outputs) + 0.3
    module = nn.Linear(3, outputs, bias=False).double()
    return caveat.Task(module, (x, y), caveat.Gaussian(noise=NOISE), prior or caveat.GaussianPrior(PRECISION))


def classes(prior: caveat.Prior | None = None, rows: int = 23) -> caveat.Task:
    """A small network on rows that make no whole number of batches."""
    x = inputs(rows)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long()), 5)
    return caveat.Task(module, loader, caveat.Categorical(), prior or caveat.GaussianPrior(1.0))


def fit(task: caveat.Task, method: SGMCMC, **options: Any) -> caveat.Posterior:
    return caveat.fit(task, method, progress=False, **options)


def stationary(precision: Tensor, eta: float, method: SGMCMC, mass: Tensor | None = None) -> Tensor:
    """The covariance at which the recursion in (theta, m) comes to rest, with gradients -precision (theta - mean).

    S = A S A^T + Q is solved as a linear system; of S the theta part [..., d, d] is given. `mass` is [..., d].
    """
    d, h, beta = precision.shape[-1], math.sqrt(eta), method.momentum
    one = torch.eye(d, dtype=torch.float64).expand(precision.shape)
    inverse = one if mass is None else torch.diag_embed(1 / mass)
    new_momentum = torch.cat([-h * precision, beta * one], -1)
    kick = math.sqrt(2 * (1 - beta) * method.temperature) * (one if mass is None else torch.diag_embed(mass.sqrt()))
    a = torch.cat([torch.cat([one, 0 * one], -1) + h * inverse @ new_momentum, new_momentum], -2)
    b = torch.cat([h * inverse @ kick, kick], -2)
    assert float(torch.linalg.eigvals(a).abs().max()) < 1
    twice = torch.einsum("...ij,...kl->...ikjl", a, a).reshape(*a.shape[:-2], 4 * d * d, 4 * d * d)
    q = (b @ b.mT).reshape(*a.shape[:-2], 4 * d * d, 1)
    return torch.linalg.solve(torch.eye(4 * d * d, dtype=torch.float64) - twice, q).reshape(a.shape)[..., :d, :d]


@pytest.fixture
def carries(monkeypatch: pytest.MonkeyPatch) -> Carries:
    """Position, momentum and square of the chains after every epoch."""
    kept: Carries = []
    monkeypatch.setattr(Run, "checkpoint_due", lambda self: True)

    def keep(self: Run, carry: caveat.State, note: dict[str, Any]) -> None:
        kept.append({name: value.clone() for name, value in carry["chains"].items()})

    monkeypatch.setattr(Run, "checkpoint", keep)
    return kept


@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize("momentum", [0.0, 0.7])
def test_full_gradients_have_the_exact_stationary_covariance(momentum: float, temperature: float) -> None:
    task, x = regressions(), inputs()
    precision = x.T @ x / NOISE**2 + PRECISION * torch.eye(3)
    mean = torch.linalg.solve(precision, x.T @ next(task.train.ordered())[1][:, 0] / NOISE**2)
    eta = 0.8 / float(torch.linalg.eigvalsh(precision).max())
    method = SGMCMC(1, 250, 1, 60, task.n * eta, momentum, temperature=temperature)
    draws = fit(task, method).state["params"]["weight"].flatten(0, 2)  # [draws x outputs, 3]
    expected = stationary(precision, eta, method)
    if not momentum:  # T / (lambda (1 - eta lambda / 2))
        closed = temperature * torch.linalg.inv(precision @ (torch.eye(3) - eta * precision / 2))
        torch.testing.assert_close(expected, closed)
    centred = (draws - mean) @ torch.linalg.inv(torch.linalg.cholesky(expected)).T
    assert float(centred.mean(0).abs().max()) < 0.04
    torch.testing.assert_close(centred.T @ centred / len(draws), torch.eye(3, dtype=torch.float64), rtol=0, atol=0.04)
    excess = torch.linalg.eigvals(expected @ precision).real.max() / temperature
    assert float(excess) > 1.2, "steps are large enough here for their bias to show"


@pytest.mark.parametrize("preconditioner", ["identity", "rmsprop"])
@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_every_step_is_that_of_the_equation(
    preconditioner: Any, momentum: float, carries: Carries, monkeypatch: pytest.MonkeyPatch
) -> None:
    temperature, burn_in = 0.5, 8
    task, x = regressions(60, caveat.LogisticPrior(0.4)), inputs()
    method = SGMCMC(2, 12, 1, burn_in, 0.02, momentum, preconditioner, temperature=temperature)
    fit(task, method)
    eta, noises, y = 0.02 / task.n, [], next(task.train.ordered())[1]
    for epoch, (before, after) in enumerate(pairwise(carries), 1):
        weight = before["position"].reshape(2, 60, 3)
        gradient = ((y - x @ weight.mT).mT @ x / NOISE**2 - torch.tanh(weight / 0.8) / 0.4).flatten(1)
        mass = torch.ones_like(gradient)
        if preconditioner == "rmsprop":
            moved = 0.99 * before["square"] + 0.01 * (gradient / task.n) ** 2
            torch.testing.assert_close(after["square"], moved if epoch < burn_in else carries[burn_in - 1]["square"])
            mass = 1e-7 + after["square"].sqrt()
        step = math.sqrt(eta) * after["momentum"] / mass
        torch.testing.assert_close(after["position"], before["position"] + step)
        kick = after["momentum"] - momentum * before["momentum"] - math.sqrt(eta) * gradient
        noises.append(kick / (2 * (1 - momentum) * temperature * mass).sqrt())
    noise = torch.stack(noises)  # [epochs, chains, weights]
    assert len(carries) == method.plan(20, 20).epochs == 20
    assert abs(float(noise.mean())) < 4 / math.sqrt(noise.numel())
    assert abs(float(noise.square().mean()) - 1) < 4 * math.sqrt(2 / noise.numel())
    for one, other in ((noise[1:], noise[:-1]), (noise[:, :1], noise[:, 1:]), (noise[..., 1:], noise[..., :-1])):
        assert abs(float((one * other).mean())) < 4 / math.sqrt(one.numel())


@pytest.mark.parametrize("momentum", [0.0, 0.7])
def test_a_preconditioner_that_is_held_still_leaves_the_right_variance(momentum: float, carries: Carries) -> None:
    curvature = torch.logspace(0, 2, 600, dtype=torch.float64)[:, None]
    module = nn.Linear(1, 600, bias=False).double()
    nothing = (torch.zeros(4, 1, dtype=torch.float64), torch.zeros(4, 600, dtype=torch.float64))
    task = caveat.Task(module, nothing, caveat.Gaussian(noise=1.0), caveat.GaussianPrior({"weight": curvature}))
    method = SGMCMC(1, 250, 1, 60, 0.1, momentum, "rmsprop")
    draws = fit(task, method).state["params"]["weight"][0, ..., 0]  # [draws, outputs]
    mass = 1e-7 + carries[-1]["square"].T.sqrt()
    assert all(torch.equal(kept["square"], carries[-1]["square"]) for kept in carries[59:])
    assert not torch.equal(carries[58]["square"], carries[59]["square"])
    expected = stationary(curvature[..., None], 0.1 / 4, method, mass)[..., 0, 0]
    assert float((expected * curvature[:, 0]).max()) > 1.2, "steps are large enough here for their bias to show"
    ratio = draws.square().mean(0) / expected
    for group in (ratio[:300], ratio[300:]):
        assert abs(float(group.mean()) - 1) < 0.05


def test_batch_gradients_are_unbiased_also_of_a_last_smaller_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    task, seen = classes(), []
    gradient = LogPosterior.gradient

    def recorded(self: LogPosterior, position: Tensor, rows: Iterable[Any], **options: Any) -> tuple[Tensor, Tensor]:
        rows = list(rows)
        found = gradient(self, position, rows, **options)
        if torch.is_grad_enabled():  # not the log density of a draw
            seen.append((position.clone(), torch.cat([x for x, _ in rows]), found[1].clone()))
        return found

    monkeypatch.setattr(LogPosterior, "gradient", recorded)
    fit(task, SGMCMC(1, 1, 400, 0, 1e-20, 0.0, batch_size=5))
    del seen[5 * 400 :]  # a look at the curvature when all is over
    assert [len(x) for _, x, _ in seen[:5]] == [5, 5, 5, 5, 3]
    for epoch in range(0, len(seen), 5):
        rows = torch.cat([x for _, x, _ in seen[epoch : epoch + 5]])
        assert torch.equal(rows.sort(0).values, inputs(23).sort(0).values), "every row once an epoch"
    assert len({tuple(x.flatten().tolist()) for _, x, _ in seen[::5]}) > 390, "in another order each time"

    module, (x, y) = task.network.module.requires_grad_(), task.train.everything()
    nn.utils.vector_to_parameters(seen[0][0][0], module.parameters())
    likelihood = task.network.likelihood.log_prob(module(x), y, {}).sum()
    density = likelihood + task.network.prior.log_prob(dict(module.named_parameters()))
    whole = torch.cat([g.flatten() for g in torch.autograd.grad(density, [*module.parameters()])])
    for place in range(5):
        estimates = torch.stack([g[0] for _, _, g in seen[place::5]])
        error = estimates.std(0) / math.sqrt(len(estimates))
        assert float(((estimates.mean(0) - whole) / error).abs().max()) < 4
    # Fewer rows, more noise: the last batch is scaled by its own size.
    assert 1.2 < float((estimates.std(0) / torch.stack([g[0] for _, _, g in seen[::5]]).std(0)).mean()) < 1.5


@pytest.mark.parametrize(
    "prior",
    [
        caveat.GaussianPrior(0.5),
        caveat.LaplacePrior(0.7),
        caveat.LogisticPrior(0.6),
        caveat.StudentTPrior(0.8, 5.0),
        caveat.GaussianMixturePrior((0.4, 1.2), (0.5, 0.5)),
        caveat.EmpCovPrior("weight", torch.tensor([[1.0, 0.6], [0.6, 0.8]], dtype=torch.float64), epsilon=0.05),
    ],
    ids=lambda prior: type(prior).__name__,
)
def test_without_data_the_prior_comes_back(prior: caveat.Prior) -> None:
    module = nn.Linear(2, 300, bias=False).double()
    nothing = (torch.zeros(4, 2, dtype=torch.float64), torch.zeros(4, 300, dtype=torch.float64))
    task = caveat.Task(module, nothing, caveat.Gaussian(noise=1.0), prior)
    drawn = fit(task, SGMCMC(1, 100, 3, 150, 4 * 0.02, 0.7)).state["params"]["weight"].flatten(0, 2)
    rng = torch.Generator().manual_seed(0)
    known = torch.cat([prior.sample({"weight": module.weight.detach()}, rng)["weight"] for _ in range(100)])
    for q in (0.25, 0.5, 0.75, 0.95):
        share = (drawn.abs() < known.abs().quantile(q, 0)).double().mean(0)
        torch.testing.assert_close(share, torch.full_like(share, q), rtol=0, atol=0.03)
    correlation = [torch.corrcoef(weights.T)[0, 1] for weights in (drawn, known)]
    torch.testing.assert_close(*correlation, rtol=0, atol=0.05)


def test_a_cold_posterior_is_narrower() -> None:
    def spread(temperature: float) -> float:
        method = SGMCMC(2, 60, 1, 40, 0.2, 0.9, temperature=temperature, batch_size=5)
        return float(fit(classes(), method).state["params"]["0.weight"].std(1).mean())

    cold, warm = spread(0.01), spread(1.0)
    assert cold < 0.3 * warm


def test_the_step_falls_along_half_a_cosine() -> None:
    method = SGMCMC(burn_in=2, cycle=4)
    share = method.plan(60, 20).share_of_step
    assert [share(epoch, 1.0) for epoch in (0, 1)] == [1, 1]
    assert share(2, 0.0) == 1
    assert share(3, 1.0) == pytest.approx(0.5)
    assert share(4, 0.5) == pytest.approx((1 + math.cos(math.pi * 2.5 / 4)) / 2)
    assert share(5, 1.0) == pytest.approx(0, abs=1e-12)
    assert share(6, 0.0) == 1, "a new cycle"
    assert replace(method, cycle=0).plan(60, 20).share_of_step(5, 1.0) == 1


def test_chains_follow_the_schedule(carries: Carries) -> None:
    method = SGMCMC(1, 2, burn_in=2, cycle=4, learning_rate=0.3)
    fit(regressions(4), method)  # one batch an epoch
    for epoch, (before, after) in enumerate(pairwise(carries), 1):
        eta = 0.3 / 20 * method.plan(20, 20).share_of_step(epoch, 1.0)
        torch.testing.assert_close(after["position"] - before["position"], math.sqrt(eta) * after["momentum"])


@pytest.mark.parametrize(
    ("method", "epochs"),
    [
        (SGMCMC(burn_in=2, length=4, thin=3), [4, 7, 10, 13]),
        (SGMCMC(burn_in=2, length=3, cycle=4), [5, 9, 13]),
        (SGMCMC(burn_in=2, length=5, cycle=5, draws_a_cycle=2, thin=2), [4, 6, 9, 11, 14]),
    ],
)
def test_draws_are_taken_at_these_epochs(method: SGMCMC, epochs: list[int], carries: Carries) -> None:
    method = replace(method, chains=1, batch_size=5, learning_rate=0.03)
    posterior, plan = fit(classes(), method), method.plan(23, 5)
    assert plan.epochs == posterior.info.gradient_evaluations == len(carries) == epochs[-1] + 1
    where = torch.stack([carries[epoch]["position"][0, :12] for epoch in epochs])
    assert torch.equal(posterior.state["params"]["0.weight"][0].flatten(1), where)
    steps = torch.tensor([0.03 / 23 * plan.share_of_step(epoch, 1.0) for epoch in epochs], dtype=torch.float64)
    assert torch.equal(posterior.state["stats"]["step_size"][0], steps)


@pytest.mark.parametrize("learning_rate", [0.1, None])
def test_a_chain_is_the_same_alone_and_beside_others(learning_rate: float | None) -> None:
    method, threads = SGMCMC(1, 10, 1, 3, learning_rate, batch_size=5), torch.get_num_threads()
    alone = fit(classes(), method).state
    try:
        torch.set_num_threads(2)
        beside = fit(classes(), replace(method, chains=3)).state
    finally:
        torch.set_num_threads(threads)
    for group in ("params", "stats"):
        for name, value in alone[group].items():
            assert torch.equal(beside[group][name][:1], value), name
    chains = beside["params"]["0.weight"]
    assert not torch.equal(chains[0], chains[1])
    assert not torch.equal(chains[1], chains[2])


@pytest.mark.parametrize(
    ("learning_rate", "preconditioner", "batch_size"),
    [(0.05, "identity", 5), (0.05, "rmsprop", 5), (None, "identity", 5), (None, "rmsprop", 5), (None, "identity", 23)],
)
def test_goes_on_after_a_kill_bit_for_bit(
    learning_rate: float | None,
    preconditioner: Any,
    batch_size: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    knobs: dict[str, Any] = {"cycle": 6, "draws_a_cycle": 2, "batch_size": batch_size}
    method = SGMCMC(2, 6, 2, 5, learning_rate, 0.9, preconditioner, **knobs)
    whole = fit(classes(), method)
    checkpoint, seen = Run.checkpoint, 0

    def killed(self: Run, carry: caveat.State, note: dict[str, Any]) -> None:
        nonlocal seen
        seen += 1
        if seen % 4 == 0:
            raise KeyboardInterrupt  # before this place is kept
        checkpoint(self, carry, note)
        if seen % 3 == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(Run, "checkpoint_due", lambda self: self.folder is not None)
    monkeypatch.setattr(Run, "checkpoint", killed)
    kills = 0
    while not (tmp_path / "chains").exists():
        try:
            resumed = fit(classes(), method, folder=tmp_path / "chains")
        except KeyboardInterrupt:
            kills += 1
    assert kills > 8
    for group in ("params", "stats"):
        for name, value in whole.state[group].items():
            assert torch.equal(resumed.state[group][name], value), name
    assert resumed.info.gradient_evaluations == whole.info.gradient_evaluations
    if learning_rate is not None:
        assert whole.info.gradient_evaluations == 2 * method.plan(23, 5).epochs
    assert resumed.info.diagnostics == whole.info.diagnostics


def test_a_folder_of_other_chains_is_refused_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(self: Run, carry: caveat.State, note: dict[str, Any]) -> None:
        checkpoint(self, carry, note)
        raise KeyboardInterrupt

    checkpoint = Run.checkpoint
    with monkeypatch.context() as patch:
        patch.setattr(Run, "checkpoint_due", lambda self: self.folder is not None)
        patch.setattr(Run, "checkpoint", killed)
        with pytest.raises(KeyboardInterrupt):
            fit(classes(), SGMCMC(1, 5, 1, 2), folder=tmp_path / "chains")
    with pytest.raises(ValueError, match="unfinished fit with other knobs of the method"):
        fit(classes(), SGMCMC(1, 5, 1, 2, temperature=0.5), folder=tmp_path / "chains")
    again = fit(classes(), SGMCMC(1, 5, 1, 2), folder=tmp_path / "chains")
    assert torch.equal(again.state["stats"]["lp"], fit(classes(), SGMCMC(1, 5, 1, 2)).state["stats"]["lp"])


def learns_noise() -> caveat.Task:
    x = inputs(23)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    return caveat.Task(module, (x, 3 * x[:, :2]), caveat.Gaussian(), caveat.GaussianPrior(2.0))


@pytest.mark.parametrize("task", [classes(), classes(caveat.StudentTPrior(0.7)), learns_noise()])
def test_lp_is_the_log_posterior_density_whatever_the_temperature(task: caveat.Task) -> None:
    posterior = fit(task, SGMCMC(2, 3, 2, 4, 0.05, temperature=0.2))
    network, (x, y) = task.network, task.train.everything()
    densities = []
    for draw in posterior.method.draws(posterior.state, network, 6, torch.Generator()):
        weights = {name: draw[name] for name in network.names}
        hyper, density = dict(task.hyper), network.prior.log_prob(weights)
        if "hyper/log_noise" in draw:
            hyper["log_noise"] = draw["hyper/log_noise"]
            density += (
                torch.distributions.Normal(y.std(0, correction=0).log() - 1, 1).log_prob(hyper["log_noise"]).sum()
            )
        densities.append(density + network.likelihood.log_prob(network(weights, x), y, hyper).sum())
    torch.testing.assert_close(posterior.state["stats"]["lp"].flatten(), torch.stack(densities))


def test_learned_noise_is_inferred_with_the_weights() -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(400, 1, generator=rng, dtype=torch.float64)
    y = 2 * x + 0.3 * torch.randn(400, 1, generator=rng, dtype=torch.float64)
    task = caveat.Task(nn.Linear(1, 1).double(), (x, y), caveat.Gaussian())
    state = fit(task, SGMCMC(2, 60)).state
    noise = state["params"]["hyper/log_noise"].exp()
    assert noise.shape == (2, 60, 1)
    assert float(noise.mean()) == pytest.approx(0.3, rel=0.1)
    assert 0.3 / math.sqrt(800) < float(noise.std()) < 3 * 0.3 / math.sqrt(800)


@dataclass(frozen=True)
class Threads(Ranks):
    """Ranks that are threads of this process."""

    meet: Barrier | None = None
    said: tuple[list[Tensor], ...] = ()

    def add(self, tensors: Iterable[Tensor]) -> None:
        assert self.meet is not None
        for tensor in tensors:
            self.said[self.rank].append(tensor.clone())
            self.meet.wait(20)
            total = torch.stack([slot[-1] for slot in self.said]).sum(0)
            self.meet.wait(20)
            tensor.copy_(total)

    def wait(self) -> None:
        assert self.meet is not None
        self.meet.wait(20)


@pytest.mark.parametrize("chains", [3, 2])
@pytest.mark.parametrize(("learning_rate", "batch_size"), [(0.05, 5), (None, 5), (None, 21)])
def test_two_ranks_share_rows_or_chains_and_find_the_same(
    chains: int, learning_rate: float | None, batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = SGMCMC(chains, 4, 1, 3, learning_rate, preconditioner="rmsprop", batch_size=batch_size)
    task = classes(rows=21)  # four batches of five rows, and one of a single row: one rank has none of it
    whole, _ = method.fit(task, {}, Run())
    meet, said, tasks = Barrier(2), ([], []), [classes(rows=21) for _ in range(2)]
    lock, draw = Lock(), FreshWeights.__call__

    def one_at_a_time(fresh_weights: FreshWeights, rng: torch.Generator) -> Params:
        with lock:  # of the global generator, which processes would each have for themselves
            return draw(fresh_weights, rng)

    monkeypatch.setattr(FreshWeights, "__call__", one_at_a_time)

    def one(rank: int) -> caveat.State:
        return method.fit(tasks[rank], {}, Run(ranks=Threads(rank, 2, meet, said)))[0]

    with ThreadPoolExecutor(2) as pool:
        parts = list(pool.map(one, range(2)))
    for part in parts:
        for group in ("params", "stats"):
            for name, value in whole[group].items():
                torch.testing.assert_close(part[group][name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("likelihood", ["regression", "classes"])
def test_a_learning_rate_that_diverges_is_an_error(likelihood: str) -> None:
    task = regressions(2) if likelihood == "regression" else classes(caveat.GaussianPrior(100.0))
    with pytest.raises(ValueError, match=r"ran away to infinity in epoch \d+: lower learning_rate \(now 100\)"):
        fit(task, SGMCMC(2, 400, 1, 400, 100.0))


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"burn_in": 0, "preconditioner": "rmsprop"}, "burn_in=0.* leaves no epochs"),
        ({"cycle": 4, "draws_a_cycle": 3, "thin": 2}, "3 draws, 2 epochs apart, from a cycle of 4 epochs: lengthen"),
        ({"draws_a_cycle": 2}, r"draws_a_cycle=2\).* cycle"),
        ({"momentum": 1.0}, "momentum=1.0"),
        ({"length": 0}, "length=0"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"learning_rate": -0.1}, "learning_rate=-0.1"),
        ({"preconditioner": "adam"}, "preconditioner='adam'"),
    ],
)
def test_knobs_that_cannot_be(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SGMCMC(**knobs)
