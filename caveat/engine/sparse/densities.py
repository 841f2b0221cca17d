"""How many weights each layer has when a network has few, and which share of them is exchanged as training goes on.

    uniform:  n_l = density size_l
    erk:      n_l = scale (outputs + inputs + kernel)_l, between 1 and size_l: layers of few weights are denser

The counts are set before training and stay: sum over layers n_l is the same at every step. "erk" (Erdos-Renyi with
kernel sizes; Evci et al. 2020) is a density of scale (sum of dimensions) / (product of dimensions). Where that is
above 1 the layer is full and the others share what is left; the scale is the one at which the total is exact.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from caveat.engine.sparse.kernels import LayerGeometry
from caveat.engine.sparse.substitute import LayerGeometries

__all__ = [
    "Allocation",
    "Schedule",
    "active_counts",
    "default_density",
    "default_interval",
    "dense_layers",
    "exchange_count",
    "replacement_rate",
]

Allocation = Literal["uniform", "erk"]


def active_counts(
    geometries: Mapping[str, LayerGeometry],
    density: float,
    allocation: Allocation = "uniform",
    dense: Collection[str] = (),
) -> dict[str, int]:
    """How many active weights every layer has, at least one each.

    Args:
        geometries: the layers, by name
        density: share of the weights that are active, over the layers that are not dense
        allocation: the same share in every layer (each count rounded by itself), or by "erk" (the total is rounded)
        dense: names of layers that keep all their weights
    """
    if not 0 < density <= 1:
        raise ValueError(f"density={density} must be above 0 and at most 1: it is the share of weights that are active")
    unknown = sorted(set(dense) - geometries.keys())
    if unknown:
        raise ValueError(f"dense names {', '.join(unknown)}, which are not layers: there are {', '.join(geometries)}")
    sparse = {name: geometry for name, geometry in geometries.items() if name not in dense}
    if not sparse:
        counts = {}
    elif allocation == "uniform":
        counts = _uniform(sparse, density)
    elif allocation == "erk":
        counts = _erk(sparse, density)
    else:
        raise ValueError(f"allocation={allocation!r} is neither 'uniform' nor 'erk'")
    return {name: counts.get(name, geometry.size) for name, geometry in geometries.items()}


def dense_layers(
    geometries: Mapping[str, LayerGeometry], wanted: Collection[str] | Literal["first"]
) -> tuple[str, ...]:
    """Names of the layers that keep all weights.

    "first" is the network's first layer, where that is a convolution and among these: no other one takes its place.
    """
    if wanted != "first":
        return tuple(wanted)
    first = geometries.first if isinstance(geometries, LayerGeometries) else next(iter(geometries))
    geometry = geometries.get(first)
    return (first,) if geometry is not None and len(geometry.shape) > 2 and len(geometries) > 1 else ()


def default_density(weights: int) -> float:
    """The share of so many weights that is active where nobody says: .05, and more of a network that has few."""
    return min(0.5, max(0.05, 1000 / weights))


def default_interval(steps: int, stop: float) -> int:
    """Steps from one exchange to the next where nobody says: 100, or fewer for 40 exchanges before a share `stop`."""
    return max(1, min(100, int(stop * steps) // 40))


def replacement_rate(progress: float, initial: float, stop: float) -> float:
    """Share of the active weights to exchange after a share `progress` of training: a half cosine that ends at `stop`.

    initial / 2 (1 + cos(pi progress / stop)), and 0 from `stop` on.
    """
    if not 0 <= initial < 1:
        raise ValueError(
            f"a replacement rate of {initial} must be at least 0 and below 1: at 1 an update would empty the layers"
        )
    return initial / 2 * (1 + math.cos(math.pi * progress / stop)) if progress < stop else 0.0


@dataclass(frozen=True)
class Schedule:
    """When weights are exchanged, and which share of them."""

    interval: int  # steps from one exchange to the next
    initial: float  # share exchanged at first; it falls as a half cosine
    stop: float  # share of training after which nothing is exchanged
    steps: int  # of the whole training

    def rate(self, step: int) -> float:
        """The share of the weights that is exchanged after this step, counted from 0."""
        return replacement_rate((step + 1) / self.steps, self.initial, self.stop)

    def due(self, step: int) -> bool:
        """Whether there is an exchange after this step, counted from 0."""
        return (step + 1) % self.interval == 0 and self.rate(step) > 0


def exchange_count(count: int, size: int, rate: float) -> int:
    """How many of a layer's active weights are exchanged: never all of them, and no more than there are absent ones."""
    return min(math.floor(rate * count), count - 1, size - count)


def _rounded(x: float) -> int:
    """To the nearest, halves upwards."""
    return math.floor(x + 0.5)


def _uniform(geometries: dict[str, LayerGeometry], density: float) -> dict[str, int]:
    counts = {name: _rounded(density * geometry.size) for name, geometry in geometries.items()}
    smallest = min(geometries, key=lambda name: geometries[name].size)
    if not counts[smallest]:
        size = geometries[smallest].size
        raise ValueError(
            f"density={density} leaves no weight of layer {smallest!r}, which has {size:,}: "
            f"take at least {_upwards(0.5 / size)}, or keep that layer dense"
        )
    return counts


def _erk(geometries: dict[str, LayerGeometry], density: float) -> dict[str, int]:
    sizes = {name: geometry.size for name, geometry in geometries.items()}
    total = _rounded(density * sum(sizes.values()))
    if total < len(sizes):
        raise ValueError(
            f"density={density} is {total:,} weights for {len(sizes):,} layers, fewer than one each: "
            f"take at least {_upwards((len(sizes) - 0.5) / sum(sizes.values()))}, or keep fewer layers sparse"
        )
    low, high = 0.0, float(max(sizes.values()))  # at the latter every layer is full, since its dimensions sum above 1
    for _ in range(200):  # the sum grows with the scale, and float64 runs out of digits long before
        scale = (low + high) / 2
        wanted = {name: min(max(scale * sum(geometries[name].shape), 1.0), float(sizes[name])) for name in sizes}
        low, high = (scale, high) if sum(wanted.values()) < total else (low, scale)
    counts = {name: math.floor(n) for name, n in wanted.items()}
    # Largest remainders first; a full layer has none.
    by_remainder = sorted((n for n in sizes if counts[n] < sizes[n]), key=lambda n: counts[n] - wanted[n])
    for name in by_remainder[: total - sum(counts.values())]:
        counts[name] += 1
    return counts


def _upwards(x: float) -> float:
    """With three digits, not below x."""
    digits = 2 - math.floor(math.log10(x))
    return round(math.ceil(x * 10**digits) / 10**digits, digits)
