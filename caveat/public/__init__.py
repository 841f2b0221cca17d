"""The names that leave the package, methods apart; `import caveat` brings them when the first is asked for.

They bring torch with them, which takes a second, so that a command line that only shows its help does without.
"""

from caveat.bayesian_linear_model import BayesianLinearModel
from caveat.data import shift
from caveat.deploy import deploy, export
from caveat.engine.run import Info
from caveat.engine.training import Training
from caveat.evaluate import Fidelity, ReferenceSet, evaluate, fidelity
from caveat.evaluate.diagnosis import Diagnosis, diagnose, posterior_surface, to_arviz
from caveat.fitting import fit
from caveat.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Likelihood, Poisson
from caveat.methods import Method
from caveat.network import Network, Params
from caveat.posterior import Posterior, load
from caveat.predictive import Predictive
from caveat.priors import (
    EmpCovPrior,
    GaussianMixturePrior,
    GaussianPrior,
    LaplacePrior,
    LogisticPrior,
    Prior,
    StudentTPrior,
)
from caveat.references import build_reference, load_reference, reference_task
from caveat.storage import CorruptFile, State
from caveat.task import Task

__all__ = [
    "BayesianLinearModel",
    "Bernoulli",
    "Categorical",
    "CorruptFile",
    "Diagnosis",
    "EmpCovPrior",
    "Fidelity",
    "Gaussian",
    "GaussianMixturePrior",
    "GaussianPrior",
    "HeteroscedasticGaussian",
    "Info",
    "LaplacePrior",
    "Likelihood",
    "LogisticPrior",
    "Method",
    "Network",
    "Params",
    "Poisson",
    "Posterior",
    "Predictive",
    "Prior",
    "ReferenceSet",
    "State",
    "StudentTPrior",
    "Task",
    "Training",
    "build_reference",
    "deploy",
    "diagnose",
    "evaluate",
    "export",
    "fidelity",
    "fit",
    "load",
    "load_reference",
    "posterior_surface",
    "reference_task",
    "shift",
    "to_arviz",
]
