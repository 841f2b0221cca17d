"""Fidelity: how far a posterior's predictions are from those of a reference, which is HMC where it can be had.

    classification    total variation  = mean of 1/2 sum_k |p_k - q_k|,  agreement = mean of 1[argmax p = argmax q]
    regression        W_p^p            = integral_0^1 |F^-1(u) - G^-1(u)|^p du

`closeness` scores predictions against a reference; `wasserstein` is the distance between predictive mixtures;
`reference_set` is a reference that was stored: the predictions of checked chains for the rows of a data set.

Called by `caveat.fidelity`, by `evaluate.scoring` where a reference is given, and by `reference`, which builds stored
sets.
"""

from caveat.evaluate.fidelity.closeness import Fidelity, fidelity, fidelity_on, noise_floor, on_cpu, some_draws
from caveat.evaluate.fidelity.reference_set import ReferenceSet, chain_tensors, identity, read_reference

__all__ = [
    "Fidelity",
    "ReferenceSet",
    "chain_tensors",
    "fidelity",
    "fidelity_on",
    "identity",
    "noise_floor",
    "on_cpu",
    "read_reference",
    "some_draws",
]
