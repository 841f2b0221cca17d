"""The linear model of a network with a coordinate for each output of each row, where these are fewer than the weights.

    K = J S^2 J^T = L L^T   [N, N], N = rows x outputs;   J S theta and L t are alike if theta and t are N(0, 1 / alpha)

S are the units of the weights. What the network may say of the rows is the same in both, and so are the evidence, the
effective dimension, and the size of the posterior mean, |t| = |theta|. The prior precision is found without a pass
through the network, then, and samples of the weights are solved for by the same K (`linear_model.exact`).

K is summed from slices of the Jacobian. Rounding J to bfloat16 leaves a K that is the product of a matrix with itself:
as if every weight's derivatives were off by a part in a thousand, each by itself, which neither the sum over millions
of them nor the solves, whose residuals are taken through the network, notice under a prior that the evidence has found.
Under one that is given, and may be far weaker, what bfloat16 leaves of J counts as well.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from caveat.engine.cost import free_bytes, refuse_if_too_large, working_numbers
from caveat.engine.linear_model import EXACT_UP_TO, DenseFeatures
from caveat.engine.linearised.fisher_noise import LikelihoodNoise
from caveat.engine.linearised.held_features import PRODUCTS, HeldFeatures
from caveat.engine.linearised.jacobian_features import NetworkFeatures
from caveat.engine.linearised.linearised_network import NetworkModel
from caveat.engine.row_gradients import Jacobian, Plans, add_products, evenly, mirror, one_hot, split, sums_in_float32

__all__ = ["in_row_space", "outer_products", "row_space_pays"]

_SLICE_BYTES = {"cpu": 2**30, "cuda": 2**36}
_MATRICES = 8  # of this side, in float64, that are held at a time
_FASTER = {"cpu": 1, "cuda": 4}  # products of large matrices than passes through a network
_FACTORS = 10  # of the matrix under different priors
_AT_ONCE = {"cpu": 2**14, "cuda": 2**18}  # weights whose products are added at once, between which progress is told


def row_space_pays(features: NetworkFeatures, forward_flops: float) -> bool:
    """Whether a matrix over rows and outputs is sooner made than the products that it stands for.

    Only sizes decide, so that a run that goes on after it was killed goes the same way.
    """
    n, m, d, kind = features.rows, features.outputs, features.size, features.device.type
    side = n * m
    if features.float16 or side > min(EXACT_UP_TO[kind], d):  # errors of its passes are no rounding of each weight's
        return False
    if kind == "cuda":
        card = torch.cuda.get_device_properties(features.device).total_memory
        if 8 * _MATRICES * side**2 + _SLICE_BYTES["cuda"] // 8 > card:
            return False
    passes = (1 + 2 * m) * n * forward_flops * math.ceil(side * d * features.dtype.itemsize / _SLICE_BYTES[kind])
    matrices = side**2 * d + _FACTORS * side**3
    return passes + matrices / _FASTER[kind] < 4 * PRODUCTS * n * forward_flops


def outer_products(
    features: NetworkFeatures,
    scale: Tensor | None,
    counted: Callable[[int, int], None] | None = None,
    *,
    coarse: bool = False,
) -> Tensor:
    """K [N, N] in float64, for units [d] of the weights; a coarse one is from bfloat16 where a GPU has it.

    `counted` hears of weights so far, of how many: half of a slice are done when it is made, all when it is added.
    """
    n, m, d, device = features.rows, features.outputs, features.size, features.device
    short = features.dtype == torch.float32 and sums_in_float32(device)
    in_parts = short and not coarse
    dtype = torch.bfloat16 if short and coarse else features.dtype
    matrix, slice_bytes = 8 * (n * m) ** 2, min(_SLICE_BYTES["cpu"], n * m * d * dtype.itemsize)
    refuse_if_too_large(
        f"a matrix over {n:,} rows x {m:,} outputs, with its factors,",
        max(_MATRICES * matrix, 2 * matrix + slice_bytes),
        device,
        "give the solver as ConjugateGradients()",
    )
    total = torch.zeros(n * m, n * m, dtype=features.dtype, device=device)
    # The parts of a number are copies, of no more than a temporary tensor may hold.
    at_once = max(1, working_numbers(total) // (n * m)) if in_parts else _AT_ONCE[device.type]
    room = _SLICE_BYTES[device.type]
    if device.type == "cuda":
        room = min(room, (free_bytes(device) or room) // 2)
    slices = math.ceil(n * m * d * dtype.itemsize / room)
    network, plans = features.network.restricted(features.names), Plans()
    few, _ = next(features.data.batches([torch.arange(min(3, n))], device))
    counted = counted or (lambda done, of: None)
    for index in torch.arange(d).split(math.ceil(d / slices)):
        before = int(index[0])
        jacobian = Jacobian(network, features.params, few, index, plans=plans)
        part = torch.zeros(n, m, len(index), dtype=dtype, device=device)
        order = list(torch.arange(n).split(evenly(n, jacobian.rows_at_once(columns=1))))
        for rows, (x, _) in zip(order, features.data.batches(order, device), strict=True):
            row_pass, mine = jacobian.at(x), part[int(rows[0]) : int(rows[-1]) + 1]
            for output, v in enumerate(one_hot(row_pass.outputs)):
                row_pass.add_columns(v, mine[:, output])
            counted(before + len(index) * (int(rows[-1]) + 1) // (2 * n), d)
        if scale is not None:
            part *= scale[index.to(device)]
        added = 0
        for columns in part.flatten(0, 1).T.split(at_once):
            add_products(total, split(columns) if in_parts else [(columns, columns)])
            added += len(columns)
            counted(before + (len(index) + added) // 2, d)
        del part, columns  # before the next is made: two would be held at once
    mirror(total)
    finite = total.diagonal().isfinite()
    if not finite.all():
        row = int(finite.view(n, m).all(1).long().argmin())
        raise ValueError(
            f"the features of row {row} give products that hold NaN or infinity: the network's derivatives there do; "
            "look at that row's inputs"
        )
    return total.double()


def in_row_space(linear: NetworkModel, gram: Tensor) -> NetworkModel:
    """The same linear model with coordinates t, for K [N, N], which is overwritten."""
    features, noise = linear.features, linear.noise
    seen = linear.seen(linear.weights).flatten().double()
    # Rows that are alike, or weights fewer than they seem, leave K without an inverse: noise of no account gives one.
    added = torch.finfo(features.dtype).eps * gram.diagonal().mean().clamp_min(torch.finfo(gram.dtype).tiny)
    root, failed = torch.linalg.cholesky_ex(gram)
    while failed:
        gram.diagonal().add_(added)
        added *= 4
        root, failed = torch.linalg.cholesky_ex(gram)
    point = torch.linalg.solve_triangular(root, seen.unsqueeze(1), upper=False).squeeze(1)
    phi = DenseFeatures(root.unflatten(0, (features.rows, features.outputs)), block_rows=features.rows)
    targets = noise.targets.double() if noise.targets.is_floating_point() else noise.targets
    exact = LikelihoodNoise(noise.likelihood, noise.hyper, noise.outputs.double(), targets)
    return NetworkModel(HeldFeatures(phi, ""), exact, point, negligible=linear.negligible)
