"""Group variational dropout: whole units learn dropout rates, over Gaussian weights (Louizos et al. 2017).

    p(z_g) proportional to 1 / |z_g|,  p(w | z) = N(0, z^2)
    q(z_g) = N(m_g, alpha_g m_g^2),    q(w | z) = N(z mu, z^2 sigma^2)
    minimise  beta/N [ sum_g KL(alpha_g) + sum_k KL(N(mu_k, sigma_k^2) || N(0, 1)) ] - 1/N E_q log p(D | w)

That is Bayesian compression with a normal-Jeffreys prior. z cancels in the divergence of the weights. A group is a
channel or hidden unit, or an input of a linear layer; those with log alpha_g > threshold are taken out, and what is
left is a narrower network.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from caveat.engine.method import Method
from caveat.engine.run import Info, Run, StartsFrom
from caveat.engine.training import Training
from caveat.engine.variational import (
    Draw,
    LayerPredictor,
    NoisyModel,
    Outcome,
    gaussian_kl,
    log_alpha,
    log_uniform_kl,
    train_and_prune,
    unit_network,
    warm_up,
)
from caveat.knobs import Count, NonNegative, Positive, Share, check_knobs
from caveat.network import Network
from caveat.storage import State
from caveat.task import Task

__all__ = ["GroupVariationalDropout"]


@dataclass(frozen=True)
class GroupVariationalDropout(Method):
    """Gaussian weights in units of a scale with a log-uniform prior, of which units that are mostly noise go."""

    threshold: float = -1.0  # of log alpha of a unit's scale, log variance less log squared mean: units above go
    initial_std: Positive = 0.0067  # of weights and scales: log variance -10
    std_learning_rate: Positive = 0.03  # of log std, by Adam
    kl_weight: NonNegative = 1.0  # beta at its highest; 1 is the ELBO
    kl_warmup: Share = 0.5  # share of training over which it rises from 0
    default_draws: Count = 10  # a prediction's draws
    training: Training = Training()
    starts_from: ClassVar[StartsFrom] = "scratch"
    quick: ClassVar["GroupVariationalDropout"]

    def __post_init__(self) -> None:
        check_knobs(self)

    def memory(self, network: Network) -> int:
        """Two values, their gradients and moments for each weight."""
        return 10 * network.dtype.itemsize * network.n_parameters

    def fit(self, task: Task, start: State, run: Run) -> tuple[State, Info]:
        """Train with all units, then take out those that are noise."""
        units = unit_network(task, start, run)
        mean, begun = units.mean, math.log(self.initial_std)
        log_std = torch.full_like(mean, begun)
        scale = mean.new_ones(units.groups.size)
        scale_log_std = torch.full_like(scale, begun)
        one = mean.new_ones(())

        def ready(draw: Draw) -> None:
            normal = torch.special.ndtri(draw(units.groups.size).clamp(1e-12, 1 - 1e-12)).to(scale.dtype)
            units.multiply(scale + scale_log_std.exp() * normal)
            units.substitute.use(mean, (2 * log_std).exp())

        def quiet() -> None:
            units.multiply(scale.detach())
            units.substitute.use(mean.detach())

        def divergence() -> Tensor:
            return log_uniform_kl(log_alpha(scale, scale_log_std)).sum() + gaussian_kl(mean, log_std, one)

        def outcome() -> Outcome:
            noise = {"mean": scale.detach(), "log_std": scale_log_std.detach()}
            values = {"mean": mean.detach(), "log_std": log_std.detach()}
            return Outcome(noise, values, -log_alpha(scale, scale_log_std), -self.threshold)

        weights = {"active.mean": mean, "units.mean": scale}
        scales = {"active.log_std": log_std, "units.log_std": scale_log_std}
        return train_and_prune(
            task,
            units,
            NoisyModel(weights, scales, ready, quiet, divergence),
            outcome,
            start,
            run,
            training=self.training,
            noise_learning_rate=self.std_learning_rate,
            kl_weight=warm_up(self.kl_weight, self.kl_warmup),
            what="Gaussian",
        )

    def predictor(self, state: State, network: Network) -> LayerPredictor:
        """Passes through sparse layers."""
        return LayerPredictor(state, network)


GroupVariationalDropout.quick = GroupVariationalDropout(training=replace(Training(), epochs=60, learning_rate=0.01))
