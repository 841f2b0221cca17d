"""The state of posteriors over active weights: the same groups and names as ever, and a reason where one is missing."""

from typing import Any

import pytest
import torch
from torch import nn

import caveat
from caveat.engine.sparse_chains import DrawsState
from caveat.engine.variational import LayerState
from caveat.storage import CorruptFile, State

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
SHORT = caveat.Training(epochs=2, batch_size=20)
METHODS: dict[str, Any] = {
    "ssvi": caveat.SSVI(density=0.5, interval=2, training=SHORT),
    "channels": caveat.SSVI(density=0.5, structure="channel", interval=2, training=SHORT),
    "rigl": caveat.RigL(density=0.5, interval=2, training=SHORT),
    "group": caveat.GroupVariationalDropout(training=SHORT, threshold=-9.0),
    "lognormal": caveat.StructuredBayesianPruning(training=SHORT),
}
DRAWS: dict[str, Any] = {
    "aeb": caveat.AEB(density=0.5, burn_in=1, length=2, thin=1, learning_rate=1e-3),
    "masked": caveat.MaskedBNN(interval=1, burn_in=2, length=2, thin=1, learning_rate=1e-3),
}


def fitted(method: Any) -> caveat.Posterior:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    task = caveat.Task(module, (X, X[:, :1]), caveat.Gaussian())
    start = caveat.MAP(training=caveat.Training(epochs=20)) if method.starts_from == "trained" else None
    return caveat.fit(task, method, start=start, progress=False)


def same(one: State, other: State) -> None:
    assert {group: [*tensors] for group, tensors in one.items()} == {g: [*tensors] for g, tensors in other.items()}
    assert all(torch.equal(t, other[group][name]) for group, tensors in one.items() for name, t in tensors.items())


@pytest.mark.parametrize("kind", METHODS)
def test_a_state_is_read_as_it_was_written(kind: str) -> None:
    state = fitted(METHODS[kind]).state
    same(LayerState.of(state).tensors(), state)
    assert ("slices" in state) == (kind == "channels" or bool(LayerState.of(state).slices))
    assert ("noise" in state) == (kind in ("group", "lognormal"))


@pytest.mark.parametrize("kind", DRAWS)
def test_draws_are_read_as_they_were_written_and_deployed(kind: str) -> None:
    posterior = fitted(DRAWS[kind])
    state = DrawsState.of(posterior.state)
    same(state.tensors(), posterior.state)
    assert len(state.draws) == 2
    assert [*state.learned[0]] == ["log_noise"]
    *_, last = posterior.sample(2)
    with torch.no_grad():  # the noise that a draw learned is no part of its network
        torch.testing.assert_close(caveat.deploy(posterior)(X), posterior.network(last, X))


def test_what_is_missing_is_named() -> None:
    state = fitted(METHODS["group"]).state
    for group in ("active", "rest", "hyper"):
        with pytest.raises(CorruptFile, match=f"has no '{group}'"):
            LayerState.of({name: tensors for name, tensors in state.items() if name != group})
    for name in ("mean", "indices", "counts"):
        active = {key: tensor for key, tensor in state["active"].items() if key != name}
        with pytest.raises(CorruptFile, match=f"has no 'active/{name}'"):
            LayerState.of(state | {"active": active})
    with pytest.raises(CorruptFile, match="noise of this posterior's units is not whole"):
        LayerState.of(state | {"noise": {"mean": state["noise"]["mean"]}})
    draws = fitted(DRAWS["aeb"]).state
    with pytest.raises(CorruptFile, match="has no 'active/indices'"):
        DrawsState.of(draws | {"active": {n: t for n, t in draws["active"].items() if n != "indices"}})
    renamed = {("3/mean" if name == "1/mean" else name): tensor for name, tensor in draws["active"].items()}
    with pytest.raises(CorruptFile, match="draw 1 of 2 has no weights"):
        DrawsState.of(draws | {"active": renamed})
