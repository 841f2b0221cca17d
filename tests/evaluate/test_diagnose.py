"""Verdicts on chains made by hand: good ones, and one for each thing that can go wrong."""

import dataclasses
import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import caveat
from caveat.cli import main
from caveat.data import load
from caveat.engine.diagnostics import convergence
from caveat.engine.draws import no_closed_form, push_draws
from caveat.evaluate.chains import Quantities, gather, predict_by_draw
from caveat.evaluate.diagnose import judge
from caveat.network import Network, Params
from caveat.priors import GaussianPrior
from caveat.recipe import Recipe
from caveat.storage import State

ROWS = 20


@dataclass(frozen=True)
class Sampler:
    """Stored draws, every one once, chain by chain."""

    chains: int = 4

    def draws(self, state: State, network: Network, n: int, rng: torch.Generator) -> Iterator[Params]:
        for s in range(n):
            yield {name: stack.flatten(0, 1)[s] for name, stack in state["params"].items()}

    outputs = push_draws
    closed_form = no_closed_form


def independent(chains: int, draws: int, *shape: int) -> Tensor:
    return torch.randn(chains, draws, *shape, generator=torch.Generator().manual_seed(math.prod(shape)))


def made(
    likelihood: caveat.Likelihood | None = None,
    *,
    chains: int = 4,
    draws: int = 400,
    change: Callable[[Params, Params], None] | None = None,
) -> tuple[caveat.Posterior, Tensor, Tensor]:
    """A linear network whose weights are independent draws, until `change(params, stats)` spoils them; its data."""
    likelihood = likelihood or caveat.Categorical()
    x = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(1))
    y = torch.arange(ROWS) % 3 if likelihood.kind == "classification" else x[:, :1] * 2
    n_outputs = 3 if likelihood.kind == "classification" else 1
    network = Network(nn.Linear(3, n_outputs), likelihood)
    params = {name: 0.3 * independent(chains, draws, *w.shape) for name, w in network.params().items()}
    if likelihood.kind == "regression":
        params["hyper/log_noise"] = 0.1 * independent(chains, draws, 1).double()
    stats = {
        "lp": independent(chains, draws, 7).sum(-1).double(),
        "energy": independent(chains, draws, 11).sum(-1).double(),
        "acceptance_rate": torch.full((chains, draws), 0.9, dtype=torch.float64),
        "step_size": torch.full((chains, draws), 0.01, dtype=torch.float64),
        "diverging": torch.zeros(chains, draws, dtype=torch.bool),
        "n_steps": torch.full((chains, draws), 34),
    }
    if change is not None:
        change(params, stats)
    info = caveat.fit(
        caveat.Task(network.module.requires_grad_(), (x, y), likelihood),
        caveat.MAP(training=caveat.Training(epochs=1)),
        progress=False,
    ).info
    state: State = {"params": params, "hyper": likelihood.initial_hyper(y), "stats": stats}
    return caveat.Posterior(Sampler(chains), state, network, info), x, y


def test_independent_draws_are_trusted() -> None:
    posterior, x, y = made()
    found = caveat.diagnose(posterior, (x, y))
    assert found.verdict == "trust", found.reasons
    assert (found.chains, found.draws, found.rows) == (4, 400, ROWS)
    assert found.predictions.quantities == ROWS * 3 + ROWS
    assert found.predictions.rhat_max is not None
    assert found.predictions.null is not None
    assert found.predictions.rhat_max < found.predictions.null.limit
    assert found.weights.quantities == 12
    assert found.acceptance_rate == pytest.approx([0.9] * 4)
    assert found.divergences == [0, 0, 0, 0]
    assert any("agree on predictions" in reason for reason in found.reasons)
    assert found.verdict == caveat.diagnose(posterior, (x, y), rows=5).verdict


