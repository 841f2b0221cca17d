"""Compiled training of layers: one graph for all places, and the same training."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import caveat
from tests.engine.variational.training_cases import short, ssvi, task


def test_a_compiled_pass_returns_outputs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What layers keep of it would be outputs too, and zeros be made for the gradients of each at every step."""
    compiled, found = torch.compile, []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        found.append(len(graph.graph.output_node().args[0]))  # type: ignore[arg-type]
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda function, **how: compiled(function, backend=backend))
    caveat.fit(task(), ssvi(structure="channel", training=short(epochs=2, compile=True)), progress=False)
    assert found == [1]


@pytest.mark.parametrize("batches", [{}, {"addition": "batches", "addition_batches": 2}, {"addition": "mean"}])
def test_one_graph_is_compiled_wherever_weights_are(batches: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Exchanges neither compile anew nor take a pass of their own; another density has the same graph."""
    compiled, found = torch.compile, []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        found.append((graph.code, [tuple(t.shape) for t in inputs if isinstance(t, Tensor)]))
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda function, **how: compiled(function, backend=backend))
    for density in (0.3, 0.5):
        torch._dynamo.reset()  # what it has seen of other sizes
        method = ssvi(density=density, training=short(epochs=4, compile=True), **batches)
        posterior = caveat.fit(task(), method, progress=False)
        assert posterior.info.diagnostics["exchanged"] > 10
    assert len(found) == 2
    assert found[0] == found[1]


@pytest.mark.parametrize("knobs", [{}, {"scope": "global"}, {"allocation": "erk"}], ids=str)
def test_whole_weights_written_out_first_give_the_same_training(
    knobs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Point weights, which have no noise: the places, and the values but for rounding."""
    monkeypatch.setattr(torch, "compile", lambda function, **how: function)
    method = caveat.RigL(density=0.3, interval=3, **knobs)
    plain, written = (
        caveat.fit(task(), replace(method, training=short(compile=compiled)), progress=False)
        for compiled in (False, True)
    )
    assert plain.info.diagnostics["exchanged"] == written.info.diagnostics["exchanged"] > 10
    assert plain.state["active"]["indices"].equal(written.state["active"]["indices"])
    torch.testing.assert_close(written.state["active"]["mean"], plain.state["active"]["mean"], rtol=1e-4, atol=1e-5)
