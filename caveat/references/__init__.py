"""References: what HMC says of a stated network, prior and data set, to measure cheaper posteriors against.

A recipe says how a reference is built; a built one is a folder of predictions. The one for digits lies beside this
file. Called by the bench, the demo and `caveat reference`.
"""

from caveat.references.hmc_references import (
    PACKAGED,
    RECIPES,
    ReferenceRecipe,
    build_reference,
    find_references,
    load_reference,
    reference_task,
)

__all__ = [
    "PACKAGED",
    "RECIPES",
    "ReferenceRecipe",
    "build_reference",
    "find_references",
    "load_reference",
    "reference_task",
]
