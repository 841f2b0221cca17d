"""Modules for service: a prediction that is written down once and for all, as an ordinary `nn.Module`.

    inputs -> {"mean", "aleatoric", "epistemic"}

A predictor says what its prediction is made of (`FixedForm`), and `served_module` makes a module of that: an average
over settings of the weights (`averaged_draws`), or the network with fixed directions of its weights pushed through it
(`linear_draws`, by the rules of `tangent_rules`), where derivatives have become operations like any other, so that
`torch.export`, ONNX and `torch.compile` take them. `served_program` is what `torch.export` makes of either, for any
number of rows. Called by `Posterior.module` and `caveat.export`.
"""

from caveat.engine.served.averaged_draws import OUTPUTS
from caveat.engine.served.from_form import served_module, served_program

__all__ = ["OUTPUTS", "served_module", "served_program"]
