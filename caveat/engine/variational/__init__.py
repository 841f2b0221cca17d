"""Variational training of layers: Gaussians over weights by the evidence lower bound, and points on the way.

    minimise  beta / N sum_k KL(q_k || p_k) - 1/N E_q log p(D | theta)

    layer_training         training of sparse layers: means and deviations by the bound, or points alone
    weight_exchange        which weights there are, exchanged while they are trained
    layer_posterior        what such a posterior keeps, its draws and its predictions
    multiplicative_noise   noise with a log-uniform prior
    noisy_training         training under that noise
    units, unit_training   ... on whole units
    pruning                what is left when training is over

Called by SSVI, MeanFieldVI, RigL, and by the three methods that prune by noise.
"""

from caveat.engine.variational.layer_posterior import (
    LayerPrediction,
    LayerPredictor,
    channel_account,
    layer_info,
    layout_of,
    network_at,
    own_network,
    random_layout,
    substitute_and_means,
    training_account,
    warn_if_frozen,
)
from caveat.engine.variational.layer_training import LayerTraining, Trained, gaussian_kl, warm_up
from caveat.engine.variational.multiplicative_noise import (
    HIGH,
    LOW,
    log_alpha,
    log_uniform_kl,
    lognormal_kl,
    lognormal_log_moment,
    lognormal_log_snr,
    lognormal_of,
)
from caveat.engine.variational.noisy_training import Draw, NoisyModel, NoisyTraining
from caveat.engine.variational.pruning import pruned_account, remaining_weights, smaller_layout
from caveat.engine.variational.unit_training import Outcome, train_and_prune, unit_network
from caveat.engine.variational.weight_exchange import Addition, Scope, WeightExchange

__all__ = [
    "HIGH",
    "LOW",
    "Addition",
    "Draw",
    "LayerPrediction",
    "LayerPredictor",
    "LayerTraining",
    "NoisyModel",
    "NoisyTraining",
    "Outcome",
    "Scope",
    "Trained",
    "WeightExchange",
    "channel_account",
    "gaussian_kl",
    "layer_info",
    "layout_of",
    "log_alpha",
    "log_uniform_kl",
    "lognormal_kl",
    "lognormal_log_moment",
    "lognormal_log_snr",
    "lognormal_of",
    "network_at",
    "own_network",
    "pruned_account",
    "random_layout",
    "remaining_weights",
    "smaller_layout",
    "substitute_and_means",
    "train_and_prune",
    "training_account",
    "unit_network",
    "warm_up",
    "warn_if_frozen",
]
