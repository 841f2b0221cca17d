"""H = F^T F over chosen weights, summed from pieces of F a few thousand rows at a time, the lower triangle only.

For a linear layer f = W phi + b that makes the outputs, F^T F is a sum of Kronecker products,

    H = sum_n fisher_n (x) phi_n phi_n^T,     fisher_n [D, D] the Fisher information of the outputs,

which takes products with phi in the place of products with gradients.
"""

import torch
from torch import Tensor

from caveat.engine.cost import working_numbers
from caveat.engine.laplace.memory import GRAM_ROWS

__all__ = ["GramMatrix"]

GRAM_BLOCK = 4096  # columns of H that are updated at once


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
        step = max(1, working_numbers(phi) // (n * d * width))
        for start in range(0, d, step):
            stop = min(start + step, d)
            scaled = fisher[:, start:stop, :stop, None] * phi[:, None, None]  # [B, outputs, outputs before, I]
            products = (phi.T @ scaled.flatten(1)).unflatten(1, scaled.shape[1:])
            total[start:stop, :, :stop] += products.transpose(0, 1)

    def flush(self) -> None:
        """Add what the waiting rows make to the lower triangle of H."""
        if not self.waiting:
            return
        f = torch.cat(self.waiting)
        f = f if self.total.dtype == torch.float32 else f.to(self.total.dtype)
        self.waiting = []
        n = len(self.total)
        for start in range(0, n, GRAM_BLOCK):
            stop = min(start + GRAM_BLOCK, n)
            target = self.total[start:, start:stop]
            if f.dtype == target.dtype:
                target.addmm_(f[:, start:].T, f[:, start:stop])
            elif f.device.type == "cuda" and f.dtype == torch.bfloat16 and target.dtype == torch.float32:
                target += torch.mm(f[:, start:].T, f[:, start:stop], out_dtype=target.dtype)
            else:
                target.addmm_(f[:, start:].T.to(target.dtype), f[:, start:stop].to(target.dtype))

    def symmetric(self) -> Tensor:
        """The whole of H [n, n], both triangles, in the order of the weights."""
        n = len(self.total)
        for start in range(0, n, GRAM_BLOCK):
            stop = min(start + GRAM_BLOCK, n)
            square = self.total[start:stop, start:stop]
            square.tril_().diagonal().mul_(0.5)
            square.copy_(square + square.T)
            self.total[start:stop, stop:] = self.total[stop:, start:stop].T
        if self.order is None:
            return self.total
        back = self.order.flatten().argsort()
        return self.total.index_select(0, back).index_select(1, back)
