"""From what a predictor says of its prediction to the module of it, and from there to its program."""

from torch import nn
from torch.export import ExportedProgram

from caveat.batches import Inputs
from caveat.engine.predictors import FixedForm, LinearMixture, WeightDraws
from caveat.engine.served.averaged_draws import AveragedDraws
from caveat.engine.served.exported import NotServed, exported
from caveat.engine.served.linear_draws import linear_mixture, linear_module
from caveat.likelihoods import Likelihood
from caveat.network import Network

__all__ = ["served_module", "served_program"]


def served_module(form: FixedForm, likelihood: Likelihood, example: Inputs) -> nn.Module:
    """The module of a form; `example` is a few rows of inputs, of which only shapes and types matter."""
    if isinstance(form, WeightDraws):
        return AveragedDraws.of(form, likelihood, example)
    if isinstance(form, LinearMixture):
        return linear_mixture(form, likelihood, example)
    return linear_module(form, likelihood, example)


def served_program(module: nn.Module, network: Network, example: Inputs) -> ExportedProgram:
    """The program of what `served_module` made for a network; `example` is a few rows, which the program keeps.

    torch knows several operations (batch and layer norms, embeddings, attention) for draws that go through together
    with a fixed number of rows alone: such draws go through one by one in the program.
    """
    try:
        return exported(module, network, example)
    except NotServed:
        apart = module.one_by_one() if isinstance(module, AveragedDraws) else module
        if apart is module:
            raise
        return exported(apart, network, example)
