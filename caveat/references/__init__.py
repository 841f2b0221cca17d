"""References: what HMC says of a stated network, prior and data set, to measure cheaper posteriors against.

A recipe says how a reference is built; a built one is a folder of predictions. The one for digits lies beside this
file. Predictions that others published are imported, or fetched where they are known by name. Called by the bench, the
demo and `caveat reference`.
"""

from caveat.references.finding import find_references, load_reference
from caveat.references.hmc_references import RECIPES, ReferenceRecipe, build_reference, reference_task
from caveat.references.places import PACKAGED
from caveat.references.published import PUBLISHED, Origin, fetch_reference, import_reference

__all__ = [
    "PACKAGED",
    "PUBLISHED",
    "RECIPES",
    "Origin",
    "ReferenceRecipe",
    "build_reference",
    "fetch_reference",
    "find_references",
    "import_reference",
    "load_reference",
    "reference_task",
]
