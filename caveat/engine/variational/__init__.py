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
    LayerPredictor,
    Prediction,
    account_of,
    begin,
    describe,
    fresh_layout,
    layout_of,
    narrow_account,
    network_at,
    own_network,
    warn_if_frozen,
)
from caveat.engine.variational.layer_training import Trained, Variational, gaussian_kl, warm_up
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
from caveat.engine.variational.noisy_training import Draw, Noise, NoisyTraining
from caveat.engine.variational.pruning import kept_weights, pruned_account, smaller_layout
from caveat.engine.variational.unit_training import Outcome, prepare, train_and_prune
from caveat.engine.variational.weight_exchange import Addition, Replacement, Scope

__all__ = [
    "HIGH",
    "LOW",
    "Addition",
    "Draw",
    "LayerPredictor",
    "Noise",
    "NoisyTraining",
    "Outcome",
    "Prediction",
    "Replacement",
    "Scope",
    "Trained",
    "Variational",
    "account_of",
    "begin",
    "describe",
    "fresh_layout",
    "gaussian_kl",
    "kept_weights",
    "layout_of",
    "log_alpha",
    "log_uniform_kl",
    "lognormal_kl",
    "lognormal_log_moment",
    "lognormal_log_snr",
    "lognormal_of",
    "narrow_account",
    "network_at",
    "own_network",
    "prepare",
    "pruned_account",
    "smaller_layout",
    "train_and_prune",
    "warm_up",
    "warn_if_frozen",
]