def test_the_numbers_are_those_of_the_predictions() -> None:
    posterior, x, y = made()
    found = caveat.diagnose(posterior, (x, y))
    outputs = torch.stack([posterior.network(params, x) for params in posterior.sample(1600)])
    log_probs = outputs.log_softmax(-1)
    quantities = torch.cat([log_probs.exp().flatten(1), log_probs[:, range(ROWS), y]], 1).reshape(4, 400, -1)
    expected = convergence(quantities)
    assert found.predictions.rhat_max == pytest.approx(float(expected.rhat.max()), abs=1e-5)
    assert found.predictions.ess_tail_min == pytest.approx(float(expected.ess_tail.min()), rel=1e-2)
    assert found.log_density.rhat_max == pytest.approx(float(convergence(posterior.state["stats"]["lp"]).rhat))


def apart(params: Params, stats: Params) -> None:
    params["bias"][0, :, 0] += 1


def a_little_apart(params: Params, stats: Params) -> None:
    params["bias"][0, :, 0] += 0.15


def at_different_heights(params: Params, stats: Params) -> None:
    stats["lp"][0] += 3


def repeated(params: Params, stats: Params) -> None:
    for name, stack in params.items():
        params[name] = stack.repeat_interleave(5, 1)[:, : stack.shape[1]]


def diverging_once(params: Params, stats: Params) -> None:
    stats["diverging"][2, 7] = True


def diverging_often(params: Params, stats: Params) -> None:
    stats["diverging"][:, :40] = True


def creeping(params: Params, stats: Params) -> None:
    stats["energy"] = stats["energy"].cumsum(1)


def rejecting(params: Params, stats: Params) -> None:
    stats["acceptance_rate"][1] = 0.2


def not_finite(params: Params, stats: Params) -> None:
    params["weight"][0, 3, 0, 0] = math.nan


def frozen(params: Params, stats: Params) -> None:
    for name, stack in params.items():
        params[name] = stack[:1, :1].expand_as(stack).clone()


@pytest.mark.parametrize(
    ("change", "verdict", "reason"),
    [
        (apart, "do not trust", "the chains disagree about predictions: the largest R-hat of 80 predictions is"),
        (a_little_apart, "caution", "the chains have not quite mixed"),
        (at_different_heights, "caution", "at different heights of the posterior"),
        (repeated, "caution", "400 are needed (100 a chain)"),
        (diverging_once, "caution", "1 of 1,600 draws diverged (0.1%)"),
        (diverging_often, "do not trust", "160 of 1,600 draws diverged (10.0%)"),
        (creeping, "caution", "E-BFMI is 0.0"),
        (rejecting, "caution", "a chain accepts 20% of its proposals"),
        (not_finite, "do not trust", "predictions are NaN or infinite"),
        (frozen, "do not trust", "the chains do not move"),
    ],
)
def test_what_is_wrong_is_said(change: Callable[[Params, Params], None], verdict: str, reason: str) -> None:
    posterior, x, y = made(change=change)
    found = caveat.diagnose(posterior, (x, y))
    assert found.verdict == verdict, found.reasons
    assert any(reason in told for told in found.reasons), found.reasons
    assert not any("agree on predictions" in told for told in found.reasons), "good news is not told with bad"


def test_many_large_r_hats_count_where_none_is_too_large() -> None:
    """Of 150 draws a chain the largest R-hat of 50 may well be 1.025; that most are above 1.01 is no chance."""
    posterior, x, y = made(draws=150)
    evidence = gather(posterior, (x, y))
    shift = 0.1 * torch.tensor([1.0, -1.0, 1.0, -1.0])[:, None, None]
    shifted = Quantities.of([str(i) for i in range(50)], independent(4, 150, 50) + shift)
    found = judge(dataclasses.replace(evidence, predictions=shifted))
    assert found.verdict == "caution"
    assert not any("not quite mixed" in reason for reason in found.reasons), found.reasons
    assert any("of the predictions have an R-hat above 1.01, of independent draws 3.0%" in r for r in found.reasons)


def test_weights_in_different_modes_are_no_fault() -> None:
    """Turning the signs of a hidden unit leaves the function as it is."""
    network = Network(nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 2)), caveat.Categorical())
    posterior, _, _ = made()
    params = {name: 1 + 0.1 * independent(4, 400, *w.shape) for name, w in network.params().items()}
    for name in ("0.weight", "0.bias", "2.weight"):
        params[name][:2] *= -1
    turned = dataclasses.replace(posterior, network=network, state=posterior.state | {"params": params, "hyper": {}})
    found = caveat.diagnose(turned, (torch.linspace(-2, 2, 30)[:, None], torch.arange(30) % 2))
    assert found.weights.rhat_max is not None
    assert found.weights.rhat_max > 1.5
    assert found.verdict == "trust", found.reasons


