"""A Bayesian linear model that is known only by products with its features Phi [rows * outputs, d].

    posterior: N(mean, H^-1),  H = Phi^T B Phi + diag(a),  samples z = argmin ||Phi z - e||_B^2 + ||z - u||_a^2

    features               products with the features of a block of rows, and the noise of rows
    model                  the system of equations, samples and evidence of such a model
    solvers                what all solvers of H z = b share
    conjugate_gradients    the solver by conjugate gradients
    nystrom                the sketch of the curvature that preconditions them
    stochastic_descent     the solver by batches of rows
    exact                  the solver by a matrix over rows and outputs
    descent                the objectives on which it descends
    mackay                 the prior and noise precisions, by MacKay's updates
    fixed_point            the search for where these updates no longer change them
    counted_normals        random numbers that are computed from their place instead of stored

Called by `BayesianLinearModel`, and by linearised networks.
"""

from caveat.engine.linear_model.conjugate_gradients import ConjugateGradients
from caveat.engine.linear_model.exact import EXACT_UP_TO, Exact
from caveat.engine.linear_model.features import (
    DenseFeatures,
    Features,
    NoisePrecision,
    RowBlock,
    RowNoise,
    ScaledFeatures,
    apply_factor,
    apply_factor_transposed,
)
from caveat.engine.linear_model.mackay import (
    Hyperparameters,
    PosteriorSolution,
    Solve,
    Tuning,
    mean_beside_samples,
    solve_posterior,
    tune,
    unfinished_warnings,
)
from caveat.engine.linear_model.model import (
    LinearModel,
    LinearSystem,
    SampleRandomness,
    g_prior,
    inner,
    log_determinant,
    misfit,
    regression_system,
    units,
)
from caveat.engine.linear_model.solvers import PreparedSolver, Solution, Solver, SolveReport
from caveat.engine.linear_model.stochastic_descent import StochasticDescent

__all__ = [
    "EXACT_UP_TO",
    "ConjugateGradients",
    "DenseFeatures",
    "Exact",
    "Features",
    "Hyperparameters",
    "LinearModel",
    "LinearSystem",
    "NoisePrecision",
    "PosteriorSolution",
    "PreparedSolver",
    "RowBlock",
    "RowNoise",
    "SampleRandomness",
    "ScaledFeatures",
    "Solution",
    "Solve",
    "SolveReport",
    "Solver",
    "StochasticDescent",
    "Tuning",
    "apply_factor",
    "apply_factor_transposed",
    "g_prior",
    "inner",
    "log_determinant",
    "mean_beside_samples",
    "misfit",
    "regression_system",
    "solve_posterior",
    "tune",
    "unfinished_warnings",
    "units",
]
