"""A network's Jacobian at fixed weights as features of a linear model, by products with K vectors at once.

    block.forward(z)  = J_B z      [K, d] -> [K, B, m]      jvp
    block.backward(v) = J_B^T v    [K, B, m] -> [K, d]      vjp, summed over the block's rows

In float16 products round as in TF32, which GPUs have for float32, at twice its rate. (bfloat16 has three bits fewer,
and solvers stand still with it.) Its numbers range from 6e-8 to 65,504, so each vector is multiplied by a power
of two, and the product divided by it.

Parameters lie one after the other in the order of `names`; the outputs of a row are flattened. The forward pass of a
block is run once, for products both ways; n rows take no more memory than a block of them.
"""

import copy
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from caveat.batches import Inputs, count_rows, map_tensors
from caveat.engine.cost import free_bytes
from caveat.engine.linear_model import NoisePrecision, apply_factor
from caveat.engine.linearised.rows_alone import facts_of_rows
from caveat.engine.row_gradients import Jacobian, Plans, sums_in_float32
from caveat.engine.tangents import AutogradProducts, Products, Programs, structure
from caveat.engine.torch_settings import refuse_inference_mode
from caveat.network import Network, Params
from caveat.rows import Rows

__all__ = ["NetworkBlock", "NetworkFeatures"]

# Numbers in the largest tangents of eight vectors and one block: what the caches hold, what fills a GPU.
_CPU_NUMBERS, _GPU_NUMBERS = 2**22, 2**29
_BESIDE_NUMBERS = {"cpu": 2**26, "cuda": 2**29}  # of the factors of the noise, which are as many as outputs squared
_PASS_NUMBERS = {"cpu": 2**26, "cuda": 2**31}  # that the graphs of a block may keep, where products are autograd's
LONG_SECONDS = 10  # of tracing, to be told
FEW_ROWS = 16  # products of so few are sooner made by autograd than by a program that is still to be traced


