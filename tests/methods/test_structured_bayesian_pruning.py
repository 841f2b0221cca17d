"""Structured Bayesian pruning: units fade, and what fades goes. What it shares with group dropout is tested there."""

import torch
from torch import nn

import caveat
from caveat import StructuredBayesianPruning, Training
from caveat.engine.dropout_noise import lognormal_log_snr


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
