"""Modules for service: a prediction that is written down once and for all, as an ordinary `nn.Module`.

    inputs -> {"mean", "aleatoric", "epistemic"}

A predictor says what its prediction is made of (`FixedForm`), and `served_module` makes a module of that: an average
over settings of the weights (`averaged_draws`), or the network with fixed directions of its weights pushed through it
(`linear_draws`, by the rules of `tangent_rules`), where derivatives have become operations like any other, so that
`torch.export`, ONNX and `torch.compile` take them. Called by `Posterior.module`.
"""

from torch import nn

from caveat.batches import Inputs
from caveat.engine.predictors import FixedForm, WeightDraws
from caveat.engine.served.averaged_draws import OUTPUTS, AveragedDraws, arguments, rows_of
from caveat.engine.served.linear_draws import linear_module
from caveat.likelihoods import Likelihood

__all__ = ["OUTPUTS", "arguments", "rows_of", "served_module"]


def served_module(form: FixedForm, likelihood: Likelihood, example: Inputs) -> nn.Module:
    """The module of a form; `example` is a few rows of inputs, of which only shapes and types matter."""
    if isinstance(form, WeightDraws):
        return AveragedDraws(form, likelihood, example)
    return linear_module(form, likelihood, example)
