"""Laplace predictions of many outputs a row: pixels and positions of a sequence."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import caveat
from caveat.engine.laplace.laplace_posterior import LaplaceState
from caveat.engine.row_gradients import Jacobian
from tests.methods.laplace_reference import assert_close, at, fit, normal


@pytest.mark.parametrize("class_axis", [1, -1])
def test_closed_predictions_of_many_positions(class_axis: int, dense: Any) -> None:
    torch.manual_seed(0)
    if class_axis == 1:
        module, x = nn.Conv2d(1, 3, 3, padding=1), normal(20, 1, 2, 3)
        y = (x[:, 0] > 0).long() + (x[:, 0] > 1)
    else:
        module, x = nn.Linear(4, 3), normal(20, 6, 4)
        y = (x[..., 0] > 0).long() + (x[..., 1] > 1)
    task = caveat.Task(module.double(), (x, y), caveat.Categorical(class_axis=class_axis), caveat.GaussianPrior(2.0))
    start = caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=40)), progress=False)
    posterior = fit(task, start, prediction="closed")
    by_hand = at(dense, posterior)
    j, ggn = by_hand.jacobian(x[:3]), by_hand.ggn(x, y)
    covariance = j @ (ggn + 2 * torch.eye(len(ggn)).double()).inverse() @ j.mT
    mean = posterior.network(posterior.state["params"], x[:3])
    assert_close(posterior.moments(x[:3])[1], covariance)
    logits = mean / (1 + math.pi / 8 * covariance.diagonal(dim1=1, dim2=2).reshape(mean.shape)).sqrt()
    assert_close(posterior.predict(x[:3]).probs, logits.movedim(class_axis, -1).softmax(-1))


class Tagger(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        attention = nn.TransformerEncoderLayer(4, 2, 5, 0.1, batch_first=True)
        self.body = attention if kind == "attention" else nn.LSTM(4, 4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        return self.head(h[0] if isinstance(h, tuple) else h)


@pytest.mark.parametrize("kind", ["pixels", "attention", "lstm", "lstm, single"])
@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
def test_more_outputs_than_draws_take_tangents_to_the_same_end(kind: str, structure: str, dense: Any) -> None:
    torch.manual_seed(0)
    dtype, tolerance = (torch.float32, 1e-3) if "single" in kind else (torch.float64, 1e-6)
    if kind == "pixels":
        module, x, likelihood = nn.Conv2d(1, 2, 3, padding=1), normal(20, 1, 4, 4), caveat.Categorical()
        y = (x[:, 0] > 0).long()
    else:
        module, x, likelihood = Tagger(kind), normal(20, 6, 4).to(dtype), caveat.Categorical(class_axis=-1)
        y = (x[..., 0] > 0).long()
    task = caveat.Task(module.to(dtype), (x, y), likelihood)
    start = caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=40)), progress=False)
    posterior = fit(task, start, structure=structure)
    method, state, network = posterior.method, posterior.state, posterior.network
    outputs, _ = method.predictor(state, network).outputs(x[:3], 5, torch.Generator().manual_seed(2))
    _, gaussian = LaplaceState.of(state).posterior(network)
    rng = torch.Generator().manual_seed(2)
    if "single" in kind:  # torch has no forward derivative of it: one draw is tried, then the Jacobian's rows serve
        gaussian.deltas(1, rng)
        deltas = gaussian.deltas(5, rng)
        j = Jacobian(network, state["params"], x[:3]).at(x[:3]).rows()
    else:
        deltas = torch.cat([gaussian.deltas(1, rng) for _ in range(5)])
        j = at(dense, posterior).jacobian(x[:3])
    moved = torch.einsum("bdn,sn->sbd", j, gaussian.weights(deltas)).reshape(5, 3, *outputs.shape[2:])
    assert_close(outputs, network(state["params"], x[:3]) + moved, tolerance)
    wide, _ = method.predictor(state, network).outputs(x[:3], 40, torch.Generator().manual_seed(2))
    assert wide.shape == (40, *outputs.shape[1:]), "fewer outputs than draws"
    assert torch.backends.mha.get_fastpath_enabled()
