"""Sparse layers: linear and convolutional layers that hold few of their weights, and compute with those alone.

    kernels             y = W x for W given by values and places, and the gradient at those places
    sparse_layers       a network with such layers in place of its own
    densities           how many weights each layer has, and how many are exchanged as training goes on
    removal_criteria    which weights of a factorised Gaussian are worth keeping
    accounting          operations, parameters and bytes, layer by layer
    batchnorm_folding   BatchNorm as part of the layer before it, for inference

Called by the variational methods, by RigL, by chains over sparse networks, and by `deploy`.
"""

from caveat.engine.sparse.accounting import Account, Cost, LayerCost, Scheme, account, flops_by_counts
from caveat.engine.sparse.batchnorm_folding import folded
from caveat.engine.sparse.densities import Allocation, counts, dense_layers, replaced, replacement_rate
from caveat.engine.sparse.kernels import Geometry
from caveat.engine.sparse.removal_criteria import Criterion, keep_scores
from caveat.engine.sparse.sparse_layers import (
    Layout,
    Substitute,
    candidates,
    column_indices,
    left_out,
    sparse_layers,
    weight_name,
)

__all__ = [
    "Account",
    "Allocation",
    "Cost",
    "Criterion",
    "Geometry",
    "LayerCost",
    "Layout",
    "Scheme",
    "Substitute",
    "account",
    "candidates",
    "column_indices",
    "counts",
    "dense_layers",
    "flops_by_counts",
    "folded",
    "keep_scores",
    "left_out",
    "replaced",
    "replacement_rate",
    "sparse_layers",
    "weight_name",
]
