"""The ensemble: members that differ, an average of probabilities, and members that are not trained twice."""

from pathlib import Path

import pytest
import torch
from torch import nn

import caveat
from caveat.engine.predictors import pick
from caveat.engine.training import point_training as point


def task() -> caveat.Task:
    x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    return caveat.Task(
        nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)),
        (x, (x.prod(1) > 0).long()),
        caveat.Categorical(),
    )


def test_prediction_is_the_mean_of_the_members_probabilities() -> None:
    posterior = caveat.fit(task(), caveat.DeepEnsemble(members=3, training=caveat.Training(epochs=3)), progress=False)
    x = torch.randn(7, 2, generator=torch.Generator().manual_seed(1))
    by_hand = torch.stack([posterior.network(draw, x).softmax(-1) for draw in posterior.sample(3)])
    torch.testing.assert_close(posterior.predict(x).probs, by_hand.mean(0))
    assert (by_hand[0] - by_hand[1]).abs().max() > 1e-3, "members start from different weights"
    means = posterior.state["params"]["1.running_mean"]
    assert means.shape == (3, 8), "every member has its own BatchNorm statistics"
    assert not torch.equal(means[0], means[1])


def test_noise_is_each_members_own() -> None:
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 2, generator=rng), torch.randn(40, 1, generator=rng)
    regression = caveat.Task(
        nn.Sequential(nn.Linear(2, 30), nn.Tanh(), nn.Linear(30, 1)),
        (x, y),
        caveat.Gaussian(),
        caveat.GaussianPrior(1e-3),
    )
    posterior = caveat.fit(
        regression, caveat.DeepEnsemble(members=3, training=caveat.Training(epochs=100)), progress=False
    )
    noise = posterior.state["params"]["hyper/log_noise"].exp()
    assert noise.shape == (3, 1)
    for draws in (1, 2, 3, 5):
        drawn = torch.stack([draw["hyper/log_noise"] for draw in posterior.sample(draws, seed=4)]).exp()
        variances = posterior.predict(x, draws=draws, seed=4).variances[:, 0]
        torch.testing.assert_close(variances, drawn.float() ** 2, msg="a draw keeps its own noise")


def test_finished_members_are_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[str] = []

    def counted(task, network, start, training, run):  # type: ignore[no-untyped-def]
        if len(trained) == 2:
            trained.append("killed")
            raise KeyboardInterrupt
        trained.append(run.label)
        return train_point(task, network, start, training, run)

    train_point = point.train_point
    monkeypatch.setattr(point, "train_point", counted)
    method = caveat.DeepEnsemble(members=4, training=caveat.Training(epochs=2))
    with pytest.raises(KeyboardInterrupt):
        caveat.fit(task(), method, folder=tmp_path / "p", progress=False)
    caveat.fit(task(), method, folder=tmp_path / "p", progress=False)
    labels = [f"DeepEnsemble member-{m}" for m in (1, 2, 3, 4)]
    assert trained == [*labels[:2], "killed", *labels[2:]]


def test_starting_again_with_another_method_or_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.partial").mkdir()
    method = caveat.DeepEnsemble(members=2, training=caveat.Training(epochs=1))
    from caveat.engine.run import Run

    Run(0, folder=tmp_path / "p.partial", identity={"method": "another", "seed": 0})
    with pytest.raises(ValueError, match="unfinished fit with another"):
        caveat.fit(task(), method, folder=tmp_path / "p", progress=False)


def test_pick_uses_every_draw_equally_often() -> None:
    rng = torch.Generator().manual_seed(0)
    assert pick(3, 3, rng) == [0, 1, 2]
    assert sorted(torch.bincount(torch.tensor(pick(3, 7, rng)), minlength=3).tolist()) == [2, 2, 3]
    counts = torch.bincount(torch.tensor([i for _ in range(3000) for i in pick(5, 2, rng)]), minlength=5)
    assert len(set(pick(5, 3, rng))) == 3
    torch.testing.assert_close(counts.double() / 3000, torch.full((5,), 0.4, dtype=torch.float64), atol=0.04, rtol=0)
