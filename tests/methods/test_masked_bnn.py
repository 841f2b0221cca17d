"""MaskedBNN: what it draws are narrower networks, stored and run as such. Masks: see `test_masks.py`."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import caveat
from caveat import MaskedBNN
from caveat.engine.sparse_chains.masks import log_mask_prior


def images(n: int = 120) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(n, 1, 6, 6, generator=rng)
    return x, (x[:, 0, :3].sum((1, 2)) > 0).long() + (x[:, 0, 3:].sum((1, 2)) > 0).long()


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 12), nn.ReLU(), nn.Linear(12, 3)
    )


def task() -> caveat.Task:
    return caveat.Task(build(), images(), caveat.Categorical(), caveat.StudentTPrior(0.5, 1.0))


@pytest.fixture(scope="module")
def posterior() -> caveat.Posterior:
    method = MaskedBNN(sparsity=0.15, interval=1, burn_in=12, length=4, thin=1, batch_size=30, learning_rate=0.05)
    return caveat.fit(task(), method, progress=False)


def test_draws_are_narrower_networks_that_are_stored_as_such(posterior: caveat.Posterior, tmp_path: Path) -> None:
    state, diagnostics = posterior.state, posterior.info.diagnostics
    rows, weights = [], 6 * 9 + 96 * 12 + 12 * 3
    for i, draw in enumerate(posterior.sample(4)):
        channels, units = (len(state["slices"][f"{i}/{name}.weight/0"]) for name in ("0", "4"))
        assert state["rest"][f"{i}/0.weight"].shape == (channels, 1, 3, 3)
        assert state["rest"][f"{i}/4.weight"].shape == (units, 16 * channels)
        assert state["rest"][f"{i}/6.weight"].shape == (3, units)
        assert state["rest"][f"{i}/1.running_var"].shape == (channels,)
        assert draw["4.weight"].shape == (12, 96)
        assert int(draw["4.weight"].any(0).sum()) == 16 * channels
        assert int(draw["6.weight"].any(0).sum()) == units
        rows.append((9 * channels + 16 * channels * units + 3 * units) / weights)
    assert max(rows) < 0.8, "nodes have died"
    assert diagnostics["density"] == pytest.approx(sum(rows) / 4, abs=1e-3)
    assert 0 < diagnostics["accepted"] < 1
    assert diagnostics["nodes"]["6"] == "3 of 3 nodes"
    assert {e["layer"]: e["treatment"] for e in posterior.info.coverage}["4"].startswith("4 draws by SG-MCMC, ")
    x, _ = images(20)
    posterior.save(tmp_path / "posterior")
    assert torch.equal(caveat.load(tmp_path / "posterior", build()).predict(x).probs, posterior.predict(x).probs)


def test_narrow_passes_are_those_of_whole_weights_and_of_deployed_modules(posterior: caveat.Posterior) -> None:
    x, _ = images(20)
    samples = posterior.predict(x).samples
    for i, draw in enumerate(posterior.sample(4)):
        logits = posterior.network(draw, x)
        torch.testing.assert_close(samples[i], logits.softmax(-1), rtol=1e-4, atol=1e-5)
    module = caveat.deploy(posterior)
    torch.testing.assert_close(module(x), logits, rtol=1e-4, atol=1e-4)
    assert sum(p.numel() for p in module.parameters()) < sum(p.numel() for p in build().parameters())


def test_flops_fall_as_nodes_die(posterior: caveat.Posterior) -> None:
    info = posterior.info
    dense = info.diagnostics["account"]["dense"]["training_flops"]
    nodes = [record["nodes"] for record in info.diagnostics["history"]]
    assert nodes[-1] < nodes[0] <= 18
    assert info.flops < 120 * 16 * dense * 3, "a move takes two passes beside each step's own"
    assert info.gradient_evaluations == 16


def test_without_information_in_the_rows_masks_follow_their_prior() -> None:
    x = torch.randn(20, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    module = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    noisy = caveat.Task(module, (x, x[:, :1]), caveat.Gaussian(noise=1e6))
    method = MaskedBNN(sparsity=0.25, interval=1, burn_in=0, length=1, thin=600, batch_size=20, learning_rate=0.01)
    history = caveat.fit(noisy, method, progress=False).info.diagnostics["history"]
    c = (0.25 * math.log(20)) ** 5
    masks = [torch.arange(4) < on for on in range(1, 5)]
    weights = [
        math.comb(4, on) * math.exp(log_mask_prior(m, (4,), c)) for on, m in zip(range(1, 5), masks, strict=True)
    ]
    for on, weight in zip(range(1, 5), weights, strict=True):
        found = sum(record["nodes"] == on for record in history) / len(history)
        assert found == pytest.approx(weight / sum(weights), abs=0.12)


def test_a_line_is_learned_and_its_noise() -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(150, 1, generator=rng)
    y = 2 * x + 0.3 * torch.randn(150, 1, generator=rng)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(1, 20), nn.ReLU(), nn.Linear(20, 1))
    line = caveat.Task(module, (x, y), caveat.Gaussian(standardise=True))
    posterior = caveat.fit(line, MaskedBNN(burn_in=400, length=10), progress=False)
    predicted = posterior.predict(x)
    assert float((predicted.mean - y).square().mean().sqrt()) < 0.4
    assert 0.25 < float(predicted.variance.sqrt().mean()) < 0.45
    assert not any("worse than the marginal" in warning for warning in posterior.info.warnings)
    # At the rate that was the default once, the chain hides in its own noise, and says so.
    wild = caveat.fit(line, MaskedBNN(burn_in=60, length=10, thin=2, learning_rate=0.1), progress=False)
    assert any("worse than the marginal" in warning for warning in wild.info.warnings)


def test_bad_input_is_refused_or_said() -> None:
    x, y = images()
    alone = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    with pytest.raises(ValueError, match="fewer than two of them: use SGMCMC"):
        caveat.fit(caveat.Task(alone, (x, y), caveat.Categorical()), MaskedBNN(), progress=False)
    for knobs, message in (({"sparsity": -1}, "sparsity=-1"), ({"most": 9}, "most=9"), ({"interval": 0}, "interval=0")):
        with pytest.raises(ValueError, match=message):
            MaskedBNN(**knobs)
    soft = nn.Sequential(nn.Flatten(), nn.Linear(36, 4), nn.Softmax(1), nn.Linear(4, 3))  # mixes all nodes
    posterior = caveat.fit(
        caveat.Task(soft, (x, y), caveat.Categorical()), MaskedBNN(burn_in=1, length=1), progress=False
    )
    assert any("no node is masked, so that all are in every draw" in warning for warning in posterior.info.warnings)
    assert posterior.info.diagnostics["density"] == 1
    with pytest.raises(ValueError, match="ran away to infinity in epoch"):
        caveat.fit(task(), MaskedBNN(learning_rate=1e8, burn_in=20), progress=False)
