"""A call of an operation in a network, and what is asked of its linear part.

    y = op(a, b, ...)      push: dy_k = A da_k + B db_k + ...      pull: ga_k = A^T g_k,  gb_k = B^T g_k, ...

A, B are the operation's Jacobians at the values of the forward pass. Tangents of a tensor [B, ...] are [K, B, ...],
those of a weight [K, ...]; both come as sums whose terms may not be added yet (`lazy_sums`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from caveat.engine.tangents.lazy_sums import Terms

__all__ = ["Rule", "Site", "Tensors", "aligned", "at_least_single", "floating", "is_floating", "summed_to"]

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Site:
    """A call of an operation: what it is given from elsewhere, what is fixed, and what is linearised."""

    target: Callable[..., Any]
    leaves: tuple[Any, ...]  # of its arguments; None in the place of values from elsewhere
    structure: Any
    slots: tuple[int, ...]  # those places
    active: tuple[int, ...]  # which of the slots depend on the parameters

    def __call__(self, values: Sequence[Any]) -> Any:
        """The operation's value."""
        leaves = list(self.leaves)
        for slot, value in zip(self.slots, values, strict=True):
            leaves[slot] = value
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        return self.target(*args, **kwargs)

    def of_active(self, values: Sequence[Any]) -> tuple[Callable[..., tuple[Tensor, ...]], Tensors]:
        """The operation's floating-point outputs as a function of the active values alone, and these."""

        def function(*active_values: Tensor) -> tuple[Tensor, ...]:
            given = list(values)
            for place, value in zip(self.active, active_values, strict=True):
                given[place] = value
            return floating(self(given))

        return function, tuple(values[place] for place in self.active)


class Rule(Protocol):
    """How tangents and cotangents go through one operation."""

    def save(self, values: Sequence[Any], result: Any) -> Tensors:
        """What `push` and `pull` need of the forward pass."""

    def push(self, saved: Tensors, tangents: Sequence[Terms]) -> Sequence[Terms]:
        """Tangents of the floating-point outputs, from those of the active values."""

    def pull(self, saved: Tensors, cotangents: Sequence[Terms | None]) -> Sequence[Tensor]:
        """Cotangents of the active values, from those of the outputs that have any."""


def is_floating(value: Any) -> bool:
    """Whether tangents of a value make sense."""
    return isinstance(value, Tensor) and value.is_floating_point()


def floating(result: Any) -> tuple[Tensor, ...]:
    """The floating-point tensors among an operation's outputs."""
    return tuple(leaf for leaf in pytree.tree_leaves(result) if is_floating(leaf))


def at_least_single(t: Tensor) -> Tensor:
    """Probabilities and noise are too fine for half precision."""
    return t if t.dtype in (torch.float32, torch.float64) else t.float()


def aligned(t: Tensor, dimensions: int) -> Tensor:
    """Tangents [K, ...] with axes of one after K, as broadcasting of the rest would put them."""
    axes = (slice(None), *[None] * (dimensions + 1 - t.ndim))
    return t[axes]


def summed_to(g: Tensor, shape: torch.Size) -> Tensor:
    """Cotangents [K, ...] summed over the axes that broadcasting made."""
    new = g.ndim - 1 - len(shape)
    axes = [i for i in range(1, g.ndim) if i <= new or (shape[i - 1 - new] == 1 and g.shape[i] > 1)]
    return g.sum(axes, keepdim=True).reshape(len(g), *shape) if axes else g
