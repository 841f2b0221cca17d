"""Chains over networks with few weights or few nodes.

    spike_slab       latent quantities of a spike-and-slab prior, by stochastic approximation
    masks            births and deaths of nodes by Metropolis-Hastings
    masked_network   a network whose nodes come and go while its weights are drawn
    draw_state       what a posterior of a few such draws keeps, and its predictions

Called by AEB and MaskedBNN.
"""

from caveat.engine.sparse_chains.draw_state import DrawsPredictor, count, one_draw
from caveat.engine.sparse_chains.masked_network import MaskedNetwork, mean_account
from caveat.engine.sparse_chains.spike_slab import SpikeSlab

__all__ = ["DrawsPredictor", "MaskedNetwork", "SpikeSlab", "count", "mean_account", "one_draw"]
