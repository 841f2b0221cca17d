"""Whole leapfrog trajectories of small perceptrons in native code, where that computes the same chain.

    z', p' = L leapfrog steps from (z, p) under log p(theta | D) / T,   theta = offset + scale z

`integrate` does the same through torch, at some twenty calls a step, which take longer than the arithmetic of a small
network. Here a trajectory is one call (`caveat/native/perceptron.cpp`). It takes what most references are made of: a
plain stack of layers with a softmax at labels that all count, independent normal priors, rows in memory, on a CPU.
"""

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from caveat.engine.chains.coordinates import Coordinates
from caveat.engine.chains.log_posterior import LogPosterior
from caveat.native import library
from caveat.rows import Batch

__all__ = ["FusedStack"]

_ACTIVATIONS: dict[type, int] = {nn.ReLU: 1, nn.SiLU: 2, nn.Tanh: 3}  # as perceptron.cpp numbers them
_KERNELS = {torch.float32: "caveat_trajectory_float", torch.float64: "caveat_trajectory_double"}
_FILLED = 64  # bytes that the numbers of a row are filled up to
MOST_WEIGHTS = 2**17  # which stay in a core's cache; from twice as many on, torch's products were faster


@dataclass(frozen=True)
class FusedStack:
    """A plain stack and all rows of its task, as the native code reads them."""

    kernel: Callable[..., int]
    x: Tensor  # rows with their numbers filled up to whole vectors, [N, width]
    labels: Tensor  # [N], int64
    units: tuple[int, ...]  # of the inputs and of each layer
    activations: tuple[int, ...]  # after each layer; 0 is none

    @staticmethod
    def of(module: nn.Module, rows: Iterable[Batch]) -> "FusedStack | None":
        """A plain stack with rows [B, ...] and labels [B]; None where the native code does not serve."""
        kernels, layers = library(), [m for m in module.children() if type(m) is not nn.Flatten]
        linear = [m for m in layers if isinstance(m, nn.Linear)]
        weights = sum(p.numel() for p in module.parameters())
        activations = []
        for layer, after in zip(layers, [*layers[1:], None], strict=True):
            if isinstance(layer, nn.Linear):
                activations.append(_ACTIVATIONS.get(type(after), 0))
        known = len(layers) == len(linear) + sum(map(bool, activations))  # no two activations in a row
        if kernels is None or not known or activations[-1] or weights > MOST_WEIGHTS:
            return None
        pieces = [(x.flatten(1), y) for x, y in rows if isinstance(x, Tensor)]
        x, labels = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        filling = -x.shape[1] % (_FILLED // x.element_size())
        return FusedStack(
            getattr(kernels, _KERNELS[x.dtype]),
            F.pad(x, (0, filling)).contiguous(),
            labels.long().contiguous(),
            (linear[0].in_features, *(layer.out_features for layer in linear)),
            tuple(activations),
        )

    def serves(self, coordinates: Coordinates) -> bool:
        """Whether the prior is one of independent normals in these coordinates."""
        return coordinates.filters is None and coordinates.normal.start == 0

    def follow(
        self,
        log_posterior: LogPosterior,
        z: Tensor,
        momentum: Tensor,
        first: Tensor,
        step_size: float,
        steps: int,
        *,
        threads: int = 1,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As `integrate` with one part: position, momentum, log likelihood and gradient at the end, [chains, P].

        Without steps, log likelihood and gradient where the chains are.
        """
        coordinates = log_posterior.coordinates
        z, momentum, gradient = (tensor.clone(memory_format=torch.contiguous_format) for tensor in (z, momentum, first))
        scale, offset, stiffness = coordinates.scale, coordinates.offset, coordinates.stiffness
        if coordinates.width is not None:
            scale = scale * coordinates.width
        if stiffness is None:
            stiffness = torch.ones_like(scale)
        tensors = (self.x, self.labels, z, momentum, gradient, scale, offset, stiffness)
        likelihood = torch.zeros(len(z), dtype=torch.float64)
        counts = (*self.x.shape, len(z), steps, z.shape[1], len(self.activations), *self.units, *self.activations)
        self.kernel(
            (ctypes.c_int64 * len(counts))(*counts),
            (ctypes.c_double * 2)(step_size, log_posterior.temperature),
            (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors)),
            likelihood.data_ptr(),
            threads,
        )
        return z, momentum, likelihood, gradient
