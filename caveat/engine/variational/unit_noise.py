"""Noise of whole units: the numbers that multiply what layers read of them, and their distributions.

z_g ~ N(mean_g, std_g^2)                              Gaussian (Louizos et al. 2017)
log z_g ~ N(location_g, scale_g^2) on [-20, 0]        truncated log-normal (Neklyudov et al. 2017)
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from caveat.engine.sparse import WeightLayout
from caveat.engine.state_checks import check_names, check_tensor
from caveat.engine.variational.multiplicative_noise import lognormal_log_moment, lognormal_of
from caveat.network import Params
from caveat.randomness import normals
from caveat.storage import CorruptFile

__all__ = ["GaussianUnitNoise", "LognormalUnitNoise", "UnitFactors", "UnitNoise", "factors_of", "scaled_weights"]

_READERS = "of/"  # in a file, before the name of a layer: the units of its inputs


class UnitNoise(Protocol):
    """The distribution of one number for each unit."""

    def expected(self) -> Tensor:
        """The mean of each unit's number, [units]."""

    def draw(self, rng: torch.Generator) -> Tensor:
        """A draw of each unit's number, [units]."""

    def of_units(self, chosen: Tensor) -> "UnitNoise":
        """The noise of chosen units alone; `chosen` is a mask, [units]."""

    def tensors(self) -> Params:
        """The parameters, [units] each, by the names that a file has."""


@dataclass(frozen=True)
class GaussianUnitNoise:
    """Independent Gaussians."""

    mean: Tensor  # [units]
    log_std: Tensor  # [units]

    def expected(self) -> Tensor:
        """The mean of each unit's number, [units]."""
        return self.mean

    def draw(self, rng: torch.Generator) -> Tensor:
        """A draw of each unit's number, [units]."""
        return torch.addcmul(self.mean, self.log_std.exp(), normals(self.mean.shape, rng, self.mean))

    def of_units(self, chosen: Tensor) -> "GaussianUnitNoise":
        """The noise of chosen units alone; `chosen` is a mask, [units]."""
        chosen = chosen.to(self.mean.device)
        return GaussianUnitNoise(self.mean[chosen], self.log_std[chosen])

    def tensors(self) -> Params:
        """The parameters by the names that a file has."""
        return {"mean": self.mean, "log_std": self.log_std}


@dataclass(frozen=True)
class LognormalUnitNoise:
    """Independent log-normals, truncated to at most one."""

    location: Tensor  # [units]
    log_scale: Tensor  # [units]

    def expected(self) -> Tensor:
        """The mean of each unit's number, [units], float64."""
        return lognormal_log_moment(self.location, self.log_scale, 1).exp()

    def draw(self, rng: torch.Generator) -> Tensor:
        """A draw of each unit's number, [units], float64."""
        uniform = torch.rand(self.location.shape, generator=rng, dtype=torch.float64)
        return lognormal_of(self.location, self.log_scale, uniform.to(self.location.device))

    def of_units(self, chosen: Tensor) -> "LognormalUnitNoise":
        """The noise of chosen units alone; `chosen` is a mask, [units]."""
        chosen = chosen.to(self.location.device)
        return LognormalUnitNoise(self.location[chosen], self.log_scale[chosen])

    def tensors(self) -> Params:
        """The parameters by the names that a file has."""
        return {"location": self.location, "log_scale": self.log_scale}


@dataclass(frozen=True)
class UnitFactors:
    """What a posterior keeps of its units: their noise, and which layers' inputs it multiplies."""

    noise: UnitNoise
    units_of_inputs: dict[str, Tensor]  # for each layer [inputs, n], int32: as `Units.of_inputs`

    def tensors(self) -> Params:
        """As a file has them: parameters of the noise, and under "of/<layer>" the units of the layer's inputs."""
        return self.noise.tensors() | {f"{_READERS}{name}": units for name, units in self.units_of_inputs.items()}

    @classmethod
    def of(cls, tensors: Params) -> "UnitFactors":
        """What `tensors` made a group of."""
        units = {n.removeprefix(_READERS): t for n, t in tensors.items() if n.startswith(_READERS)}
        if {"location", "log_scale"} <= tensors.keys():
            return cls(LognormalUnitNoise(tensors["location"], tensors["log_scale"]), units)
        if {"mean", "log_std"} <= tensors.keys():
            return cls(GaussianUnitNoise(tensors["mean"], tensors["log_std"]), units)
        raise CorruptFile(
            "the noise of this posterior's units is not whole: it has neither mean and log_std nor location and "
            f"log_scale, but {sorted(tensors.keys() - {f'{_READERS}{name}' for name in units})}"
        )

    def check(self, inputs: dict[str, int]) -> None:
        """Refuse noise that is not one distribution a unit, and units that are not of layers with so many inputs."""
        parameters = self.noise.tensors()
        count = max(tensor.numel() for tensor in parameters.values())
        for name, tensor in parameters.items():
            check_tensor(f"noise/{name}", tensor, (count,), (torch.float32, torch.float64))
        check_names("noise/of", self.units_of_inputs, (), inputs)
        for name, units in self.units_of_inputs.items():
            width = units.shape[1] if units.ndim == 2 else 1
            check_tensor(f"noise/of/{name}", units, (inputs[name], width), (torch.int32,))
            if units.numel() and not (int(units.min()) >= 0 and int(units.max()) <= count):
                raise CorruptFile(f"noise/of/{name} names units that there are not")

    def applied(self, values: Tensor, layout: WeightLayout, rng: torch.Generator | None) -> Tensor:
        """Flat weights [size] times a draw of the units' numbers, or times their means without a generator."""
        numbers = self.noise.expected() if rng is None else self.noise.draw(rng)
        return scaled_weights(values, layout, factors_of(numbers, self.units_of_inputs))


def factors_of(numbers: Tensor, units_of_inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """For each layer the factors of its inputs, [..., inputs], from one number for each unit, [..., units]."""
    padded = torch.cat([numbers, numbers.new_ones((*numbers.shape[:-1], 1))], -1)
    return {name: padded[..., units.to(numbers.device).long()].prod(-1) for name, units in units_of_inputs.items()}


def scaled_weights(values: Tensor, layout: WeightLayout, factors: dict[str, Tensor]) -> Tensor:
    """Flat weights [size], each multiplied by the factor of the input that it reads."""
    indices, parts = layout.indices_of(), []
    for name, part in layout.split(values):
        if name in factors:
            shape, places = layout.geometries[name].shape, indices[name]
            factor = factors[name].to(part)
            if places is None:
                part = (part.view(shape) * factor.view(1, -1, *[1] * (len(shape) - 2))).flatten()
            else:
                kernel = int(torch.Size(shape[2:]).numel())
                part = part * factor[places.long() // kernel % shape[1]]
        parts.append(part)
    return torch.cat(parts)
