"""Weights that move no output but by rounding, as the bias of an attention's keys, have no unit under a g-prior."""

import torch
from torch import Tensor, nn
from torch.func import functional_call

import caveat
from caveat.engine.linear_model import units


class Encoder(nn.Module):
    """One layer of attention; a third of its first bias is added to all keys alike, which a softmax does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean(1))


def test_rounding_is_no_curvature_and_small_curvature_is_some() -> None:
    diagonal = torch.tensor([4.0, 1e-8, 1e-15, 0.0])
    torch.testing.assert_close(units(diagonal, torch.float32), torch.tensor([0.5, 1e4, 0.0, 0.0]))
    torch.testing.assert_close(units(diagonal, torch.float64)[2], diagonal[2].rsqrt())


def test_draws_in_single_precision_are_those_of_the_jacobian_in_double() -> None:
    """In units of rounding the draws of these weights were of 1e8, and predictions off by as much as they vary."""
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 5, 8, generator=rng), torch.arange(60) % 3
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Encoder()
    task = caveat.Task(model, (x, y), caveat.Categorical())
    point = caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=5)), progress=False)
    posterior = caveat.fit(task, caveat.SampledLaplace(samples=4, precision=1.0), start=point, progress=False)
    deviations = posterior.state["samples"]["0"]
    assert deviations.abs().max() < 1e4
    keys = deviations[:, 8 * 24 + 8 : 8 * 24 + 16]  # of the joint bias, behind the joint weight
    assert not keys.any()
    assert posterior.info.diagnostics["without_curvature"] == 8
    params = {name: value.double() for name, value in posterior.state["params"].items()}
    module, rows = model.double().eval(), x[:4].double()

    def moved(deviation: Tensor) -> Tensor:
        parts = deviation.split([params[name].numel() for name in posterior.network.names])
        values = zip(posterior.network.names, parts, strict=True)
        return functional_call(
            module, {name: params[name] + part.reshape_as(params[name]) for name, part in values}, rows
        )

    with torch.no_grad():
        mean, small = moved(torch.zeros_like(deviations[0]).double()), 1e-6
        slopes = [(moved(small * z) - moved(-small * z)) / (2 * small) for z in deviations.double()]
    expected = (mean + torch.stack(slopes)).softmax(-1)
    torch.testing.assert_close(posterior.predict(x[:4], draws=4).samples.double(), expected, rtol=0, atol=1e-5)
