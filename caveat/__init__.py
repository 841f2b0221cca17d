"""Caveat gives a PyTorch network a posterior: predictions that say how sure they are."""

from typing import Any

from caveat.bayesian_linear_model import BayesianLinearModel
from caveat.data import shift
from caveat.deploy import deploy
from caveat.engine.run import Info
from caveat.engine.training import Training
from caveat.evaluate import Fidelity, ReferenceSet, evaluate, fidelity
from caveat.evaluate.diagnosis import Diagnosis, diagnose, posterior_surface, to_arviz
from caveat.fitting import fit
from caveat.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Likelihood, Poisson
from caveat.methods import Method, built_in
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

__version__ = "0.1.0"

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
    "fidelity",
    "fit",
    "load",
    "load_reference",
    "posterior_surface",
    "reference_task",
    "shift",
    "to_arviz",
]


def __getattr__(name: str) -> Any:
    """A method of this package by its class's name: found, not listed, and imported when the first is asked for."""
    if not name.startswith("_"):
        methods = {method.__name__: method for method in built_in().values()}
        globals().update(methods)
        if name in methods:
            return methods[name]
    raise AttributeError(f"module 'caveat' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *(method.__name__ for method in built_in().values())})
