"""Predictions from active weights: passes through sparse layers, and a module with the weights of one draw."""

from collections.abc import Iterator
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from caveat.batches import Inputs, move, slices
from caveat.engine.predictors import PIECE_ROWS, Replicas
from caveat.engine.sparse import Substitute, WeightLayout, weight_name
from caveat.engine.variational.layer_state import LayerState
from caveat.likelihoods import Hyper
from caveat.network import Network, Params

__all__ = ["LayerPrediction", "LayerPredictor", "module_at"]

LayerPrediction = Literal["draws", "local"]  # one set of weights for all rows, or outputs drawn row by row


class LayerPredictor:
    """Predicts from active weights, through replicas of a network with sparse layers.

    Args:
        state: what the posterior keeps.
        network: the wide network.
        local: draw outputs row by row (local reparameterisation) instead of one set of weights for all rows.
    """

    def __init__(self, state: LayerState, network: Network, local: bool = False) -> None:
        self._state, self._network = state, network
        self._local = local and state.log_std is not None
        self._substitutes = Replicas(self._substitute)

    def draws(self, n: int, rng: torch.Generator) -> Iterator[Params]:
        """Whole weights of n draws, zero where there are none."""
        layout = self._state.layout(self._state.network(self._network))
        for _ in range(n):
            yield self._state.whole_params(self._network, layout, rng)

    def outputs(self, x: Inputs, n: int, rng: torch.Generator) -> tuple[Tensor, Hyper]:
        """Outputs of n passes through sparse layers, [S, B, ...], and the hyper."""
        state, device, outputs = self._state, self._network.device, []
        with torch.no_grad(), self._substitutes.lent() as substitute:
            if self._local:
                seed = int(torch.randint(2**62, (), generator=rng))
                substitute.draw_noise(partial(_normals_like, torch.Generator(device).manual_seed(seed)))
            for _ in range(n):
                if self._local and state.log_std is not None:
                    substitute.use(state.mean, (2 * state.log_std).exp())
                else:
                    substitute.use(state.values(substitute.layout, rng))
                pieces = (move(piece, device) for piece in slices(x, PIECE_ROWS))
                outputs.append(torch.cat([substitute.network.evaluation_pass(piece) for piece in pieces]))
        return torch.stack(outputs), state.hyper

    def moments(self, x: Inputs, joint: bool = False) -> None:
        """None: there is no closed form."""
        return None

    def _substitute(self) -> Substitute:
        network = self._state.network(self._network)
        return Substitute(network, self._state.layout(network), self._state.rest)


def _normals_like(rng: torch.Generator, like: Tensor) -> Tensor:
    return torch.randn(like.shape, generator=rng, dtype=like.dtype, device=like.device)


def module_at(state: LayerState, wide: Network, rng: torch.Generator | None) -> nn.Module:
    """A module with the weights of a draw, or at their means without a generator; dense layers stay plain ones."""
    network = state.network(wide)
    layout = state.layout(network)
    parts = dict(layout.split(state.values(layout, rng)))
    sparse = WeightLayout(
        {name: geometry for name, geometry in layout.geometries.items() if not layout.is_dense(name)},
        {name: count for name, count in layout.counts.items() if not layout.is_dense(name)},
        layout.indices,
    )
    dense = {weight_name(n): parts[n].view(g.shape) for n, g in layout.geometries.items() if layout.is_dense(n)}
    if not sparse.counts:
        return network.with_fixed(state.rest | dense).module
    substitute = Substitute(network, sparse, state.rest | dense)
    substitute.use(torch.cat([parts[name] for name in sparse.counts]))
    for layer in substitute.layers.values():
        layer.settle()
    return substitute.network.module
