"""A single row without a batch axis is the usual slip: it is answered with what to do, whatever the method."""

import pytest
import torch
from torch import nn

import caveat
from caveat.engine.method import Method
from caveat.likelihoods import Likelihood

METHODS = [
    caveat.MAP(),
    caveat.DeepEnsemble(members=2),
    caveat.Laplace(),
    caveat.Laplace(structure="full"),
    caveat.SubnetworkLaplace(weights=10),
    caveat.SampledLaplace(samples=4),
    caveat.MeanFieldVI(),
]


@pytest.mark.parametrize("likelihood", [caveat.Categorical(), caveat.Gaussian(), caveat.Bernoulli()], ids=repr)
@pytest.mark.parametrize("method", METHODS, ids=lambda method: repr(method)[:40])
def test_a_row_without_a_batch_axis_is_refused_with_advice(method: Method, likelihood: Likelihood) -> None:
    """It was an IndexError, or one prediction for three numbers."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, generator=generator)
    score = x @ torch.tensor([1.0, -1.0, 0.5])
    classes = isinstance(likelihood, caveat.Categorical)
    y = (score > 0).long() if classes else (score > 0).float()[:, None]
    torch.manual_seed(0)
    for width in (2, 3) if classes else (1,):  # as many outputs as inputs: their numbers cannot tell them apart
        module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, width))
        task = caveat.Task(module, (x, y), likelihood)
        start = caveat.MAP() if method.starts_from == "trained" else None
        posterior = caveat.fit(task, method, start=start, progress=False)
        for given in (x[0], torch.tensor(1.0)):
            with pytest.raises(ValueError, match=r"needs a batch axis, x\[None\]"):
                posterior.predict(given)
        assert posterior.predict(x[:1]).aleatoric.shape[0] == 1
