"""Laplace posteriors in inference mode, under autocast, and loaded there."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import caveat
from caveat import Laplace
from tests.methods.laplace_reference import data, normal, trained

METHODS = [Laplace(structure="full"), Laplace(), caveat.LastLayerLaplace(), caveat.SampledLaplace(samples=4)]


@pytest.mark.parametrize("method", METHODS)
def test_predictions_are_the_same_in_inference_mode(method: Any) -> None:
    task, start = trained("Categorical")
    posterior = caveat.fit(task, method, start=start, progress=False)
    x = normal(4, 3, seed=5)
    with torch.inference_mode():
        made_there = x + 0
        found = [posterior.predict(given).probs for given in (x, made_there)]
        variances = posterior.moments(made_there)[1]
        with pytest.raises(ValueError, match=r"inference_mode\(\) makes none: use torch.no_grad\(\)"):
            caveat.fit(task, method, start=start, progress=False)
    assert torch.equal(found[0], posterior.predict(x).probs)
    assert torch.equal(found[1], found[0])
    assert torch.equal(variances, posterior.moments(x)[1])
    assert bool((variances.diagonal(dim1=1, dim2=2) > 0).all())


@pytest.mark.parametrize("method", [*METHODS, Laplace("low_rank", rank=3)])
def test_nothing_changes_under_autocast(method: Any) -> None:
    x, y = data("Categorical", 30)
    torch.manual_seed(0)
    task = caveat.Task(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), (x.float(), y), caveat.Categorical())

    def everything() -> list[Tensor]:
        start = caveat.MAP(training=caveat.Training(epochs=60))
        posterior = caveat.fit(task, method, start=start, progress=False)
        found = [
            posterior.moments(x.float())[1],
            posterior.predict(x.float()).probs,
            *next(posterior.sample(1)).values(),
        ]
        if isinstance(method, Laplace):
            found.append(posterior.update((x.float(), y), progress=False).moments(x.float())[1])
        return found

    alone = everything()
    with torch.autocast("cpu", torch.bfloat16):
        within = everything()
    assert all(torch.equal(a, b) for a, b in zip(alone, within, strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_what_inference_mode_loads_can_be_used_there_and_outside(method: Any, tmp_path: Path) -> None:
    task, start = trained("Categorical")
    posterior = caveat.fit(task, method, start=start, progress=False)
    posterior.save(tmp_path / "posterior")
    x = normal(4, 3, seed=5)
    with torch.inference_mode():
        module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        loaded = caveat.load(tmp_path / "posterior", module)
        found, elsewhere = loaded.predict(x).probs, loaded.to("meta")
    assert torch.equal(found, posterior.predict(x).probs)
    assert torch.equal(loaded.moments(x)[1], posterior.moments(x)[1])
    assert not any(value.is_inference() for value in elsewhere.state["params"].values())


@pytest.mark.parametrize("method", [Laplace("full"), Laplace(), caveat.LastLayerLaplace()])
def test_inputs_that_the_network_cannot_take_change_nothing(method: Any) -> None:
    task, start = trained("Categorical")
    x = normal(4, 3, seed=5)
    wanted = caveat.fit(task, method, start=start, progress=False).predict(x).probs
    posterior = caveat.fit(task, method, start=start, progress=False)
    for _ in range(2):  # before the first prediction, and between two
        for malformed in (x[:, :2], x.unsqueeze(0)[..., :1]):
            with pytest.raises(ValueError, match="could not take these inputs"):
                posterior.predict(malformed)
        assert torch.equal(posterior.predict(x).probs, wanted)
    again = caveat.fit(task, method, start=start, progress=False)
    assert torch.equal(again.predict(x).probs, wanted)
