"""H = F^T F over chosen weights, summed from pieces of F a few thousand rows at a time, the lower triangle only.

For a linear layer f = W phi + b that makes the outputs, F^T F is a sum of Kronecker products,

    H = sum_n fisher_n (x) phi_n phi_n^T,     fisher_n [D, D] the Fisher information of the outputs,

which takes products with phi in the place of products with gradients.

A GPU multiplies bfloat16 an order of magnitude faster than float32. Where three such products take less time than one,
which is measured, F is split into what bfloat16 holds of it and what that leaves, F = A + B, and

    F^T F = A^T A + A^T B + B^T A + B^T B,     |B| <= 2^-9 |F|, so that the last term is left out

is off by some 4e-6 of the root of its diagonal entries, where float32 is by 2e-7 and bfloat16 alone by 2e-4.
"""

import functools
import time

import torch
from torch import Tensor

from caveat.engine.cost import working_numbers
from caveat.engine.laplace.memory import GRAM_ROWS
from caveat.engine.row_gradients import add_products, is_large, mirror, split, sums_in_float32

__all__ = ["GramMatrix"]

IN_CACHE = 2**18  # numbers that a processor reads again without going to memory


class GramMatrix:
    """A matrix H [n, n] to which F^T F of pieces of F [rows, n] is added.

    Args:
        total: where H is summed, zeros at first.
        order: for the weights of a last layer (see `RowPass.features`), where the weights of each output are, [D, I];
            they are summed in the order of the outputs that they belong to.
    """

    def __init__(self, total: Tensor, order: Tensor | None) -> None:
        self.total, self.order = total, order
        self.waiting: list[Tensor] = []

    def add(self, f: Tensor) -> None:
        """Add F^T F of more rows [rows, n], which wait until there are enough of them."""
        self.waiting.append(f if self.order is None else f[:, self.order.flatten()])
        if sum(map(len, self.waiting)) >= GRAM_ROWS:
            self.flush()

    def add_outer(self, fisher: Tensor, phi: Tensor) -> None:
        """Add F^T F of a last layer: each row's Kronecker product of fisher [B, D, D] and phi phi^T, phi [B, I]."""
        phi = phi.to(self.total.dtype)
        (n, d, _), width = fisher.shape, phi.shape[1]
        total = self.total.view(d, width, d, width)
        numbers = min(working_numbers(phi), IN_CACHE) if phi.device.type == "cpu" else working_numbers(phi)
        step, before = max(1, numbers // (n * d * width)), max(1, numbers // (n * width))
        for start in range(0, d, step):
            stop = min(start + step, d)
            for first in range(0, stop, before):
                last = min(first + before, stop)
                scaled = fisher[:, start:stop, first:last, None] * phi[:, None, None]  # [B, outputs, outputs before, I]
                products = (phi.T @ scaled.flatten(1)).unflatten(1, scaled.shape[1:])
                total[start:stop, :, first:last] += products.transpose(0, 1)

    def flush(self) -> None:
        """Add what the waiting rows make to the lower triangle of H."""
        if not self.waiting:
            return
        f = torch.cat(self.waiting)
        f = f if self.total.dtype == torch.float32 else f.to(self.total.dtype)
        self.waiting = []
        single = self.total.dtype == f.dtype == torch.float32
        splits = single and is_large(self.total) and _splitting_pays(f.device)
        add_products(self.total, split(f) if splits else [(f, f)])

    def symmetric(self) -> Tensor:
        """The whole of H [n, n], both triangles, in the order of the weights."""
        mirror(self.total)
        if self.order is None:
            return self.total
        back = self.order.flatten().argsort()
        return self.total.index_select(0, back).index_select(1, back)


@functools.cache
def _splitting_pays(device: torch.device) -> bool:
    """Whether three products in bfloat16 are faster on a device than one in float32; never on a CPU."""
    if not sums_in_float32(device):
        return False
    try:
        return 3 * _seconds_of_product(device, torch.bfloat16) < _seconds_of_product(device, torch.float32)
    except torch.OutOfMemoryError:
        return False


def _seconds_of_product(device: torch.device, dtype: torch.dtype, size: int = 4096) -> float:
    """How long a product of square matrices takes, with sums in float32."""
    f = torch.ones(size, size, dtype=dtype, device=device)
    times = []
    for _ in range(3):
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        torch.mm(f.T, f, out_dtype=torch.float32) if dtype == torch.bfloat16 else torch.mm(f.T, f)
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return min(times)
