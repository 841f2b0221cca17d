"""A network's Jacobian itself as features, where rows x outputs x weights are few enough to be held.

    phi[n, c] = d f_c(x_n, w) / d w,   [n, m, d]

Each product is then one of matrices, and a system over rows and outputs is solved exactly (`linear_model.exact`): with
the answer tokens of some hundred texts, or an adapter of some ten thousand weights, sooner than by conjugate gradients
through the network. The gradients of rows come from a backward pass per output for a batch of rows.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from caveat.engine.cost import refuse_if_too_large
from caveat.engine.linear_model import DenseFeatures, NoisePrecision, RowBlock, apply_factor_transposed
from caveat.engine.linearised.jacobian_features import NetworkFeatures
from caveat.engine.row_gradients import Jacobian, RowPass

__all__ = ["PRODUCTS", "HeldFeatures", "holding_pays"]

_SIDE = {"cpu": 5000, "cuda": 12_000}  # of the matrix over rows and outputs, which a run keeps
_HELD_BYTES = {"cpu": 2**30, "cuda": 2**33}
PRODUCTS = 3000  # of one vector with the curvature, that finding a precision and 64 samples takes without
_NUMBERS = 2**24  # of rows' gradients that are scaled at a time
_FEW_FLOPS = 2e11  # a few seconds on a core: not worth counting


@dataclass(frozen=True)
class HeldFeatures:
    """Features in memory, with what a network's have beside the products."""

    dense: DenseFeatures
    why: str

    @classmethod
    def of_network(
        cls, features: NetworkFeatures, why: str, counted: Callable[[int, int], None] | None = None
    ) -> "HeldFeatures":
        """The gradients of all rows; `counted` hears of rows so far, of how many."""
        shape = (features.rows, features.outputs, features.size)
        needed = 2 * shape[0] * shape[1] * shape[2] * features.dtype.itemsize
        what = f"the Jacobian of {shape[0]:,} rows x {shape[1]:,} outputs for {shape[2]:,} weights"
        refuse_if_too_large(what, needed, features.device, "give the solver as ConjugateGradients()")
        x, _ = next(features.data.batches([torch.arange(min(3, features.rows))], features.device))
        jacobian = Jacobian(features.network.restricted(features.names), features.params, x)
        phi = torch.empty(shape, dtype=features.dtype, device=features.device)
        order = list(torch.arange(features.rows).split(jacobian.rows_at_once(columns=features.outputs)))
        for index, (x, _) in zip(order, features.data.batches(order, features.device), strict=True):
            row_pass: RowPass = jacobian.at(x)
            phi[index.to(phi.device)] = row_pass.rows()
            if counted is not None:
                counted(int(index[-1]) + 1, features.rows)
        finite = phi.isfinite().flatten(1).all(1)
        if not finite.all():
            row = int(finite.long().argmin())
            raise ValueError(
                f"the features of row {row} give products that hold NaN or infinity: the network's derivatives there "
                "do; look at that row's inputs"
            )
        return cls(DenseFeatures(phi), why)

    @property
    def size(self) -> int:
        """The number of weights, d."""
        return self.dense.size

    @property
    def rows(self) -> int:
        """The number of rows, n."""
        return self.dense.rows

    @property
    def outputs(self) -> int:
        """The number of outputs of a row, m."""
        return self.dense.outputs

    @property
    def dtype(self) -> torch.dtype:
        """The type of vectors of weights."""
        return self.dense.dtype

    @property
    def device(self) -> torch.device:
        """The device that products are computed on."""
        return self.dense.device

    def blocks(self, order: Sequence[Tensor] | None = None) -> Iterator[RowBlock]:
        """All rows in order, in blocks; or one block for each tensor of row numbers."""
        return self.dense.blocks(order)

    def of(self, rows: Tensor) -> "HeldFeatures":
        """The features of some of the rows."""
        return HeldFeatures(DenseFeatures(self.dense.phi[rows.to(self.device)]), self.why)

    def curvature_diagonal(self, noise: NoisePrecision, counted: Callable[[int, int], None] | None = None) -> Tensor:
        """The diagonal of sum_i J_i^T B_i J_i, exact, [d]; `counted` hears of rows so far, of how many."""
        total = torch.zeros(self.size, dtype=torch.float64, device=self.device)
        step = max(1, _NUMBERS // (self.outputs * self.size))
        for block in self.blocks(torch.arange(self.rows, device=self.device).split(step)):
            phi = self.dense.phi[block.index].permute(2, 0, 1)  # [d, B, m]
            total += apply_factor_transposed(noise.factor(block), phi).double().square().sum((1, 2))
            if counted is not None:
                counted(int(block.index[-1]) + 1, self.rows)
        return total.to(self.dtype)

    def way(self) -> dict[str, str]:
        """Which products ran, and why; for `info`."""
        return {"products": "the Jacobian itself, held in memory", "why": self.why}


def holding_pays(features: NetworkFeatures, width: int, forward_flops: float) -> str:
    """Why the Jacobian should be held, where a system over rows and `width` outputs is cheaper than products; or "".

    Only sizes and the kind of device decide, so that a run that goes on after it was killed goes the same way.
    """
    n, m, d = features.rows, features.outputs, features.size
    side = n * width
    held = 2 * n * m * d * features.dtype.itemsize
    if features.float16 or side > _SIDE[features.device.type] or held > _HELD_BYTES[features.device.type]:
        return ""
    dense = 3 * m * n * forward_flops + 2 * side * n * m * d + 10 * side**3 / 3
    through = 4 * PRODUCTS * n * forward_flops
    if dense > max(through, _FEW_FLOPS):
        return ""
    return f"{side:,} rows x outputs are few: an exact solve over them takes {dense:.1e} operations"
