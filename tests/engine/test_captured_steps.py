"""Recorded steps, on a CPU by recordings that behave as CUDA graphs do: the same chains and networks, killed or not."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import caveat
from caveat import Training, native
from caveat.engine import captured_steps
from caveat.engine.run import Run
from tests.recorded_steps import CHAINS, SPARSE_CHAINS, Waits, X, Y, network, record_on_the_cpu, rotated, task


def fitted(method: caveat.Method, problem: caveat.Task | None = None, **more: Any) -> caveat.Posterior:
    return caveat.fit(problem or task(), method, progress=False, **more)


def assert_same(a: caveat.Posterior, b: caveat.Posterior) -> None:
    for group in ("params", "stats"):
        for name, value in a.state[group].items():
            assert torch.equal(b.state[group][name], value), name


@pytest.mark.parametrize("growth", [1.0, 4.0], ids=["side by side", "one by one"])
@pytest.mark.parametrize("which", CHAINS)
def test_recorded_chains_are_the_chains(which: str, growth: float, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = task(augment=rotated) if which == "augmented" else task()
    plain = fitted(CHAINS[which], problem)
    lanes = record_on_the_cpu(monkeypatch, growth)
    recorded = fitted(CHAINS[which], problem)
    assert_same(plain, recorded)
    assert recorded.info.diagnostics["chains_at_a_time"] in lanes
    assert set(lanes) == {CHAINS[which].chains if growth == 1 else 1}


@pytest.mark.parametrize("which", CHAINS)
def test_a_killed_recorded_chain_is_the_same_bit_for_bit(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = task(augment=rotated) if which == "augmented" else task()
    record_on_the_cpu(monkeypatch)
    whole = fitted(CHAINS[which], problem)
    checkpoint = Run.checkpoint

    def killed(self: Run, *given: Any) -> None:
        checkpoint(self, *given)
        raise KeyboardInterrupt

    monkeypatch.setattr(Run, "checkpoint_due", lambda self: self.folder is not None)
    monkeypatch.setattr(Run, "checkpoint", killed)
    for _ in range(CHAINS[which].plan(200, 128).epochs):
        with pytest.raises(KeyboardInterrupt):
            fitted(CHAINS[which], problem, folder=tmp_path / "p")
    monkeypatch.setattr(Run, "checkpoint", checkpoint)
    assert_same(whole, fitted(CHAINS[which], problem, folder=tmp_path / "p"))


def test_nothing_is_freed_while_a_step_is_recorded() -> None:
    freed: list[str] = []

    def waits_to_be_freed(name: str) -> None:
        class Graph:
            def __del__(self) -> None:
                freed.append(name)

        graph: Any = Graph()
        graph.itself = graph

    gc.disable()
    waits_to_be_freed("before")
    gc.enable()
    with captured_steps._no_collection():
        assert freed == ["before"]
        waits_to_be_freed("within")
        assert [[] for _ in range(20_000)]  # enough for Python to look for what can be freed
        assert freed == ["before"]
    assert gc.isenabled()
    gc.collect()
    assert freed == ["before", "within"]
    gc.disable()
    try:
        with captured_steps._no_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_steps_over_weighted_classes_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = caveat.Task(network(), (X, Y), caveat.Categorical(class_weights=(0.5, 2.0)))
    plain = fitted(CHAINS["given"], problem)
    lanes = record_on_the_cpu(monkeypatch)
    assert_same(plain, fitted(CHAINS["given"], problem))
    assert lanes


def test_what_python_decides_while_a_step_is_recorded_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    record_on_the_cpu(monkeypatch)
    tensor, rng = torch.zeros(()), torch.Generator().manual_seed(0)
    amount = 1.0

    def step() -> None:
        tensor.add_(torch.rand((), generator=rng) * 0 + amount)

    replay = captured_steps._record(step, [rng])
    amount = 5.0
    tensor.zero_()
    state = rng.get_state()
    replay()
    assert float(tensor) == 1.0
    assert not torch.equal(rng.get_state(), state)


@pytest.mark.parametrize(
    "training",
    [
        Training(epochs=6, batch_size=48),
        Training(epochs=6, batch_size=48, optimizer="sgd", learning_rate=0.05, clip=1.0),
        Training(epochs=12, batch_size=50, learning_rate=0.05, patience=2),
    ],
    ids=["adam", "sgd", "patience"],
)
def test_members_side_by_side_are_those_trained_alone(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = task(network(nn.BatchNorm2d(8)), validation=0.2, augment=rotated)
    method = caveat.DeepEnsemble(members=3, training=training)
    alone = fitted(method, problem)
    lanes = record_on_the_cpu(monkeypatch)
    together = fitted(method, problem)
    assert lanes
    assert together.info.gradient_evaluations == alone.info.gradient_evaluations
    for name, value in alone.state["params"].items():
        torch.testing.assert_close(together.state["params"][name], value, rtol=1e-4, atol=1e-5)


def test_what_cannot_be_recorded_is_said_and_done_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = fitted(CHAINS["given"], task(network(Waits())))
    record_on_the_cpu(monkeypatch)
    waits = fitted(CHAINS["given"], task(network(Waits())))
    assert any("one after the other" in warning for warning in waits.info.warnings)
    assert_same(plain, waits)
    dropout = caveat.DeepEnsemble(members=2, training=Training(epochs=2))
    said = fitted(dropout, task(network(nn.Dropout(0.5)))).info.warnings
    assert any("random numbers of its own" in warning for warning in said)


@pytest.fixture
def no_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are computed as on a GPU: the kernels for a CPU are no operations of torch, and no recording has them."""
    monkeypatch.setattr(native, "library", lambda: None)


