"""Sparse layers: linear and convolutional layers that hold few of their weights, and compute with those alone.

    y = sum_k m_k x_k + b,   or a draw of it, N(sum_k m_k x_k, sum_k s_k^2 x_k^2) + b

    kernels             y = W x for W given by values and places, and the gradient at those places
    substitute          a network with such layers in place of its own
    held_weights        weights of such a layer, or of a parameter that is drawn before every pass
    weight_reads        the weight of such a layer for a module that reads it
    weight_layout       their weights in flat tensors, and where each is in its whole weight
    densities           how many weights each layer has, when some are exchanged, and how many
    removal_criteria    which weights of a factorised Gaussian are worth keeping
    exchange            what training asks of an exchange of weights
    accounting          operations, parameters and bytes, layer by layer
    batchnorm_folding   BatchNorm as part of the layer before it, for inference

Called by the variational methods, by RigL, by chains over sparse networks, by the rooms channels, variational and
sparse_chains, and by `deploy`.
"""

from caveat.engine.sparse.accounting import (
    Account,
    Cost,
    FlopsByCounts,
    LayerCost,
    Scheme,
    channel_account,
    flops_by_counts,
    network_account,
    training_account,
)
from caveat.engine.sparse.batchnorm_folding import folded
from caveat.engine.sparse.densities import (
    Allocation,
    Schedule,
    active_counts,
    default_density,
    default_interval,
    dense_layers,
    exchange_count,
    replacement_rate,
)
from caveat.engine.sparse.exchange import Exchange, NoExchange, StepBatch
from caveat.engine.sparse.held_weights import Noise, drawn_weights
from caveat.engine.sparse.kernels import LayerGeometry
from caveat.engine.sparse.removal_criteria import CRITERIA, Criterion, keep_scores
from caveat.engine.sparse.substitute import (
    SparseLayer,
    Substitute,
    all_weights,
    inferred_weights,
    left_out,
    plain_layers,
    sparse_layers,
    stored_counts,
    substitute_and_means,
)
from caveat.engine.sparse.weight_layout import (
    ActiveWeights,
    WeightLayout,
    column_indices,
    parameter_name,
    random_layout,
    weight_name,
)

__all__ = [
    "CRITERIA",
    "Account",
    "ActiveWeights",
    "Allocation",
    "Cost",
    "Criterion",
    "Exchange",
    "FlopsByCounts",
    "LayerCost",
    "LayerGeometry",
    "NoExchange",
    "Noise",
    "Schedule",
    "Scheme",
    "SparseLayer",
    "StepBatch",
    "Substitute",
    "WeightLayout",
    "active_counts",
    "all_weights",
    "channel_account",
    "column_indices",
    "default_density",
    "default_interval",
    "dense_layers",
    "drawn_weights",
    "exchange_count",
    "flops_by_counts",
    "folded",
    "inferred_weights",
    "keep_scores",
    "left_out",
    "network_account",
    "parameter_name",
    "plain_layers",
    "random_layout",
    "replacement_rate",
    "sparse_layers",
    "stored_counts",
    "substitute_and_means",
    "training_account",
    "weight_name",
]
