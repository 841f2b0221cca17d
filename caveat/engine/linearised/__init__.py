"""A network as a linear model: f(x, w) ~ f(x, w*) + J(x) (w - w*), with posterior samples of all its weights.

    z ~ N(0, (J^T B J + diag(a))^-1),   B = Fisher information of the likelihood at the outputs

    jacobian_features        the Jacobian as features, by products with K vectors
    held_features            the Jacobian itself, where it is small
    fisher_noise             B, row by row
    row_space                the same model with a coordinate for each output of each row, where these are few
    linearised_network       the linear model: its noise, its offset, its posterior mean
    sampler                  samples in groups, kept as they are made, and marginal variances from them
    sample_posterior         what a posterior of samples keeps, and predictions from them
    covariance_temperature   the width that makes validation rows most likely

Called by SampledLaplace, and by SubnetworkLaplace where its score needs marginal variances of all weights.
"""

from caveat.engine.linearised.covariance_temperature import best_temperature
from caveat.engine.linearised.fisher_noise import LikelihoodNoise
from caveat.engine.linearised.sample_posterior import SamplePredictor, SampleState
from caveat.engine.linearised.sampler import (
    NEGLIGIBLE,
    Sampler,
    copies_of_the_weights,
    linearise,
    marginal_variances,
    normalisations,
    solver_for,
)

__all__ = [
    "NEGLIGIBLE",
    "LikelihoodNoise",
    "SamplePredictor",
    "SampleState",
    "Sampler",
    "best_temperature",
    "copies_of_the_weights",
    "linearise",
    "marginal_variances",
    "normalisations",
    "solver_for",
]
