"""Samples are made in groups, kept as they are made and read a few at a time: memory, files, killed fits."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import caveat
from caveat import SampledLaplace, Training
from caveat.engine.linear_model import ConjugateGradients, Exact, Tuning, conjugate_gradients, exact
from caveat.engine.linearised.jacobian_features import NetworkBlock
from tests.methods.sampled_reference import EXACT, LIKELIHOODS, Held, deviations, fitted, rows, trained


def test_groups_of_any_size_give_the_same_samples() -> None:
    one = fitted("Categorical", SampledLaplace(samples=7, at_once=7, precision=1.0, solver=EXACT))
    several = fitted("Categorical", SampledLaplace(samples=7, at_once=3, precision=1.0, solver=EXACT))
    assert list(several.state["samples"]) == ["0", "3", "6"]
    torch.testing.assert_close(deviations(one), deviations(several), rtol=1e-6, atol=1e-9)


def test_memory_does_not_grow_with_rows_by_their_jacobians_or_noise() -> None:
    K, few, many = 32, 40, 120
    method = SampledLaplace(
        samples=K,
        at_once=K,
        block_rows=20,
        tuning=Tuning(steps=1),
        solver=ConjugateGradients(rank=8, iterations=2),
    )
    found = []
    for n in (few, many):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        task = caveat.Task(module, rows("Categorical", n), LIKELIHOODS["Categorical"])
        start = caveat.fit(task, caveat.MAP(training=Training(epochs=10, batch_size=20)), progress=False)
        with Held() as held:
            caveat.fit(task, method, start=start, progress=False)
        found.append(held.most)
    a_row = (found[1] - found[0]) / (many - few)
    outputs_and_target = 8 * 3 + 8
    assert a_row < 2 * outputs_and_target < 8 * min(task.network.n_parameters, 3 * K) / 4


def test_samples_stay_on_disk_and_are_read_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caveat.storage._MAPPED_ABOVE", 0)
    method = SampledLaplace(samples=10, at_once=4, precision=1.0)
    posterior = fitted("Categorical", method, folder=tmp_path / "posterior")
    loaded = caveat.load(tmp_path / "posterior", nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double())
    x, _ = rows("Categorical", 5, seed=3)
    seen: list[int] = []
    forward = NetworkBlock.forward
    monkeypatch.setattr(NetworkBlock, "forward", lambda self, z: (seen.append(len(z)), forward(self, z))[1])
    assert torch.equal(loaded.predict(x).samples, posterior.predict(x).samples)
    assert max(seen) <= 4
    elsewhere = loaded.to("meta")
    assert elsewhere.state["params"]["0.weight"].is_meta
    assert not elsewhere.state["samples"]["0"].is_meta


@pytest.mark.parametrize(
    ("solver", "prepared", "preparation"),
    [
        (ConjugateGradients(), conjugate_gradients.PreparedGradients, (conjugate_gradients, "sketch")),
        (Exact(), exact.PreparedExact, (exact, "_gram")),
    ],
)
def test_a_killed_fit_goes_on_from_its_last_group(
    solver: Any, prepared: Any, preparation: tuple[Any, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = SampledLaplace(samples=9, at_once=3, tuning=Tuning(samples=2), solver=solver)
    whole = fitted("Categorical", method)
    solve, solved = prepared.solve, []
    sketches: list[int] = []
    sketch = getattr(*preparation)
    monkeypatch.setattr(*preparation, lambda *a: (sketches.append(1), sketch(*a))[1])

    def killed(self: Any, model: Any, system: Any, start: Any = None) -> Any:
        solved.append(len(system.right))
        if solved.count(3) == 3 and len(solved) < 1000:
            solved.extend([0] * 1000)  # once only
            raise KeyboardInterrupt
        return solve(self, model, system, start)

    monkeypatch.setattr(prepared, "solve", killed)
    with pytest.raises(KeyboardInterrupt):
        fitted("Categorical", method, folder=tmp_path / "posterior")
    solved_before = len(solved)
    resumed = fitted("Categorical", method, folder=tmp_path / "posterior")
    assert solved[solved_before:] == [3]  # neither the precision nor the first two groups again
    assert len(sketches) == 1
    assert torch.equal(deviations(resumed), deviations(whole))
    assert resumed.info.diagnostics == whole.info.diagnostics
    assert resumed.info.gradient_evaluations == whole.info.gradient_evaluations


def test_a_fit_killed_while_it_looks_for_the_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With learned noise, whose mean and samples are parts of one tensor."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    task = caveat.Task(module, rows("Gaussian"), caveat.Gaussian())
    start = caveat.fit(task, caveat.MAP(training=Training(epochs=100, learning_rate=0.02)), progress=False)
    method = SampledLaplace(samples=3, precision="layers", tuning=Tuning(samples=8, tolerance=1e-3))
    whole = caveat.fit(task, method, start=start, progress=False)
    monkeypatch.setattr("caveat.engine.run.Run.checkpoint_due", lambda run: run.folder is not None)
    solve, solved = conjugate_gradients.PreparedGradients.solve, []

    def killed(*args: Any) -> Any:
        solved.append(1)
        if len(solved) == 4:
            raise KeyboardInterrupt
        return solve(*args)

    monkeypatch.setattr(conjugate_gradients.PreparedGradients, "solve", killed)
    with pytest.raises(KeyboardInterrupt):
        caveat.fit(task, method, start=start, folder=tmp_path / "posterior", progress=False)
    resumed = caveat.fit(task, method, start=start, folder=tmp_path / "posterior", progress=False)
    assert len(solved) == 4 + len(whole.info.diagnostics["history"]) - 3 + 1  # the rest of the updates, the samples
    assert torch.equal(deviations(resumed), deviations(whole))
    assert torch.equal(resumed.state["hyper"]["log_noise"], whole.state["hyper"]["log_noise"])
    assert resumed.info.diagnostics == whole.info.diagnostics


def test_the_time_of_a_kept_fit_is_the_clocks(tmp_path: Path) -> None:
    task, start = trained("Categorical")
    clock = time.monotonic()
    method = SampledLaplace(samples=16, at_once=2)
    posterior = caveat.fit(task, method, start=start, folder=tmp_path / "kept", progress=False)
    assert 0 < posterior.info.seconds <= time.monotonic() - clock