class NetworkFeatures:
    """The Jacobian of a network's outputs at fixed weights, in evaluation mode.

    Products are those of a traced program where that is proven to be the network, else autograd's (`tangents`).

    Args:
        network: the network.
        params: where it is linearised (with buffers, as a draw has them).
        rows: the data.
        names: the parameters of the linear model; all of the network's unless given.
        block_rows: rows in a block of a pass in order; chosen by memory unless given.
        float16: make convolutions and products of matrices in float16.
        programs: programs that were traced before, and where new ones are kept.
        row_numbers: numbers that the noise of a row takes beside its tangents.
        padded: fill blocks with copies of their first row up to a power of two, so that few shapes need tracing.
    """

    def __init__(
        self,
        network: Network,
        params: Params,
        rows: Rows,
        *,
        names: Sequence[str] | None = None,
        block_rows: int | None = None,
        float16: bool = False,
        programs: Programs | None = None,
        row_numbers: int = 0,
        padded: bool = False,
    ) -> None:
        refuse_inference_mode()
        self.network, self.params, self.float16 = network, params, float16
        self._programs, self._plans = programs or Programs(), Plans()
        self.names = network.names if names is None else tuple(names)
        unknown = [name for name in self.names if name not in params]
        if unknown or not self.names:
            raise ValueError(f"names={list(self.names)[:8]} must be among the parameters: {list(params)[:8]} ...")
        self.dtype, self.device = network.dtype, network.device
        self.data, self.rows = rows.on(self.device), len(rows)
        self.size = sum(params[name].numel() for name in self.names)
        first = torch.arange(min(2, self.rows))
        x, _ = next(self.data.batches([first], self.device))
        key = (self.names, structure(x))
        facts = self._programs.facts(params, key, lambda: facts_of_rows(network, params, self.names, x))
        self.general = AutogradProducts(network, params, self.names, facts, float16)
        self.output_shape = facts.output_shape  # of a row
        self.outputs = self.output_shape.numel()
        each = facts.largest  # numbers of one row in the largest tangent
        # About a dozen such tangents, of four bytes a number, are there at a time.
        room = (free_bytes(self.device) or 0) // 64
        numbers = min(_GPU_NUMBERS, room) if self.device.type == "cuda" else _CPU_NUMBERS
        # Fewer rows than this, and a block costs more for the tangents of weights than for those of activations.
        enough = 2 * self.size // facts.activations
        self.most_rows = max(1, _BESIDE_NUMBERS[self.device.type] // max(row_numbers, 1))
        wanted = max(1, numbers // (8 * each), min(enough, numbers // each))
        kept = 3 * facts.activations  # by a pass of autograd's, the one back, and that of the products
        self.most_rows = max(1, min(self.most_rows, _PASS_NUMBERS[self.device.type] // kept))
        self.traced, self.padded = self.rows > FEW_ROWS, padded
        self.block_rows = block_rows or min(wanted, self.most_rows)
        self.norm = torch.cat([params[name].flatten() for name in self.names]).norm().clamp_min(1e-30)
        self.at_once = max(1, 2 * numbers // (self.block_rows * each))  # vectors

    def blocks(self, order: Sequence[Tensor] | None = None) -> Iterator["NetworkBlock"]:
        """All rows in order, in blocks of a fixed size; or one block for each tensor of row numbers."""
        chosen = list(torch.arange(self.rows).split(self.block_rows)) if order is None else list(order)
        for index, (x, y) in zip(chosen, self.data.batches(chosen, self.device), strict=True):
            yield NetworkBlock(self, index.to(self.device), x, y)

    def of(self, rows: Tensor) -> "NetworkFeatures":
        """The features of some of the rows."""
        part = copy.copy(self)
        part.data, part.rows = self.data.part(rows.to(self.data.indices.device)), len(rows)
        return part

    def products(self, x: Inputs) -> Products:
        """The way to products for rows of this shape."""
        traced = self.traced and count_rows(x) > FEW_ROWS
        return self._programs.products(self.general, self.params, x) if traced else self.general

    def filled(self, rows: int) -> int:
        """How many rows a block of so many is given."""
        worth_it = self.padded and rows > FEW_ROWS and not self._programs.why_not
        return min(1 << (rows - 1).bit_length(), max(self.block_rows, rows)) if worth_it else rows

    def way(self) -> dict[str, str]:
        """Which products ran, and why; for `info`."""
        general, programs = f"autograd: {self.general.facts.way}", self._programs
        took = f" (traced in {programs.seconds:.0f} s)" if programs.seconds > LONG_SECONDS else ""
        if not self.traced:
            return {"products": general, "why": f"{self.rows} rows are few"}
        if programs.why_not:
            return {"products": general, "why": programs.why_not + took}
        if programs.full:
            return {"products": f"traced programs, and {general}", "why": "inputs have more than eight shapes" + took}
        return {"products": "a traced program", "why": "it is the same list of operations for all rows" + took}

    def curvature_diagonal(self, noise: NoisePrecision, counted: Callable[[int, int], None] | None = None) -> Tensor:
        """The diagonal of sum_i J_i^T B_i J_i, by all outputs, [d]; `counted` hears of rows so far, of how many."""
        x, _ = next(self.data.batches([torch.arange(min(3, self.rows))], self.device))
        network = self.network.restricted(self.names)
        jacobian = Jacobian(network, self.params, x, bfloat16=self.float16, plans=self._plans)
        total = torch.zeros(self.size, dtype=torch.float64, device=self.device)
        products = torch.bfloat16 if self.dtype == torch.float32 and sums_in_float32(self.device) else None
        for block in self.blocks(torch.arange(self.rows).split(min(jacobian.rows_at_once(), self.most_rows))):
            factor = noise.factor(block)
            row_pass = jacobian.at(block.x)
            for unit in torch.eye(noise.width, dtype=factor.dtype, device=factor.device):
                v = apply_factor(factor, unit.expand(1, len(factor), -1))[0]
                squares = row_pass.squares(v.reshape(row_pass.outputs.shape).contiguous(), dtype=products)
                total += torch.cat([squares[name].flatten() for name in self.names])
            if counted is not None:
                counted(int(block.index[-1]) + 1, self.rows)
        return total.to(self.dtype)


class NetworkBlock:
    """Some rows, and the network's forward pass there."""

    def __init__(self, features: NetworkFeatures, index: Tensor, x: Inputs, targets: Tensor) -> None:
        self.index, self.x, self.targets = index, x, targets
        self.features, self.at_once, self.rows = features, features.at_once, len(index)
        self.beside = features.filled(self.rows) - self.rows
        filled = _with_copies(x, self.beside) if self.beside else x
        self.products = features.products(filled)
        self.saved, outputs = self.products.run(filled)
        self.outputs = outputs[: self.rows]  # [B, m]
        if features.float16 and not self.outputs.isfinite().all():
            row = int(index[(~self.outputs.isfinite()).any(1).nonzero()[0]])
            raise ValueError(
                f"the network's numbers at row {row} leave the range of float16, which ends at 65,504: use "
                "arithmetic='full', or inputs of a smaller scale"
            )

    def forward(self, z: Tensor) -> Tensor:
        """J z, [K, d] -> [K, B, m]."""
        return torch.cat([self._pushed(part) for part in z.split(self.at_once)])[:, : self.rows]

    def backward(self, v: Tensor) -> Tensor:
        """J^T v, [K, B, m] -> [K, d]."""
        if self.beside:
            v = torch.cat([v, v.new_zeros(len(v), self.beside, v.shape[2])], 1)
        parts = [self._pulled(part) for part in v.split(self.at_once)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _pushed(self, z: Tensor) -> Tensor:
        if not self.features.float16:
            return self.products.push(self.saved, z)
        return _in_range(lambda z: self.products.push(self.saved, z), z, z.norm(dim=1) / self.features.norm)

    def _pulled(self, v: Tensor) -> Tensor:
        if not self.features.float16:
            return self.products.pull(self.saved, v)
        return _in_range(lambda v: self.products.pull(self.saved, v), v, v.abs().amax((1, 2)))


def _with_copies(x: Inputs, count: int) -> Inputs:
    """The rows, and so many copies of the first."""
    return map_tensors(lambda t: torch.cat([t, t[:1].expand(count, *t.shape[1:])]) if t.ndim else t, x)


def _in_range(product: Callable[[Tensor], Tensor], given: Tensor, size: Tensor) -> Tensor:
    """A linear product in float16 of K vectors, each by a power of two that takes its size [K] to about one."""
    power = torch.where(size > 0, size.log2().round(), 0.0)
    for less in (0, 8, 16):  # where that is still too much
        scale = torch.exp2(-power - less)
        products = product(given * scale.view(-1, *[1] * (given.ndim - 1)))
        if products.isfinite().all():
            break
    return products / scale.view(-1, *[1] * (products.ndim - 1))
