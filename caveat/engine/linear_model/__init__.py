"""A Bayesian linear model that is known only by products with its features Phi [rows * outputs, d].

    posterior: N(mean, H^-1),  H = Phi^T B Phi + diag(a),  samples z = argmin ||Phi z - e||_B^2 + ||z - u||_a^2

    features               what a block of rows can be asked for
    model                  the system of equations, samples and evidence of such a model
    solvers                what all solvers of H z = b share
    conjugate_gradients    ... by conjugate gradients, with the sketch of `nystrom` as preconditioner
    stochastic_descent     ... by `descent` on batches of rows
    mackay, fixed_point    the prior and noise precisions, by MacKay's updates until they no longer change
    counted_normals        random numbers that are computed from their place instead of stored

Called by `BayesianLinearModel`, and by linearised networks.
"""

from caveat.engine.linear_model.conjugate_gradients import ConjugateGradients
from caveat.engine.linear_model.features import Block, DenseFeatures, Features, Noise, RowNoise, Scaled, times
from caveat.engine.linear_model.mackay import (
    Hyperparameters,
    Solve,
    Tuned,
    Tuning,
    posterior,
    together,
    tune,
    unfinished,
)
from caveat.engine.linear_model.model import (
    Draws,
    LinearModel,
    System,
    g_prior,
    inner,
    log_determinant,
    misfit,
    regression_system,
)
from caveat.engine.linear_model.solvers import Prepared, Report, Solution, Solver
from caveat.engine.linear_model.stochastic_descent import StochasticDescent

__all__ = [
    "Block",
    "ConjugateGradients",
    "DenseFeatures",
    "Draws",
    "Features",
    "Hyperparameters",
    "LinearModel",
    "Noise",
    "Prepared",
    "Report",
    "RowNoise",
    "Scaled",
    "Solution",
    "Solve",
    "Solver",
    "StochasticDescent",
    "System",
    "Tuned",
    "Tuning",
    "g_prior",
    "inner",
    "log_determinant",
    "misfit",
    "posterior",
    "regression_system",
    "times",
    "together",
    "tune",
    "unfinished",
]
