"""Laplace approximations: a Gaussian around a trained point, N(w*, P^-1) with P = GGN + prior precision.

    GGN = sum_n J_n^T F_n J_n,   F_n = Fisher information of row n's outputs

    sweep              passes over the data that sum a curvature
    gaussians          the Gaussian of a full or low-rank curvature
    layer_gaussians    the Gaussian of diagonal and Kronecker-factored curvatures
    prior_precision    the prior precision: given, by evidence, or by validation rows
    output_draws       draws of outputs for the validation search
    selection          which weights to be Bayesian about
    memory             what a structure takes in bytes, and what would fit

Called by Laplace, LastLayerLaplace and SubnetworkLaplace.
"""

from caveat.engine.laplace.laplace_method import LaplaceMethod, flat_prior, with_gradients
from caveat.engine.laplace.memory import Structure, structure_bytes
from caveat.engine.laplace.selection import Score, select
from caveat.engine.laplace.sweep import Sweep, places

__all__ = [
    "LaplaceMethod",
    "Score",
    "Structure",
    "Sweep",
    "flat_prior",
    "places",
    "select",
    "structure_bytes",
    "with_gradients",
]
