"""Copies of modules: what inference writes is copied, what it never writes is shared with the module that was given.

A network works on a copy, so that the user's module keeps its weights and its mode. Parameters that the user froze
(`requires_grad=False`) are most of a model with adapters, and nothing here writes them: `sharing_copy` lets the copy
have their storage, `FrozenBase` notices when somebody else writes it, and says in a digest which base it is. `Network`
is who calls this.
"""

from caveat.copies.frozen_base import FrozenBase
from caveat.copies.module_calls import called_with
from caveat.copies.module_copies import (
    copied,
    frozen_parameter,
    moved,
    same_storage,
    sharing_copy,
    unwrapped,
    with_stored_values,
)

__all__ = [
    "FrozenBase",
    "called_with",
    "copied",
    "frozen_parameter",
    "moved",
    "same_storage",
    "sharing_copy",
    "unwrapped",
    "with_stored_values",
]
