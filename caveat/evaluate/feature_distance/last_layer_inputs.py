"""What the last layer of a network takes in, seen by a hook on a module of one's own."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from caveat.batches import Inputs, move, slices
from caveat.engine.predictors import PIECE_ROWS
from caveat.posterior import Posterior

__all__ = ["LastLayerInputs"]


class LastLayerInputs:
    """The features [rows, F] of a posterior's network at one draw of its weights (at the point, where it is one).

    The last layer is the last module with a weight of its own to be called, normalisation apart; features that it
    takes at several positions (pixels, tokens) are averaged over them.
    """

    def __init__(self, posterior: Posterior, seed: int = 0) -> None:
        self._network = posterior.network.replica()
        self._params = next(posterior.sample(1, seed=seed))

    def __call__(self, x: Inputs) -> Tensor:
        """Features of inputs, float64 on the CPU."""
        seen: list[tuple[nn.Module, Tensor]] = []

        def see(module: nn.Module, args: tuple[Any, ...]) -> None:
            if args and isinstance(args[0], Tensor):
                seen.append((module, args[0].detach()))

        layers = [m for m in self._network.module.modules() if _has_weight(m)]
        handles = [layer.register_forward_pre_hook(see) for layer in layers]
        pieces = []
        try:
            with torch.no_grad():
                for piece in slices(x, PIECE_ROWS):
                    seen.clear()
                    self._network(self._params, move(piece, self._network.device))
                    if not seen:
                        raise ValueError(
                            f"{type(self._network.module).__name__} calls no layer with a weight, so it has no "
                            "features: leave the training rows out"
                        )
                    pieces.append(_one_vector_a_row(*seen[-1]).double().cpu())
        finally:
            for handle in handles:
                handle.remove()
        return torch.cat(pieces)


def _has_weight(module: nn.Module) -> bool:
    """Whether a module is a layer whose inputs are features: it has a weight of two axes or more, and is no norm."""
    weight = getattr(module, "weight", None)
    is_embedding = isinstance(module, nn.Embedding | nn.EmbeddingBag)
    return isinstance(weight, Tensor) and weight.ndim > 1 and not isinstance(module, _NormBase) and not is_embedding


def _one_vector_a_row(layer: nn.Module, features: Tensor) -> Tensor:
    """The features [B, ..., F], or of a convolution [B, F, ...], averaged over positions, [B, F]."""
    if isinstance(layer, nn.modules.conv._ConvNd):
        features = features.movedim(1, -1)
    return features if features.ndim == 2 else features.flatten(1, -2).mean(1)
