"""Variational dropout that prunes weights: each learns a dropout rate of its own (Molchanov et al. 2017).

    q(w_k) = N(w_k; mu_k, alpha_k mu_k^2),   p(|w_k|) proportional to 1 / |w_k|
    minimise  beta/N sum_k KL(alpha_k) - 1/N E_q log p(D | w);   then drop the weights with log alpha_k > threshold

The divergence from the log-uniform prior depends on alpha alone and falls to zero as alpha grows: a weight that the
data do not hold on to drowns in its own noise. What is learned are mu and log sigma, sigma^2 = alpha mu^2, whose
gradients are quieter than those of alpha. What stays has its Gaussian, and is stored as SSVI's weights are.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from caveat.engine.method import Method
from caveat.engine.run import Info, Run, StartsFrom
from caveat.engine.sparse import (
    Scheme,
    inferred_weights,
    random_layout,
    substitute_and_means,
    training_account,
)
from caveat.engine.training import ADAM, Training
from caveat.engine.variational import (
    LayerPrediction,
    LayerPredictor,
    LayerState,
    NoisyModel,
    NoisyTraining,
    Trained,
    check_layers,
    layer_info,
    log_alpha,
    log_uniform_kl,
    pruned_account,
    remaining_weights,
    smaller_layout,
    warm_up,
)
from caveat.knobs import Count, NonNegative, Positive, Share, check_knobs
from caveat.network import Network
from caveat.storage import State
from caveat.task import Task

__all__ = ["VariationalDropout"]


@dataclass(frozen=True)
class VariationalDropout(Method):
    """Gaussians over weights under a log-uniform prior, of which those that are mostly noise are dropped."""

    threshold: float = 3.0  # of log alpha, log variance less log squared mean: weights above go
    initial_std: Positive = 0.0067  # of the weights: log variance -10
    std_learning_rate: Positive = 0.01  # of log std, by Adam; about that of the means, or fewer weights go
    kl_weight: NonNegative = 1.0  # beta at its highest; 1 is the ELBO
    kl_warmup: Share = 0.5  # share of training over which it rises from 0
    prediction: LayerPrediction = "draws"  # draws of the weights, or of outputs row by row (local reparameterisation)
    default_draws: Count = 10  # a prediction's draws
    training: Training = ADAM
    starts_from: ClassVar[StartsFrom] = "scratch"
    quick: ClassVar["VariationalDropout"]

    def __post_init__(self) -> None:
        check_knobs(self)
        object.__setattr__(self, "training", self.training.filled(ADAM))

    def memory(self, network: Network) -> int:
        """Two values, their gradients and moments for each weight."""
        return 10 * network.dtype.itemsize * network.n_parameters

    def fit(self, task: Task, start: State, run: Run) -> tuple[State, Info]:
        """Train with all weights, then drop those that are noise."""
        network, params = task.network.to(run.device), start.pop("params")
        layers = inferred_weights(network)
        layout = random_layout(layers, {name: geometry.size for name, geometry in layers.items()}, run)
        substitute, mean = substitute_and_means(network, params, layout)
        del params  # they are in the substitute and the means now
        log_std = torch.full_like(mean, math.log(self.initial_std))
        model = NoisyModel(
            weights={"active.mean": mean},
            scales={"active.log_std": log_std},
            ready=lambda draw: substitute.use(mean, (2 * log_std).exp()),
            quiet=lambda: substitute.use(mean.detach()),
            divergence=lambda: log_uniform_kl(log_alpha(mean, log_std)).sum(),
        )
        trainer = NoisyTraining(
            task,
            substitute,
            model,
            start["hyper"],
            self.training,
            run,
            noise_learning_rate=self.std_learning_rate,
            kl_weight=warm_up(self.kl_weight, self.kl_warmup),
        )
        scheme = Scheme(optimizer=self.training.descent.optimizer)
        before = training_account(task, layout, run, scheme)
        history = trainer.train(before.total.training_flops)
        mean, log_std = mean.detach(), log_std.detach()
        stay = remaining_weights(layout, -log_alpha(mean, log_std), -self.threshold, run)
        rest, hyper = trainer.finish(lambda: substitute.use(mean * stay))
        few = smaller_layout(layout, stay)
        trained = Trained(few, mean[stay], log_std[stay], rest, hyper, history)
        account = pruned_account(before, training_account(task, few, run, scheme))
        diagnostics = {"sparsity": 1 - account.density, "median_std": float(log_std[stay].median().exp())}
        return trained.state(network).tensors(), layer_info(task, trained, run, account, "Gaussian", diagnostics)

    def check_state(self, state: State, network: Network) -> None:
        """Refuse a state that is not over weights of the network."""
        check_layers(state, network, ["active", "rest", "hyper"], has_widths=True)

    def predictor(self, state: State, network: Network) -> LayerPredictor:
        """What predicts by passes through sparse layers."""
        return LayerPredictor(LayerState.of(state), network, local=self.prediction == "local")


VariationalDropout.quick = VariationalDropout(training=replace(Training(), epochs=60, learning_rate=0.01))
