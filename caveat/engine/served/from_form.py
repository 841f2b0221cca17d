"""From what a predictor says of its prediction to the module of it."""

from torch import nn

from caveat.batches import Inputs
from caveat.engine.predictors import FixedForm, WeightDraws
from caveat.engine.served.averaged_draws import AveragedDraws
from caveat.engine.served.linear_draws import linear_module
from caveat.likelihoods import Likelihood

__all__ = ["served_module"]


def served_module(form: FixedForm, likelihood: Likelihood, example: Inputs) -> nn.Module:
    """The module of a form; `example` is a few rows of inputs, of which only shapes and types matter."""
    if isinstance(form, WeightDraws):
        return AveragedDraws(form, likelihood, example)
    return linear_module(form, likelihood, example)
