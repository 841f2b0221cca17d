"""Markov chains over the weights of a network, exp(log p(D | w) + log p(w)), on several devices and ranks at once.

    coordinates          flat vectors in which the prior has unit scale
    log_posterior        the log density over all rows and its gradient
    perceptron           a faster gradient for plain stacks of linear layers on a CPU
    hamiltonian          the leapfrog integrator and the adaptation of its step size
    hamiltonian_sampler  HMC's loop: propose, accept, adapt, write draws, checkpoint
    langevin             the step of SGLD and SGHMC, with gradients from batches
    step_search          the step size that the curvature allows, found while chains burn in
    langevin_sampler     SG-MCMC's loop: step, search, write draws, checkpoint
    langevin_chain       one chain of such steps whose target may change on the way
    parallel_chains      which process and thread moves which chain, and its random stream
    draw_store           where draws are written as they are made
    chain_state          what a posterior of chains keeps
    diagnostics          R-hat, effective sample sizes, E-BFMI
    chain_checks         what a fit of chains says of itself: warnings when they have not mixed or explain nothing

Called by HMC and SGMCMC, by chains over sparse networks, and by `diagnose`.
"""

from caveat.engine.chains.chain_checks import DrawChecks, check_chains
from caveat.engine.chains.chain_state import ChainState
from caveat.engine.chains.coordinates import Coordinates
from caveat.engine.chains.diagnostics import (
    ESS_NOTHING,
    RHAT_APART,
    RHAT_THRESHOLD,
    Convergence,
    RhatNull,
    convergence,
    e_bfmi,
    rhat_null,
    rhat_null_cdf,
)
from caveat.engine.chains.draw_store import DrawStore
from caveat.engine.chains.hamiltonian_sampler import HAMILTONIAN_STATS, HamiltonianSampler
from caveat.engine.chains.langevin import LangevinDynamics
from caveat.engine.chains.langevin_chain import LangevinChain, LearnedNoise
from caveat.engine.chains.langevin_sampler import LANGEVIN_STATS, EpochPlan, LangevinSampler
from caveat.engine.chains.log_posterior import LogPosterior, PassSettings
from caveat.engine.chains.parallel_chains import ParallelChains, random_stream, warn_of_what_chains_ignore
from caveat.engine.chains.step_search import BURN_IN_STEPS, STEPS_A_DRAW, StepSearch

__all__ = [
    "BURN_IN_STEPS",
    "ESS_NOTHING",
    "HAMILTONIAN_STATS",
    "LANGEVIN_STATS",
    "RHAT_APART",
    "RHAT_THRESHOLD",
    "STEPS_A_DRAW",
    "ChainState",
    "Convergence",
    "Coordinates",
    "DrawChecks",
    "DrawStore",
    "EpochPlan",
    "HamiltonianSampler",
    "LangevinChain",
    "LangevinDynamics",
    "LangevinSampler",
    "LearnedNoise",
    "LogPosterior",
    "ParallelChains",
    "PassSettings",
    "RhatNull",
    "StepSearch",
    "check_chains",
    "convergence",
    "e_bfmi",
    "random_stream",
    "rhat_null",
    "rhat_null_cdf",
    "warn_of_what_chains_ignore",
]
