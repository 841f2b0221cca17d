"""Markov chains over the weights of a network, exp(log p(D | w) + log p(w)), on several devices and ranks at once.

    coordinates    flat vectors in which the prior has unit scale
    log_posterior  the density over all rows and its gradient, with a faster way (`perceptron`) for small stacks
    hamiltonian    the leapfrog integrator and the adaptation of its step size
    langevin       steps with gradients from batches: SGLD and SGHMC
    parallel_chains  who moves which chain, and its random stream
    draw_store     draws on disk as they are made
    diagnostics    R-hat, effective sample sizes, E-BFMI

Called by HMC and SGMCMC, by chains over sparse networks, and by `diagnose`.
"""

from caveat.engine.chains.coordinates import Coordinates
from caveat.engine.chains.diagnostics import (
    RHAT_THRESHOLD,
    Convergence,
    RhatNull,
    convergence,
    e_bfmi,
    rhat_null,
    rhat_null_cdf,
)
from caveat.engine.chains.draw_store import DrawStore, stored_draws
from caveat.engine.chains.hamiltonian import DualAveraging, integrate
from caveat.engine.chains.langevin import Chain, LearnedNoise
from caveat.engine.chains.log_posterior import Lane
from caveat.engine.chains.parallel_chains import Chains, random_stream, say_what_is_left_out

__all__ = [
    "RHAT_THRESHOLD",
    "Chain",
    "Chains",
    "Convergence",
    "Coordinates",
    "DrawStore",
    "DualAveraging",
    "Lane",
    "LearnedNoise",
    "RhatNull",
    "convergence",
    "e_bfmi",
    "integrate",
    "random_stream",
    "rhat_null",
    "rhat_null_cdf",
    "say_what_is_left_out",
    "stored_draws",
]
