"""One network out of a posterior, as a module for inference, for a device that has no room or no time for draws.

A posterior over active weights (SSVI, MeanFieldVI, RigL) has a network at its means, or one at a draw: sparse layers
that compute with their active weights alone, or narrow ones, and BatchNorm folded into the layer before it. A posterior
of a few draws (AEB, MaskedBNN) has one at each of them.
"""

import warnings

import torch
from torch import nn

from caveat.engine.sparse import folded
from caveat.engine.sparse_chains import deployed_state
from caveat.engine.variational import module_at
from caveat.posterior import Posterior

__all__ = ["deploy"]


def deploy(posterior: Posterior, *, seed: int | None = None) -> nn.Module:
    """A module in eval mode that gives outputs (logits, or what the likelihood takes) for a batch of inputs.

    Args:
        posterior: of a method with active weights
        seed: of a draw of the weights; without one they are at their means, or at the last of a few draws
    """
    if not isinstance(posterior, Posterior):
        raise TypeError(f"deploy takes a posterior, not {posterior!r}: load a folder with caveat.load(folder, module)")
    if "active" not in posterior.state:
        raise TypeError(
            f"{type(posterior.method).__name__} has no active weights to deploy: take draws of its weights with "
            "posterior.sample(n), or fit SSVI, MeanFieldVI or RigL"
        )
    rng = None if seed is None else torch.Generator().manual_seed(seed)
    module = module_at(deployed_state(posterior.state, rng), posterior.network, rng)
    inference = folded(module.eval())
    if inference.reason is not None:
        warnings.warn(f"no BatchNorm was folded into the layer before it: {inference.reason}", stacklevel=2)
    return inference.module
