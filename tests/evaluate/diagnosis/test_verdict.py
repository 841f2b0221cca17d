"""Verdicts on chains made by hand: good ones, and one for each thing that can go wrong."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import caveat
from caveat.cli import main
from caveat.data import load
from caveat.evaluate.diagnosis import Quantities, gather_evidence, judge
from caveat.network import Network, Params
from caveat.priors import GaussianPrior
from caveat.recipe import Recipe

ROWS = 20
Chains = Callable[..., tuple[caveat.Posterior, Tensor, Tensor]]


def independent(chains: int, draws: int, *shape: int) -> Tensor:
    return torch.randn(chains, draws, *shape, generator=torch.Generator().manual_seed(math.prod(shape)))


def test_independent_draws_are_trusted(chains_by_hand: Chains) -> None:
    posterior, x, y = chains_by_hand()
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
def test_what_is_wrong_is_said(
    change: Callable[[Params, Params], None], verdict: str, reason: str, chains_by_hand: Chains
) -> None:
    posterior, x, y = chains_by_hand(change=change)
    found = caveat.diagnose(posterior, (x, y))
    assert found.verdict == verdict, found.reasons
    assert any(reason in told for told in found.reasons), found.reasons
    assert not any("agree on predictions" in told for told in found.reasons), "good news is not told with bad"


def test_many_large_r_hats_count_where_none_is_too_large(chains_by_hand: Chains) -> None:
    """Of 150 draws a chain the largest R-hat of 50 may well be 1.025; that most are above 1.01 is no chance."""
    posterior, x, y = chains_by_hand(draws=150)
    evidence = gather_evidence(posterior, (x, y))
    shift = 0.1 * torch.tensor([1.0, -1.0, 1.0, -1.0])[:, None, None]
    shifted = Quantities.of([str(i) for i in range(50)], independent(4, 150, 50) + shift)
    found = judge(dataclasses.replace(evidence, predictions=shifted))
    assert found.verdict == "caution"
    assert not any("not quite mixed" in reason for reason in found.reasons), found.reasons
    assert any("of the predictions have an R-hat above 1.01, of independent draws 3.0%" in r for r in found.reasons)


def test_weights_in_different_modes_are_no_fault(chains_by_hand: Chains) -> None:
    """Turning the signs of a hidden unit leaves the function as it is."""
    network = Network(nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 2)), caveat.Categorical())
    posterior, _, _ = chains_by_hand()
    params = {name: 1 + 0.1 * independent(4, 400, *w.shape) for name, w in network.params().items()}
    for name in ("0.weight", "0.bias", "2.weight"):
        params[name][:2] *= -1
    turned = dataclasses.replace(posterior, network=network, state=posterior.state | {"params": params, "hyper": {}})
    found = caveat.diagnose(turned, (torch.linspace(-2, 2, 30)[:, None], torch.arange(30) % 2))
    assert found.weights.rhat_max is not None
    assert found.weights.rhat_max > 1.5
    assert found.verdict == "trust", found.reasons


def test_one_chain_is_not_enough_for_trust(chains_by_hand: Chains) -> None:
    posterior, x, y = chains_by_hand(chains=1)
    found = caveat.diagnose(posterior, (x, y))
    assert found.verdict == "caution"
    assert "one chain" in found.reasons[0]
    assert found.predictions.rhat_max is None
    assert found.predictions.ess_bulk_min is not None
    assert "1 x 400 draws" in str(found)


def test_a_sampler_that_records_little(chains_by_hand: Chains) -> None:
    posterior, x, y = chains_by_hand()
    stats = {name: posterior.state["stats"][name] for name in ("lp", "step_size")}
    found = caveat.diagnose(dataclasses.replace(posterior, state=posterior.state | {"stats": stats}), (x, y))
    assert (found.acceptance_rate, found.divergences, found.e_bfmi) == (None, None, None)
    assert found.verdict == "caution"
    assert [reason[:31] for reason in found.reasons] == ["the method has no accept step: "]
    assert "each chain" not in str(found)


def test_a_diagnosis_is_plain_json_and_reads_well(chains_by_hand: Chains) -> None:
    posterior, x, y = chains_by_hand(change=apart)
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


def test_a_method_without_chains_is_refused(chains_by_hand: Chains) -> None:
    _, x, y = chains_by_hand()
    task = caveat.Task(nn.Linear(3, 3), (x, y), caveat.Categorical())
    point = caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=1)), progress=False)
    for use in (caveat.diagnose, caveat.to_arviz, caveat.posterior_surface):
        with pytest.raises(TypeError, match=r"MAP runs no chains.*caveat.HMC"):
            use(point, (x, y))


def test_bad_arguments_are_refused(chains_by_hand: Chains) -> None:
    posterior, x, y = chains_by_hand(draws=3)
    with pytest.raises(ValueError, match="3 draws each, and diagnostics need at least 4"):
        caveat.diagnose(posterior, (x, y))
    posterior, x, y = chains_by_hand(draws=8)
    with pytest.raises(ValueError, match="rows=0"):
        caveat.diagnose(posterior, (x, y), rows=0)
    with pytest.raises(ValueError, match="Categorical needs integer class labels"):
        caveat.diagnose(posterior, (x, x))
    with pytest.raises(ValueError, match=r"matches none of the posterior's weights: \['weight', 'bias'\]"):
        caveat.to_arviz(posterior, parameters="conv*")


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
