"""Networks, rows, and the gradients of each row alone, for tests of the Jacobian's parts."""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from caveat import Gaussian, Network
from caveat.batches import Inputs, count_rows, map_tensors
from caveat.engine.row_gradients.jacobian import Jacobian

ROWS = 4
RNG = torch.Generator().manual_seed(0)
TWO: dict[str, Any] = {"a": nn.Linear(4, 3), "b": nn.Linear(3, 3)}


class Custom(nn.Module):
    """A forward pass as a function of the module and its inputs; parts that are shapes become parameters."""

    def __init__(self, run: Callable[..., Tensor], **parts: nn.Module | tuple[int, ...]) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(torch.zeros(part)) if isinstance(part, tuple) else part)

    def forward(self, *args: Any, **named: Any) -> Tensor:
        return self.run(self, *args, **named)


def normal(*shape: int, rows: int = ROWS) -> Tensor:
    return torch.randn(rows, *shape, generator=RNG, dtype=torch.float64)


def tokens(length: int) -> Tensor:
    return torch.randint(7, (ROWS, length), generator=RNG)


def swapped(x: Tensor) -> Tensor:
    return x.transpose(0, 1)


def chain(*parts: nn.Module) -> nn.Module:
    def run(self: Any, x: Tensor) -> Tensor:  # two outputs of whatever the parts make
        h = self.body(x).tanh().flatten(1)
        return h @ torch.arange(2 * h.shape[1]).sin().to(h).reshape(-1, 2)

    return Custom(run, body=nn.Sequential(*parts))


def frames(self: Any, x: Tensor) -> Tensor:  # time x rows
    return self.b(self.a(swapped(x).flatten(0, 1)).tanh().unflatten(0, (-1, len(x))).sum(0))


def network(module: nn.Module, parameters: Any = "*", dtype: torch.dtype = torch.float64) -> Network:
    """With all parameters and statistics drawn, so that none is zero or one."""
    module, rng = copy.deepcopy(module).double(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in module.parameters():
            p.normal_(generator=rng).div_(math.sqrt(p[0].numel()) if p.ndim > 1 else 1)
        for buffer in (b for b in module.buffers() if b.is_floating_point()):
            buffer.uniform_(0.5, 2, generator=rng)
    return Network(module.to(dtype), Gaussian(), parameters=parameters)


def reference(net: Network, x: Inputs) -> Tensor:
    """[B, D, P] by a backward pass for every output of every row alone."""
    found = []
    for i in range(count_rows(x)):
        own = {name: value.requires_grad_() for name, value in net.params().items()}
        alone = map_tensors(lambda t, i=i: t[i : i + 1] if t.ndim else t, x)
        for output in net(own, alone).flatten():
            options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
            found.append(torch.cat([g.flatten() for g in torch.autograd.grad(output, list(own.values()), **options)]))
    return torch.stack(found).unflatten(0, (count_rows(x), -1))


def assert_close(found: Tensor, wanted: Tensor, tolerance: float = 1e-10) -> None:
    size = float(wanted.abs().max())
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance * size + 1e-14, check_dtype=False)


def assert_right(jacobian: Jacobian, x: Inputs, wanted: Tensor, tolerance: float = 1e-10) -> None:
    """Rows, columns, blocks and squares of all weights."""
    row_pass, names = jacobian.at(x), jacobian.network.names
    assert_close(row_pass.rows(), wanted, tolerance)
    cotangents = [torch.randn(row_pass.outputs.shape, generator=RNG).to(row_pass.outputs) for _ in range(2)]
    v = torch.stack([v.reshape(len(v), -1) for v in cotangents], 1).to(wanted)
    assert_close(row_pass.columns(cotangents[0]), (v @ wanted)[:, 0], tolerance)
    by_name = {name: row_pass.outputs.new_zeros(len(v), 2, jacobian.sizes[name]) for name in names}
    for name, rows, block in row_pass.blocks(cotangents):
        by_name[name][rows] += block
    assert_close(torch.cat(list(by_name.values()), 2), v @ wanted, tolerance)
    squares = row_pass.squares(cotangents[1])
    assert all(squares[name].shape == jacobian.params[name].shape for name in names)
    found = torch.cat([squares[name].flatten() for name in names])
    assert_close(found, (v @ wanted)[:, 1].square().sum(0), tolerance)
