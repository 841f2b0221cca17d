"""Row gradients of a last layer without a watched pass: an ordinary pass, and what the layer was given on the way.

    f = W phi + b      df_d / dW_d = phi,  df_d / db_d = 1

For layers that are plain `nn.Linear` modules, called once a pass, whose outputs are the network's. Each pass sees for
itself whether that holds; where it does not, the general way is there.
"""

from typing import Any

import torch
from torch import Tensor, nn

from caveat.batches import Inputs
from caveat.copies import same_storage
from caveat.engine.row_gradients.jacobian import Jacobian
from caveat.network import Network, Params

__all__ = ["LastLayer"]


class LastLayerRows:
    """What a `RowPass` gives of rows, where all chosen weights are those of the last layer."""

    def __init__(self, outputs: Tensor, phi: Tensor, order: Tensor) -> None:
        self.outputs, self._phi, self._order = outputs, phi, order

    def features(self) -> Tensor:
        """Phi [B, I], with a one where there is a bias."""
        return self._phi

    def times(self, matrix: Tensor) -> Tensor:
        """J times a matrix [n, m]: [B, D, m]."""
        blocks = matrix.to(self._phi.dtype)[self._order.T]  # [I, D, m]
        return (self._phi @ blocks.flatten(1)).unflatten(1, blocks.shape[1:])

    def rows(self) -> Tensor:
        """J itself, [B, D, n]."""
        width = self._order.shape[0]
        total = self._phi.new_zeros(len(self._phi), width, self._order.numel())
        for output, places in enumerate(self._order):
            total[:, output, places] = self._phi
        return total


class LastLayer:
    """Passes through a network that holds the point's weights; one thread at a time."""

    def __init__(self, network: Network, params: Params, name: str, order: Tensor, has_bias: bool) -> None:
        self._network, self._order, self._has_bias = network.holding(params), order, has_bias
        self._calls: list[tuple[Tensor, Tensor, int]] = []
        self._network.module.get_submodule(name).register_forward_hook(self._called)

    @classmethod
    def of(cls, jacobian: Jacobian) -> "LastLayer | None":
        """The last layer that a Jacobian is of; None where it is of other weights, or the layer is of another kind."""
        if jacobian.order is None or jacobian.bfloat16:
            return None
        module, weight = jacobian.network.module, jacobian.plan.last[0]
        name = weight.removesuffix(".weight")
        if name == weight or type(module.get_submodule(name)) is not nn.Linear:
            return None
        return cls(jacobian.network, jacobian.params, name, jacobian.order, len(jacobian.plan.last) > 1)

    def at(self, x: Inputs) -> LastLayerRows | None:
        """One pass over these rows; None where the layer's outputs are not the network's."""
        self._calls.clear()
        with torch.no_grad():
            outputs = self._network.evaluation_pass(x)
        if len(self._calls) != 1:
            return None
        phi, made, version = self._calls.pop()
        if phi.ndim != 2 or not same_storage(made, outputs) or made._version != version:
            return None
        phi = torch.cat([phi, torch.ones_like(phi[:, :1])], 1) if self._has_bias else phi
        return LastLayerRows(outputs, phi, self._order)

    def _called(self, layer: nn.Module, given: Any, made: Tensor) -> None:
        self._calls.append((given[0], made, made._version))
