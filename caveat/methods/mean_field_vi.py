"""Mean-field variational inference: an independent Gaussian for every weight (Graves 2011; Blundell et al. 2015).

    q(theta) = prod_k N(theta_k; mu_k, sigma_k^2)
    minimise  beta/N sum_k KL(q_k || p_k) - 1/N E_q log p(D | theta)

Gradients by local reparameterisation (Kingma et al. 2015): outputs are drawn, not weights. It is what SSVI is compared
with: the same layers, training and predictions, with all weights.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from caveat.engine.method import Method
from caveat.engine.run import Info, Run, StartsFrom
from caveat.engine.sparse import (
    ActiveWeights,
    Scheme,
    inferred_weights,
    random_layout,
    substitute_and_means,
    training_account,
)
from caveat.engine.training import ADAM, Training, total_steps
from caveat.engine.variational import (
    LayerPrediction,
    LayerPredictor,
    LayerState,
    LayerTraining,
    check_layers,
    kl_weight_for,
    layer_info,
    std_diagnostics,
    std_rate_for,
    warm_up,
)
from caveat.knobs import Count, NonNegative, Positive, Share, check_knobs
from caveat.network import Network
from caveat.storage import State
from caveat.task import Task

__all__ = ["MeanFieldVI"]


@dataclass(frozen=True)
class MeanFieldVI(Method):
    """A Gaussian of its own for every weight of the linear and convolutional layers."""

    initial_std: Positive = 0.01  # of the weights
    std_learning_rate: Positive | None = None  # of log std, by Adam; .01, or more in a short training, unless given
    kl_weight: NonNegative | None = None  # beta at its highest; 1 is the ELBO; min(1, rows / weights) unless given
    kl_warmup: Share = 0.5  # share of training over which it rises from 0
    prediction: LayerPrediction = "draws"  # draws of the weights, or of outputs row by row (local reparameterisation)
    default_draws: Count = 10  # a prediction's draws
    training: Training = ADAM
    starts_from: ClassVar[StartsFrom] = "scratch"
    quick: ClassVar["MeanFieldVI"]

    def __post_init__(self) -> None:
        check_knobs(self)
        object.__setattr__(self, "training", self.training.filled(ADAM))

    def memory(self, network: Network) -> int:
        """Two values, their gradients and moments for each weight."""
        return 10 * network.dtype.itemsize * network.n_parameters

    def fit(self, task: Task, start: State, run: Run) -> tuple[State, Info]:
        """Train means and standard deviations of all weights."""
        network, params = task.network.to(run.device), start.pop("params")
        layers = inferred_weights(network)
        layout = random_layout(layers, {name: geometry.size for name, geometry in layers.items()}, run)
        substitute, mean = substitute_and_means(network, params, layout)
        del params  # they are in the substitute and the means now
        log_std = torch.full_like(mean, math.log(self.initial_std))
        account = training_account(task, layout, run, Scheme(optimizer=self.training.descent.optimizer))
        trainer = LayerTraining(
            task,
            substitute,
            ActiveWeights(mean, log_std),
            start["hyper"],
            self.training,
            run,
            std_learning_rate=std_rate_for(self.std_learning_rate, total_steps(task, self.training)),
            kl_weight=warm_up(kl_weight_for(self.kl_weight, task.n, layout.size), self.kl_warmup),
            selects=True,
        )
        trained = trainer.train(account.total.training_flops)
        diagnostics = std_diagnostics(trainer, self.initial_std, run)
        return trained.state(network).tensors(), layer_info(task, trained, run, account, "Gaussian", diagnostics)

    def check_state(self, state: State, network: Network) -> None:
        """Refuse a state that is not over weights of the network."""
        check_layers(state, network, ["active", "rest", "hyper"], has_widths=True)

    def predictor(self, state: State, network: Network) -> LayerPredictor:
        """What predicts by passes through sparse layers."""
        return LayerPredictor(LayerState.of(state), network, local=self.prediction == "local")


MeanFieldVI.quick = MeanFieldVI(
    kl_weight=0.1, std_learning_rate=0.01, training=replace(Training(), epochs=60, learning_rate=0.01)
)
