"""Hamiltonian dynamics: a reversible integrator that preserves volume, and the adaptation of its step size.

    p <- p + eps/2 grad log p(z);  z <- z + eps p;  p <- p + eps/2 grad log p(z)          (leapfrog, L times)

With the rows in K parts this is the symmetric split of Neal (2011, section 5.5.1): kicks of length eps/2 by one part
after the other and then in reverse order, with a drift of eps/(2K) after each kick on the way there and before each
kick on the way back. K = 1 is leapfrog.

`integrate` goes through torch, at some twenty calls a step, which take longer than the arithmetic of a small network.
`FusedStack` makes a whole trajectory in one call of native code (`caveat/native/perceptron.cpp`), where that computes
the same chain: a plain stack of layers with a softmax at labels that all count, independent normal priors, rows in
memory, on a CPU.
"""

import ctypes
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from caveat.engine.chains.coordinates import Coordinates
from caveat.engine.chains.log_posterior import LogPosterior
from caveat.native import library
from caveat.rows import Batch

__all__ = ["DualAveraging", "FusedStack", "integrate"]

_ACTIVATIONS: dict[type, int] = {nn.ReLU: 1, nn.SiLU: 2, nn.Tanh: 3}  # as perceptron.cpp numbers them
_KERNELS = {torch.float32: "caveat_trajectory_float", torch.float64: "caveat_trajectory_double"}
_FILLED = 64  # bytes that the numbers of a row are filled up to
MOST_WEIGHTS = 2**17  # which stay in a core's cache; from twice as many on, torch's products were faster

Gradient = Callable[[Tensor, int], tuple[Tensor, Tensor]]


def integrate(
    gradient: Gradient, z: Tensor, momentum: Tensor, first: Tensor, step_size: float, steps: int, parts: int = 1
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Follow the dynamics for so many steps from position z and a momentum, both [chains, P].

    `gradient(z, part)` returns log likelihood [chains] and gradient [chains, P] of one part; `first` is the gradient of
    part 0 at z. Returns position and momentum at the end, and part 0's log likelihood and gradient there.
    """
    half, drift = step_size / 2, step_size / (2 * parts)
    order = [*range(1, parts), *reversed(range(parts))]  # after part 0: there, and back again
    z, momentum = z.clone(), momentum.add(first, alpha=half)
    for step in range(steps):
        for i, part in enumerate(order):
            z.add_(momentum, alpha=2 * drift if i == parts - 1 else drift)  # two drifts meet at the turn
            value, gradient_here = gradient(z, part)
            kicks = 2 if part == 0 and step < steps - 1 else 1  # the last of this step and the first of the next
            momentum.add_(gradient_here, alpha=kicks * half)
    return z, momentum, value, gradient_here


@dataclass
class DualAveraging:
    """Finds the step size at which the acceptance is the target (Hoffman and Gelman 2014, section 3.2)."""

    log_step: float  # of the step size to try next
    centre: float  # towards which log step sizes are drawn
    target: float = 0.8
    error: float = 0.0  # running mean of target - acceptance
    log_average: float = 0.0
    count: int = 0

    @staticmethod
    def around(step_size: float, target: float) -> "DualAveraging":
        """Begin at a step size; tries are drawn towards ten times this."""
        return DualAveraging(math.log(step_size), math.log(10 * step_size), target)

    def update(self, acceptance: float) -> None:
        """Adapt to the acceptance probability of an iteration."""
        self.count += 1
        t, gamma, t0, kappa = self.count, 0.05, 10, 0.75
        self.error += (self.target - acceptance - self.error) / (t + t0)
        self.log_step = self.centre - math.sqrt(t) / gamma * self.error
        weight = t**-kappa
        self.log_average += weight * (self.log_step - self.log_average)

    @property
    def average(self) -> float:
        """The step size to use once the adaptation is over."""
        return math.exp(self.log_average)


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
