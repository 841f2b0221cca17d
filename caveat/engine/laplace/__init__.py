"""Laplace approximations: a Gaussian around a trained point, N(w*, P^-1) with P = GGN + prior precision.

    GGN = sum_n J_n^T F_n J_n,   F_n = Fisher information of row n's outputs

    laplace_methods    the knobs that all Laplace methods have, and the steps of their fits, in order
    chosen_weights     the weights that a posterior is over
    selection          which weights to be Bayesian about
    sweep              passes over the data that sum a curvature; `gram_matrix`, the sum of F^T F in pieces
    gaussians          the Gaussian of a full or low-rank curvature
    layer_gaussians    the Gaussian of diagonal and Kronecker-factored curvatures
    factor_sides       one side of a Kronecker product: whole, or a few directions of a wide one
    prior_precision    the prior precision: given, by evidence, or by validation rows
    evidence_choice    the evidence's choice, which validation rows overrule where they can tell
    output_draws       draws of outputs for the search on validation rows
    memory             what a structure takes in bytes, and what would fit
    laplace_posterior  what the posterior keeps, and predictions of the linearised network

Called by Laplace, LastLayerLaplace and SubnetworkLaplace.
"""

from caveat.engine.laplace.chosen_weights import ChosenWeights, flat_prior
from caveat.engine.laplace.factor_sides import FactorDirections
from caveat.engine.laplace.laplace_methods import (
    LaplaceKnobs,
    add_rows,
    check_laplace,
    point_of,
    structure_treatment,
    sweep_at,
    what_was_done,
)
from caveat.engine.laplace.laplace_posterior import LaplaceState
from caveat.engine.laplace.memory import Structure
from caveat.engine.laplace.prior_precision import tuned_gaussian
from caveat.engine.laplace.selection import SubnetworkScore, select_weights
from caveat.engine.laplace.sweep import Sweep

__all__ = [
    "ChosenWeights",
    "FactorDirections",
    "LaplaceKnobs",
    "LaplaceState",
    "Structure",
    "SubnetworkScore",
    "Sweep",
    "add_rows",
    "check_laplace",
    "flat_prior",
    "point_of",
    "select_weights",
    "structure_treatment",
    "sweep_at",
    "tuned_gaussian",
    "what_was_done",
]
