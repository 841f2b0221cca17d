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
from caveat.engine.sparse import ActiveWeights
from caveat.engine.training import ADAM, Training
from caveat.engine.variational import (
    GaussianUnitNoise,
    LayerPredictor,
    LayerState,
    NoisyModel,
    TrainedUnits,
    UniformDraw,
    check_layers,
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
    training: Training = ADAM
    starts_from: ClassVar[StartsFrom] = "scratch"
    quick: ClassVar["GroupVariationalDropout"]

    def __post_init__(self) -> None:
        check_knobs(self)
        object.__setattr__(self, "training", self.training.filled(ADAM))

    def memory(self, network: Network) -> int:
        """Two values, their gradients and moments for each weight."""
        return 10 * network.dtype.itemsize * network.n_parameters

    def fit(self, task: Task, start: State, run: Run) -> tuple[State, Info]:
        """Train with all units, then take out those that are noise."""
        scaled = unit_network(task, start.pop("params"), run)
        mean, initial, size = scaled.mean, math.log(self.initial_std), scaled.units.size
        log_std = torch.full_like(mean, initial)
        scale = mean.new_ones(size)
        scale_log_std = torch.full_like(scale, initial)
        one = mean.new_ones(())

        def ready(draw: UniformDraw) -> None:
            normal = torch.special.ndtri(draw(size).clamp(1e-12, 1 - 1e-12)).to(scale.dtype)
            scaled.multiply(scale + scale_log_std.exp() * normal)
            scaled.substitute.use(mean, (2 * log_std).exp())

        def quiet() -> None:
            scaled.multiply(scale.detach())
            scaled.substitute.use(mean.detach())

        def divergence() -> Tensor:
            return log_uniform_kl(log_alpha(scale, scale_log_std)).sum() + gaussian_kl(mean, log_std, one)

        def outcome() -> TrainedUnits:
            noise = GaussianUnitNoise(scale.detach(), scale_log_std.detach())
            weights = ActiveWeights(mean.detach(), log_std.detach())
            return TrainedUnits(noise, weights, -log_alpha(scale, scale_log_std), -self.threshold)

        trained = {"active.mean": mean, "units.mean": scale}
        scales = {"active.log_std": log_std, "units.log_std": scale_log_std}
        return train_and_prune(
            task,
            scaled,
            NoisyModel(trained, scales, ready, quiet, divergence),
            outcome,
            start["hyper"],
            run,
            training=self.training,
            noise_learning_rate=self.std_learning_rate,
            kl_weight=warm_up(self.kl_weight, self.kl_warmup),
            kind="Gaussian",
        )

    def check_state(self, state: State, network: Network) -> None:
        """Refuse a state that is not over weights of the network."""
        check_layers(state, network, ["active", "rest", "hyper", "noise"], has_widths=True)

    def predictor(self, state: State, network: Network) -> LayerPredictor:
        """What predicts by passes through sparse layers."""
        return LayerPredictor(LayerState.of(state), network)


GroupVariationalDropout.quick = GroupVariationalDropout(training=replace(Training(), epochs=60, learning_rate=0.01))
