"""Modules for service: a prediction that is written down once and for all, as an ordinary `nn.Module`.

    inputs -> {"mean", "aleatoric", "epistemic"}

A predictor says what its prediction is made of (`FixedForm`), and `served_module` makes a module of that: an average
over settings of the weights (`averaged_draws`), or the network with fixed directions of its weights pushed through it
(`linear_draws`, by the rules of `tangent_rules`), where derivatives have become operations like any other, so that
`torch.export`, ONNX and `torch.compile` take them. Called by `Posterior.module`.
"""

from caveat.engine.served.averaged_draws import OUTPUTS, arguments, rows_of
from caveat.engine.served.from_form import served_module

__all__ = ["OUTPUTS", "arguments", "rows_of", "served_module"]
