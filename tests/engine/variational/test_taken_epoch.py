"""A training whose length nobody gave ends before labels are learned by heart, where validation rows can tell."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import caveat
from caveat import Training
from caveat.engine.training import knobs
from caveat.engine.variational import LayerTraining
from tests.engine.variational.training_cases import interrupted, network, rows, same

METHODS = {
    "rigl": caveat.RigL(density=0.5, interval=3, training=Training(learning_rate=0.03)),
    "mean_field_vi": caveat.MeanFieldVI(kl_weight=0.01, training=Training(learning_rate=0.03)),
}


def noisy() -> caveat.Task:
    x, _ = rows()
    labels = torch.randint(2, (48,), generator=torch.Generator().manual_seed(2))
    return caveat.Task(network(), (x, labels), caveat.Categorical(), validation=0.25)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs, "LEAST_STEPS", 100)


@pytest.mark.parametrize("name", METHODS)
def test_the_values_are_those_of_the_epoch_that_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    means: list[Tensor] = []
    losses = LayerTraining._row_losses

    def spied(self: LayerTraining) -> Tensor:
        means.append(self.mean.detach().clone())
        return losses(self)

    monkeypatch.setattr(LayerTraining, "_row_losses", spied)
    posterior = caveat.fit(noisy(), METHODS[name], progress=False)
    found = posterior.info.diagnostics
    assert found["taken_by"] == "validation"
    assert found["taken_epoch"] < found["epochs"] == 100
    assert torch.equal(posterior.state["active"]["mean"], means[int(found["taken_epoch"]) - 1])


@pytest.mark.parametrize("name", METHODS)
def test_it_is_gone_on_with_after_a_kill(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = caveat.fit(noisy(), METHODS[name], progress=False)
    taken = int(whole.info.diagnostics["taken_epoch"])
    same(whole, interrupted(noisy, METHODS[name], tmp_path / "p", monkeypatch, taken + 3))


def test_a_length_that_is_given_is_kept_to() -> None:
    method = caveat.RigL(density=0.5, interval=3, training=Training(epochs=100, learning_rate=0.03))
    found = caveat.fit(noisy(), method, progress=False).info.diagnostics
    assert (found["taken_epoch"], found["taken_by"]) == (100, "the end of training")