def test_one_chain_is_not_enough_for_trust() -> None:
    posterior, x, y = made(chains=1)
    found = caveat.diagnose(posterior, (x, y))
    assert found.verdict == "caution"
    assert "one chain" in found.reasons[0]
    assert found.predictions.rhat_max is None
    assert found.predictions.ess_bulk_min is not None
    assert "1 x 400 draws" in str(found)


def test_regression_with_a_noise_of_its_own_in_each_draw() -> None:
    posterior, x, y = made(caveat.Gaussian(standardise=True))
    by_draw = predict_by_draw(posterior, (x, y))
    assert by_draw.samples.shape == (4, 400, ROWS, 1)
    params = {name: stack[2, 5] for name, stack in posterior.state["params"].items()}
    own = caveat.Gaussian(standardise=True)
    hyper = posterior.state["hyper"] | {"log_noise": params["hyper/log_noise"]}
    expected = own.log_prob(posterior.network(params, x), y, hyper)
    torch.testing.assert_close(by_draw.log_prob[2, 5], expected)
    names = gather(posterior, (x, y)).predictions.names
    assert names[0] == "row 0: mean 0"
    assert names[ROWS] == "row 0: log density"
    assert names[-1] == "log_noise 0"
    assert caveat.diagnose(posterior, (x, y)).verdict == "trust"


def test_a_sampler_that_records_little() -> None:
    posterior, x, y = made()
    stats = {name: posterior.state["stats"][name] for name in ("lp", "step_size")}
    found = caveat.diagnose(dataclasses.replace(posterior, state=posterior.state | {"stats": stats}), (x, y))
    assert (found.acceptance_rate, found.divergences, found.e_bfmi) == (None, None, None)
    assert found.verdict == "caution"
    assert [reason[:31] for reason in found.reasons] == ["the method has no accept step: "]
    assert "each chain" not in str(found)


def test_a_diagnosis_is_plain_json_and_reads_well() -> None:
    posterior, x, y = made(change=apart)
    found = caveat.diagnose(posterior, (x, y), weights=5)
    content = json.loads(json.dumps(dataclasses.asdict(found)))
    assert content["predictions"]["worst"] == found.predictions.worst
    assert content["weights"]["quantities"] == 5
    lines = str(found).splitlines()
    assert lines[0] == "Verdict: do not trust (Sampler, 4 x 400 draws, 20 rows)"
    assert lines[1].startswith("  - the chains disagree about predictions")
    table = next(line for line in lines if line.startswith("predictions"))
    assert f"{found.predictions.rhat_max:.3f}" in table
    assert lines[-1].startswith("each chain: acceptance 0.9 0.9 0.9 0.9; divergences 0 0 0 0; E-BFMI")


def test_a_method_without_chains_is_refused() -> None:
    _, x, y = made()
    task = caveat.Task(nn.Linear(3, 3), (x, y), caveat.Categorical())
    point = caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=1)), progress=False)
    for use in (caveat.diagnose, caveat.to_arviz, caveat.posterior_surface):
        with pytest.raises(TypeError, match=r"MAP runs no chains.*caveat.HMC"):
            use(point, (x, y))


def test_bad_arguments_are_refused() -> None:
    posterior, x, y = made(draws=3)
    with pytest.raises(ValueError, match="3 draws each, and diagnostics need at least 4"):
        caveat.diagnose(posterior, (x, y))
    posterior, x, y = made(draws=8)
    with pytest.raises(ValueError, match="rows=0"):
        caveat.diagnose(posterior, (x, y), rows=0)
    with pytest.raises(ValueError, match="Categorical needs integer class labels"):
        caveat.diagnose(posterior, (x, x))
    with pytest.raises(ValueError, match=r"matches none of the posterior's weights: \['weight', 'bias'\]"):
        caveat.to_arviz(posterior, parameters="conv*")