def sparse_fit(method: caveat.Method, **more: Any) -> caveat.Posterior:
    middle = nn.Tanh(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)
    start = caveat.MAP(training=Training(epochs=2)) if isinstance(method, caveat.AEB) else None
    return fitted(method, task(network(*middle), augment=rotated), start=start, **more)


@pytest.mark.usefixtures("no_native_kernels")
@pytest.mark.parametrize("which", SPARSE_CHAINS)
def test_recorded_chains_over_sparse_networks_are_the_chains(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = sparse_fit(SPARSE_CHAINS[which])
    lanes = record_on_the_cpu(monkeypatch)
    recorded = sparse_fit(SPARSE_CHAINS[which])
    assert lanes
    assert_equal_states(plain, recorded)
    diagnostics = plain.info.diagnostics
    if "accepted" in diagnostics:
        assert 0 < diagnostics["accepted"] < 1, "nodes came or went, and some did not"
    assert {k: v for k, v in recorded.info.diagnostics.items() if k != "history"} == {
        k: v for k, v in diagnostics.items() if k != "history"
    }


def assert_equal_states(a: caveat.Posterior, b: caveat.Posterior) -> None:
    assert a.state.keys() == b.state.keys()
    for group, tensors in a.state.items():
        for name, value in tensors.items():
            assert torch.equal(b.state[group][name], value), (group, name)


@pytest.mark.usefixtures("no_native_kernels")
@pytest.mark.parametrize("which", SPARSE_CHAINS)
def test_a_killed_recorded_chain_over_sparse_networks_is_the_same(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes = record_on_the_cpu(monkeypatch)
    whole = sparse_fit(SPARSE_CHAINS[which])
    checkpoint, count = Run.checkpoint, 0

    def killed(self: Run, *given: Any) -> None:
        nonlocal count
        checkpoint(self, *given)
        count += 1
        if count in (3, 5):  # while weights are removed, and once draws are taken
            raise KeyboardInterrupt

    monkeypatch.setattr(Run, "checkpoint_due", lambda self: self.folder is not None)
    monkeypatch.setattr(Run, "checkpoint", killed)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            sparse_fit(SPARSE_CHAINS[which], folder=tmp_path / "p")
    lanes.clear()
    assert_equal_states(whole, sparse_fit(SPARSE_CHAINS[which], folder=tmp_path / "p"))
    assert lanes


@pytest.mark.usefixtures("no_native_kernels")
def test_a_sparse_chain_that_cannot_be_recorded_says_so_once_and_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    module = network(Waits(), nn.Conv2d(8, 8, 3), nn.Dropout(0.2))
    method = SPARSE_CHAINS["MaskedBNN"]
    plain = fitted(method, task(module))
    record_on_the_cpu(monkeypatch)
    said = fitted(method, task(module))
    assert len([warning for warning in said.info.warnings if "operation by operation" in warning]) == 1
    assert_equal_states(plain, said)
    dropout = fitted(method, task(network(nn.Conv2d(8, 8, 3), nn.Dropout(0.2))))
    assert any("random numbers of its own" in warning for warning in dropout.info.warnings)


@pytest.mark.parametrize("which", ["given", "rmsprop"])
def test_a_step_that_is_not_recorded_after_all_leaves_the_chains_where_they_were(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = fitted(CHAINS[which])
    record_on_the_cpu(monkeypatch)

    def broken(step: Any, generators: Any) -> Any:
        step()  # what a recording on a GPU does not do, so that whatever it leaves is put back
        raise captured_steps.CaptureError("operation not permitted")

    monkeypatch.setattr(captured_steps, "_record", broken)
    said = fitted(CHAINS[which])
    assert any("not permitted" in warning for warning in said.info.warnings)
    assert_same(plain, said)


@pytest.mark.parametrize(
    ("speeds", "paying", "tried"),
    [
        ([100, 90, 150, 210], 8, 4),  # one measurement was unlucky
        ([100, 190, 195, 197], 2, 4),  # five in a hundred is no gain
        ([100, 60], 1, 2),  # nothing is to be hoped for
        ([100, torch.OutOfMemoryError()], 1, 2),
    ],
)
def test_as_many_lanes_as_pay(speeds: list[Any], paying: int, tried: int, monkeypatch: pytest.MonkeyPatch) -> None:
    left = list(speeds)

    def speed(self: Any, which: range) -> float:
        assert which == range(2 ** (len(speeds) - len(left)))
        found = left.pop(0)
        if isinstance(found, Exception):
            raise found
        return float(found)

    monkeypatch.setattr(captured_steps._Recording, "_speed", speed)
    recording = object.__new__(captured_steps._Recording)
    recording._lanes = [None] * 8  # type: ignore[list-item]
    assert recording.lanes_that_pay() == paying
    assert len(speeds) - len(left) == tried
