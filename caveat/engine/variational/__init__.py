"""Variational training of layers: Gaussians over weights by the evidence lower bound, and points on the way.

    minimise  beta / N sum_k KL(q_k || p_k) - 1/N E_q log p(D | theta)

    bound                  the divergence, its warm-up, and the noise of a batch
    layer_training         training of sparse layers: means and deviations by the bound, or points alone
    weight_exchange        which weights there are, exchanged while they are trained
    layer_posterior        what such a posterior keeps, predictions through sparse layers, and a module to deploy
    fit_report             what there is to say of a fit: coverage, diagnostics, warnings
    multiplicative_noise   noise with a log-uniform prior
    noisy_training         training under that noise
    units, unit_noise      whole units of a network, and the numbers that multiply them
    pruning                what is left when training is over
    unit_training          all of this for the methods that prune units

Called by SSVI, MeanFieldVI, RigL, by the three methods that prune by noise, by AEB, MaskedBNN and `deploy`.
"""

from caveat.engine.variational.bound import gaussian_kl, kl_weight_for, std_rate_for, warm_up
from caveat.engine.variational.fit_report import held_by, layer_info, std_diagnostics
from caveat.engine.variational.layer_posterior import (
    LayerPrediction,
    LayerPredictor,
    LayerState,
    check_layers,
    module_at,
)
from caveat.engine.variational.layer_training import LayerTraining, Trained
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
from caveat.engine.variational.noisy_training import NoisyModel, NoisyTraining, UniformDraw
from caveat.engine.variational.pruning import pruned_account, remaining_weights, smaller_layout
from caveat.engine.variational.unit_noise import GaussianUnitNoise, LognormalUnitNoise
from caveat.engine.variational.unit_training import TrainedUnits, train_and_prune, unit_network
from caveat.engine.variational.weight_exchange import Addition, Scope, WeightExchange

__all__ = [
    "HIGH",
    "LOW",
    "Addition",
    "GaussianUnitNoise",
    "LayerPrediction",
    "LayerPredictor",
    "LayerState",
    "LayerTraining",
    "LognormalUnitNoise",
    "NoisyModel",
    "NoisyTraining",
    "Scope",
    "Trained",
    "TrainedUnits",
    "UniformDraw",
    "WeightExchange",
    "check_layers",
    "gaussian_kl",
    "held_by",
    "kl_weight_for",
    "layer_info",
    "log_alpha",
    "log_uniform_kl",
    "lognormal_kl",
    "lognormal_log_moment",
    "lognormal_log_snr",
    "lognormal_of",
    "module_at",
    "pruned_account",
    "remaining_weights",
    "smaller_layout",
    "std_diagnostics",
    "std_rate_for",
    "train_and_prune",
    "unit_network",
    "warm_up",
]