def test_arviz_reads_what_is_exported(tmp_path: Path) -> None:
    arviz = pytest.importorskip("arviz_stats")
    xarray = pytest.importorskip("xarray")
    posterior, x, y = made(caveat.Gaussian(), draws=50)
    tree = caveat.to_arviz(posterior, (x, y), rows=10)
    tree.to_netcdf(tmp_path / "chains.nc")
    with xarray.open_datatree(tmp_path / "chains.nc") as read:
        read.load()
    assert set(read.children) == {
        "posterior",
        "sample_stats",
        "log_likelihood",
        "posterior_predictive",
        "observed_data",
    }
    assert set(read.posterior.data_vars) == {"weight", "bias", "log_noise"}
    assert read.posterior.weight.dims[:2] == ("chain", "draw")
    assert read.posterior.attrs["inference_library"] == "caveat"
    assert read.sample_stats.diverging.dtype == bool
    assert set(read.sample_stats.data_vars) == set(posterior.state["stats"])
    assert read.log_likelihood.y.shape == (4, 50, 10)
    assert read.posterior_predictive["mean"].shape == (4, 50, 10, 1)
    assert list(read.observed_data.row) == [*range(0, 18, 2), 19]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rhat, tail = arviz.rhat(read), arviz.ess(read, method="tail", prob=(0.05, 0.95))
        energies = arviz.bfmi(read)
    ours = convergence(posterior.state["params"]["weight"])
    torch.testing.assert_close(torch.from_numpy(rhat.weight.values), ours.rhat, rtol=1e-5, atol=0)
    torch.testing.assert_close(torch.from_numpy(tail.weight.values), ours.ess_tail, rtol=1e-4, atol=0)
    assert energies.energy.values == pytest.approx(caveat.diagnose(posterior, (x, y)).e_bfmi)


def test_an_export_without_data_has_what_the_sampler_left() -> None:
    pytest.importorskip("arviz_base")
    posterior, _, _ = made(draws=8)
    tree = caveat.to_arviz(posterior, parameters="b*")
    assert set(tree.children) == {"posterior", "sample_stats"}
    assert set(tree.posterior.data_vars) == {"bias"}


def test_an_export_without_arviz_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    posterior, _, _ = made(draws=8)
    monkeypatch.setitem(sys.modules, "arviz_base", None)
    with pytest.raises(ImportError, match=r'pip install "caveat\[mcmc\]"'):
        caveat.to_arviz(posterior)


def test_the_surface_goes_through_its_draws() -> None:
    posterior, x, y = made(caveat.Gaussian(standardise=True))
    chosen = [(0, 3), (2, 17), (3, 9)]
    surface = caveat.posterior_surface(posterior, (x, y), draws=chosen, points=3, scale=2.0)
    assert surface.draws == tuple(chosen)
    assert surface.log_density.shape == (3, 3)
    weights = [{name: stack[c, d] for name, stack in posterior.state["params"].items()} for c, d in chosen]
    flat = [torch.cat([w.flatten().double() for w in each.values()]) for each in weights]
    for i, j in ((0, 1), (0, 2), (1, 2)):  # distances in the plane are those of the weights
        torch.testing.assert_close((surface.places[i] - surface.places[j]).norm(), (flat[i] - flat[j]).norm())
    # The log density at a corner of the grid, from the weights there.
    u = (flat[1] - flat[0]) / (flat[1] - flat[0]).norm()
    v = flat[2] - flat[0]
    v = (v - (v @ u) * u) / (v - (v @ u) * u).norm()
    there = flat[0] + surface.along[0] * u + surface.across[2] * v
    own = {"weight": there[:3].reshape(1, 3).float(), "bias": there[3:4].float()}
    hyper = posterior.state["hyper"] | {"log_noise": there[4:]}
    likelihood = posterior.network.likelihood.log_prob(posterior.network(own, x), y, hyper).double().sum()
    expected = 2 * likelihood + posterior.network.prior.log_prob(own)
    torch.testing.assert_close(surface.log_density[2, 0], expected, rtol=1e-5, atol=1e-4)


