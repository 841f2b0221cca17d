"""Structured Bayesian pruning: units fade, and what fades goes. What it shares with group dropout is tested there."""

import torch
from torch import nn

import caveat
from caveat import StructuredBayesianPruning, Training
from caveat.engine.variational import lognormal_log_snr


def fitted(kl_weight: float) -> caveat.Posterior:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(80, 6, generator=rng)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 2))
    training = Training(epochs=60, batch_size=20, learning_rate=0.01)
    method = StructuredBayesianPruning(noise_learning_rate=0.1, kl_weight=kl_weight, training=training)
    return caveat.fit(caveat.Task(module, (x, (x[:, 0] > 0).long()), caveat.Categorical()), method, progress=False)


def test_what_stays_has_more_signal_than_noise_and_more_divergence_leaves_fewer() -> None:
    sizes = []
    for weight in (0.0, 0.3, 3.0):
        posterior = fitted(weight)
        noise = posterior.state["noise"]
        assert float(lognormal_log_snr(noise["location"], noise["log_scale"]).min()) > 0
        assert float(noise["location"].max()) <= 0
        sizes.append(len(posterior.state["active"]["mean"]))
    assert sizes[0] == 6 * 24 + 24 * 2, "without it nothing goes"
    assert sizes[0] > sizes[1] >= sizes[2]
    draws = torch.stack([draw["2.weight"] for draw in posterior.sample(20)])
    assert float(draws.std(0).max()) > 0


def test_channels_that_nothing_depends_on_go_and_the_others_stay() -> None:
    """With the weights held where they are, the noise alone has to find out which channels are read."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Conv2d(6, 2, 4), nn.Flatten())
    with torch.no_grad():
        module[2].weight[:, 1::2] = 0
        x = torch.randn(60, 1, 6, 6, generator=torch.Generator().manual_seed(1))
        y = module(x)
    task = caveat.Task(module, (x, y), caveat.Gaussian(noise=0.02))
    training = Training(epochs=300, batch_size=60, learning_rate=1e-9)
    found = caveat.fit(task, StructuredBayesianPruning(noise_learning_rate=0.1, training=training), progress=False)
    assert found.info.diagnostics["units"] == {"0": "3 of 6"}
    assert found.state["slices"]["0.weight/0"].tolist() == [0, 2, 4]
