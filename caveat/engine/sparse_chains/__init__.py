"""Chains over networks with few weights or few nodes: draws of weights, and of which weights or nodes there are.

    p(theta, m | D) ~ p(D | theta, m) p(theta) P(m)          m: which nodes are on, or a spike-and-slab prior of weights

    spike_slab       latent quantities of a spike-and-slab prior, by stochastic approximation
    masks            births and deaths of nodes by Metropolis-Hastings
    masked_network   a network whose nodes come and go while its weights are drawn
    draw_state       what a posterior of a few such draws keeps, and its predictions

Called by AEB, MaskedBNN and `deploy`.
"""

from caveat.engine.sparse_chains.draw_state import DrawsPredictor, DrawsState, check_draws, deployed_state
from caveat.engine.sparse_chains.masked_network import MaskedNetwork, mean_account
from caveat.engine.sparse_chains.spike_slab import SpikeSlab

__all__ = [
    "DrawsPredictor",
    "DrawsState",
    "MaskedNetwork",
    "SpikeSlab",
    "check_draws",
    "deployed_state",
    "mean_account",
]
