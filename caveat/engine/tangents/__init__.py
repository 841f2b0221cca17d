"""Tangents: products of a network's Jacobian, and of its transpose, with K vectors at once.

    push: z [K, d] -> J z [K, B, m]        pull: v [K, B, m] -> J^T v [K, d]

`AutogradProducts` takes any module. `Program` is quicker where a network is the same list of operations for all inputs
of a shape: it is traced into steps (`tracing`), each with the linear part of its operation (`operation_rules`,
`product_rules`, `image_layouts`), and tangents go through it as sums that are added up as late as possible
(`lazy_sums`); a `call_site` is what a rule is asked about. `Programs` chooses between them (`choice`). Called by the
features of a linearised network.
"""

from caveat.engine.tangents.autograd_products import AutogradProducts, PassFacts, rounding
from caveat.engine.tangents.choice import Products, Programs, structure
from caveat.engine.tangents.program import Program

__all__ = ["AutogradProducts", "PassFacts", "Products", "Program", "Programs", "rounding", "structure"]
