"""SSVI."""

import torch
from torch import nn

import caveat


def test_it_fits_and_predicts() -> None:
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    task = caveat.Task(module, (x, (x[:, 0] > 0).long()), caveat.Categorical())
    posterior = caveat.fit(task, caveat.SSVI.quick, progress=False)
    assert float((posterior.predict(x).probs.argmax(-1) == (x[:, 0] > 0)).float().mean()) > 0.8
