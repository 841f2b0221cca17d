"""Tangents: products of a network's Jacobian, and of its transpose, with K vectors at once.

    push: z [K, d] -> J z [K, B, m]        pull: v [K, B, m] -> J^T v [K, d]

`Program` is what others use: the network is traced into a list of steps (`tracing`), each with the linear part of its
operation (`operation_rules`, `product_rules`, `image_layouts`), and tangents go through it as sums that are added up
as late as possible (`lazy_sums`); a `call_site` is what a rule is asked about. Called by the features of a linearised
network.
"""

from caveat.engine.tangents.program import Program

__all__ = ["Program"]
