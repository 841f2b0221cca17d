"""Structured Bayesian pruning: log-normal noise on whole units, which fade where it grows (Neklyudov et al. 2017).

    y = W (t * x),   log t_g ~ N(mu_g, sigma_g^2) on [-20, 0],   p(log t_g) uniform there
    minimise  beta/N sum_g KL(mu_g, sigma_g) - 1/N E_t log p(D | W, t);   then remove units with E t / sd t <= threshold

The noise only ever makes a unit smaller. Weights are points under the task's prior; the posterior is that of the units'
noise. A unit is a channel, a hidden unit or an input of a linear layer; what is left is a narrower network.
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
    HIGH,
    LOW,
    LayerPredictor,
    LayerState,
    LognormalUnitNoise,
    NoisyModel,
    TrainedUnits,
    UniformDraw,
    check_layers,
    lognormal_kl,
    lognormal_log_moment,
    lognormal_log_snr,
    lognormal_of,
    train_and_prune,
    unit_network,
    warm_up,
)
from caveat.knobs import Count, NonNegative, Positive, Share, check_knobs
from caveat.network import Network
from caveat.storage import State
from caveat.task import Task

__all__ = ["StructuredBayesianPruning"]

_NARROW, _WIDE = -8.0, 4.0  # log sigma stays between: a point, and as good as uniform on the interval


@dataclass(frozen=True)
class StructuredBayesianPruning(Method):
    """Points with truncated log-normal noise on their units, of which units that are mostly noise go."""

    threshold: NonNegative = 1.0  # of the signal-to-noise ratio of a unit's noise, mean over standard deviation
    initial_scale: Positive = 0.0067  # sigma: that of the noise's logarithm
    noise_learning_rate: Positive = 0.03  # of mu and log sigma, by Adam
    kl_weight: NonNegative = 1.0  # beta at its highest; 1 is the ELBO
    kl_warmup: Share = 0.5  # share of training over which it rises from 0
    default_draws: Count = 10  # a prediction's draws
    training: Training = ADAM
    starts_from: ClassVar[StartsFrom] = "scratch"
    quick: ClassVar["StructuredBayesianPruning"]

    def __post_init__(self) -> None:
        check_knobs(self)
        object.__setattr__(self, "training", self.training.filled(ADAM))

    def memory(self, network: Network) -> int:
        """A value, its gradient and moments for each weight."""
        return 5 * network.dtype.itemsize * network.n_parameters

    def fit(self, task: Task, start: State, run: Run) -> tuple[State, Info]:
        """Train with all units, then take out those that are noise."""
        scaled = unit_network(task, start.pop("params"), run)
        mean, size = scaled.mean, scaled.units.size
        location = mean.new_zeros(size)
        log_scale = torch.full_like(location, math.log(self.initial_scale))

        def ready(draw: UniformDraw) -> None:
            scaled.multiply(lognormal_of(location, log_scale, draw(size)))
            scaled.substitute.use(mean)

        def quiet() -> None:
            scaled.multiply(lognormal_log_moment(location.detach(), log_scale.detach(), 1).exp())
            scaled.substitute.use(mean.detach())

        def constrain() -> None:
            location.clamp_(LOW, HIGH)
            log_scale.clamp_(_NARROW, _WIDE)

        def divergence() -> Tensor:
            return lognormal_kl(location, log_scale).sum()

        def outcome() -> TrainedUnits:
            noise = LognormalUnitNoise(location.detach(), log_scale.detach())
            ratio = lognormal_log_snr(location, log_scale).exp()
            return TrainedUnits(noise, ActiveWeights(mean.detach()), ratio, self.threshold)

        model = NoisyModel(
            weights={"active.mean": mean},
            scales={"units.location": location, "units.log_scale": log_scale},
            ready=ready,
            quiet=quiet,
            divergence=divergence,
            constrain=constrain,
            points=lambda: scaled.layout.whole(mean),
        )
        return train_and_prune(
            task,
            scaled,
            model,
            outcome,
            start["hyper"],
            run,
            training=self.training,
            noise_learning_rate=self.noise_learning_rate,
            kl_weight=warm_up(self.kl_weight, self.kl_warmup),
            kind="point",
        )

    def check_state(self, state: State, network: Network) -> None:
        """Refuse a state that is not over weights of the network."""
        check_layers(state, network, ["active", "rest", "hyper", "noise"], has_widths=False)

    def predictor(self, state: State, network: Network) -> LayerPredictor:
        """What predicts by passes through sparse layers."""
        return LayerPredictor(LayerState.of(state), network)


StructuredBayesianPruning.quick = StructuredBayesianPruning(training=replace(Training(), epochs=60, learning_rate=0.01))
