"""Temperature scaling: one number that makes a network as sure as it should be (Guo et al. 2017).

Logits are divided by T; for Gaussian likelihoods the noise variance is multiplied by T. T minimises the mean negative
log likelihood of validation rows, a one-dimensional problem that is unimodal in log T and solved by golden-section
search.
"""

import math

import torch
from torch import Tensor

from caveat.engine.golden_section import golden_section
from caveat.likelihoods import Hyper, Likelihood

__all__ = ["fit_temperature"]


def fit_temperature(likelihood: Likelihood, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Hyper:
    """`hyper` with the temperature that fits outputs [S, N, ...] to targets best, between e^-5 and e^5."""
    if not likelihood.tempered:
        raise ValueError(f"temperature scaling has no meaning for {type(likelihood).__name__}: leave temperature=False")
    outputs = outputs.double()

    def loss(log_temperature: float) -> float:
        tempered = hyper | {
            "temperature": torch.tensor(math.exp(log_temperature), dtype=torch.float64, device=outputs.device)
        }
        return -float(likelihood.predictive(outputs, tempered).log_prob(targets).mean())

    best = math.exp(golden_section(loss, -5.0, 5.0))
    return hyper | {"temperature": torch.tensor(best, dtype=torch.float64, device=outputs.device)}