def test_some_rows_stand_for_all() -> None:
    posterior, x, y = made(draws=10)
    some = caveat.posterior_surface(posterior, (x, y), points=2, rows=5)
    chosen = [0, 4, 9, 14, 19]
    by_hand = caveat.posterior_surface(posterior, (x[chosen], y[chosen]), points=2, scale=4.0)
    torch.testing.assert_close(some.log_density, by_hand.log_density)


def test_the_surface_chooses_draws_of_different_chains() -> None:
    posterior, x, y = made(draws=10)
    assert caveat.posterior_surface(posterior, (x, y), points=2).draws == ((0, 9), (1, 9), (2, 9))
    posterior, x, y = made(chains=1, draws=10)
    assert caveat.posterior_surface(posterior, (x, y), points=2).draws == ((0, 0), (0, 4), (0, 9))


@pytest.mark.parametrize("draws", [[(0, 0), (0, 1)], [(0, 0), (0, 1), (4, 0)], [(0, 0), (0, 1), (0, 10)]])
def test_draws_that_are_not_there_are_refused(draws: list[tuple[int, int]]) -> None:
    posterior, x, y = made(draws=10)
    with pytest.raises(ValueError, match=r"three pairs \(chain, draw\) of 4 chains of 10 draws"):
        caveat.posterior_surface(posterior, (x, y), draws=draws)


def test_equal_draws_span_no_plane() -> None:
    posterior, x, y = made(draws=10, change=repeated)
    with pytest.raises(ValueError, match="lie on one line"):
        caveat.posterior_surface(posterior, (x, y), draws=[(0, 0), (0, 1), (1, 0)])
    with pytest.raises(ValueError, match="lie on one line"):
        caveat.posterior_surface(posterior, (x, y), draws=[(0, 0), (1, 0), (1, 1)])
    with pytest.raises(ValueError, match="points=1"):
        caveat.posterior_surface(posterior, (x, y), points=1)


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 2))
    np.savez(tmp_path / "mine.npz", x_train=x[:40], y_train=x[:40, 0], x_test=x[40:], y_test=x[40:, 0])
    rows = load(str(tmp_path / "mine.npz"))
    recipe = Recipe.of(rows, str(tmp_path / "mine.npz"), "mlp", "auto")
    task = recipe.task(rows, seed=0, prior=GaussianPrior(1.0), parameters="*", validation=0.1)
    sampler = caveat.HMC(chains=2, length=10, warmup=0, step_size=0.02, trajectory=0.2)
    posterior = caveat.fit(task, sampler, progress=False)
    posterior.save(tmp_path / "hmc", note={"recipe": dataclasses.asdict(recipe)})
    where = ["--posterior", str(tmp_path / "hmc"), "--out", str(tmp_path / "page.html")]
    assert main(["diagnose", *where, "--surface", "3"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Verdict: ")
    assert "(HMC, 2 x 10 draws, 20 rows)" in printed
    page = (tmp_path / "page.html").read_text()
    assert "<title>Chains of hmc</title>" in page
    assert '<section id="surface"' in page
    assert main(["diagnose", *where, "--surface", "0", "--rows", "7", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["rows"] == 7
    assert content["page"] == str(tmp_path / "page.html")
    assert '<section id="surface"' not in (tmp_path / "page.html").read_text()
    point = caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=1)), progress=False)
    point.save(tmp_path / "point", note={"recipe": dataclasses.asdict(recipe)})
    assert main(["diagnose", "--posterior", str(tmp_path / "point")]) == 1
    assert "error: MAP runs no chains" in capsys.readouterr().err


def test_a_quantity_that_moves_in_the_middle_draw_alone_hides_nothing() -> None:
    draws = torch.randn(4, 401, 3, generator=torch.Generator().manual_seed(0))
    draws[0] += 3
    draws[..., 0] = 0
    draws[0, 200, 0] = 1  # in neither half of an odd number of draws
    mixing = Quantities.of(["a", "b", "c"], draws).mixing()
    assert mixing.constant == 1
    assert mixing.rhat_max is not None
    assert mixing.rhat_max > 1.4
