import pytest
import torch
from torch import nn

import caveat
from caveat.integrations.torchmetrics import PosteriorScores


def fitted(likelihood, y):
    x = torch.randn(len(y), 3, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    outputs = int(y.max()) + 1 if y.ndim == 1 else 1
    task = caveat.Task(nn.Linear(3, outputs), (x, y), likelihood)
    method = caveat.DeepEnsemble(members=2, training=caveat.Training(epochs=3))
    return caveat.fit(task, method, progress=False), x


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_batches_give_the_scores_of_the_whole(kind):
    rng = torch.Generator().manual_seed(1)
    if kind == "classification":
        y = torch.randint(0, 4, (90,), generator=rng)
        posterior, x = fitted(caveat.Categorical(), y)
    else:
        y = torch.randn(90, 1, generator=rng)
        posterior, x = fitted(caveat.Gaussian(), y)
    metric = PosteriorScores(kind)
    for part in torch.arange(90).split(25):
        metric.update(posterior.predict(x[part]), y[part])
    whole = caveat.evaluate(posterior, {"clean": (x, y)}, progress=False)["clean"]
    found = metric.compute()
    assert {"nll", "ece" if kind == "classification" else "crps"} <= found.keys() <= whole.metrics.keys()
    for name, value in found.items():
        assert float(value) == pytest.approx(whole[name].mean, rel=1e-4, abs=1e-6)
    metric.reset()
    metric.update(posterior.predict(x[:10]), y[:10])
    assert float(metric.compute()["nll"]) != pytest.approx(whole["nll"].mean, rel=1e-3)


def test_other_predictions_are_refused():
    posterior, x = fitted(caveat.Gaussian(), torch.randn(20, 1))
    with pytest.raises(ValueError, match="a prediction of regression cannot be scored as classification"):
        PosteriorScores("classification").update(posterior.predict(x), torch.zeros(20, 1))
    with pytest.raises(ValueError, match="kind='other'"):
        PosteriorScores("other")
