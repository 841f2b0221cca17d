"""Whitened coordinates: flat vectors z in which the prior has unit scale, and the weights at such a vector.

    w = scale * z,  scale = 1 / sqrt(precision) (Gaussian), the prior's own scale (Laplace, Student-t, logistic),
                    sqrt(sum of weights std^2) (mixture: its standard deviation, whatever its narrowest part),
    w = z (alpha Sigma + epsilon I)^(1/2) for the filters of an EmpCov prior

A step size then means the same for every prior, and a trajectory of length pi/2 crosses it. Noise that is to be
inferred comes last in the vector: its logarithm has the prior N(log(spread of the targets) - 1, 1), which is a factor
of 2.7 either way.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from caveat.engine.flat_weights import flat_places
from caveat.likelihoods import Hyper, learned_noise
from caveat.network import Network, Params
from caveat.priors import (
    EmpCovPrior,
    GaussianMixturePrior,
    GaussianPrior,
    LaplacePrior,
    LogisticPrior,
    Prior,
    StudentTPrior,
    gaussian_precisions,
)

__all__ = ["Coordinates", "log_noise_centre"]


def log_noise_centre(log_spread: Tensor) -> Tensor:
    """The prior mean of the log noise, from the log spread of the targets; the prior's standard deviation is 1."""
    return log_spread - 1


@dataclass(frozen=True)
class Coordinates:
    """Where every weight lies in a flat vector, and how that vector is scaled. Vectors are [..., P]."""

    places: dict[str, tuple[slice, torch.Size]]  # of each weight; "hyper/log_noise" last, where it is inferred
    scale: Tensor  # [P]
    offset: Tensor  # [P]; zero but for the noise
    normal: slice  # the coordinates whose prior is independent normal: all of them, or the noise alone
    filters: tuple[slice, Tensor] | None  # correlated filters, and the symmetric root of their covariance
    stiffness: Tensor | None = None  # precision of that prior along positions, [P]; 1 without
    width: Tensor | None = None  # of the posterior along each z, [P], for a mass matrix: positions are z / width

    @staticmethod
    def of(network: Network, hyper: Hyper, whitened: bool = True) -> "Coordinates":
        """The coordinates of a network's selected weights; if not `whitened`, the weights themselves."""
        like = network.params()
        kinds = {str(w.dtype) for w in like.values()}
        if len(kinds) > 1:
            raise ValueError(f"the weights are of several types, {sorted(kinds)}: convert the module to one")
        if kinds & {"torch.bfloat16", "torch.float16"}:
            raise ValueError(f"chains need weights of float32 or float64, these are {kinds.pop()}: use module.float()")
        places = {name: (place, like[name].shape) for name, place in flat_places(network).items()}
        scales, filters = [], None
        for name, weight in like.items():
            scale = _scale(network.prior, name, weight) if whitened else weight.new_ones(())
            scales.append(scale.expand(weight.shape).flatten())
            if whitened and isinstance(network.prior, EmpCovPrior) and name == network.prior.layer:
                filters = (places[name][0], network.prior.root.to(weight))
        weights, device = network.n_parameters, network.device
        noise = learned_noise(network.likelihood, hyper)
        offset = torch.zeros(weights, dtype=network.dtype, device=device)
        if noise is not None:
            places["hyper/log_noise"] = (slice(weights, weights + noise.numel()), noise.shape)
            scales.append(offset.new_ones(noise.numel()))
            offset = torch.cat([offset, log_noise_centre(noise.to(offset).flatten())])
        independent = gaussian_precisions(network.prior, like) is not None
        gaussian = independent or (whitened and isinstance(network.prior, EmpCovPrior))
        normal = slice(0 if gaussian else weights, len(offset))
        stiffness = None
        if independent and not whitened:
            precisions = [_scale(network.prior, n, w).pow(-2).expand(w.shape).flatten() for n, w in like.items()]
            stiffness = torch.cat([*precisions, offset.new_ones(len(offset) - weights)])
        return Coordinates(places, torch.cat(scales).to(offset), offset, normal, filters, stiffness)

    @property
    def size(self) -> int:
        """How many coordinates there are, P."""
        return len(self.scale)

    def whitened(self, position: Tensor) -> Tensor:
        """The whitened z at a position [..., P]: the position itself, where there is no mass matrix."""
        return position if self.width is None else position * self.width

    def weights(self, position: Tensor) -> Tensor:
        """The flat weights at a position, both [..., P]."""
        z = self.whitened(position)
        flat = torch.addcmul(self.offset, z, self.scale)
        if self.filters is not None:
            place, root = self.filters
            flat[..., place] = self._filtered(z, place, root)
        return flat

    def pulled_back(self, gradient: Tensor) -> Tensor:
        """The gradient of the position from the gradient of the flat weights, both [..., P]."""
        pulled = gradient * self.scale
        if self.filters is not None:
            place, root = self.filters  # the root is symmetric
            pulled[..., place] = self._filtered(gradient, place, root)
        return pulled if self.width is None else pulled * self.width

    def prior_gradient(self, position: Tensor) -> Tensor:
        """Minus the gradient of the log prior, for the coordinates `normal` of positions [..., P]."""
        normal = position[..., self.normal]
        return normal if self.stiffness is None else normal * self.stiffness[self.normal]

    def with_width(self, width: Tensor) -> "Coordinates":
        """The same coordinates, with positions in units of these widths [P] along z."""
        return replace(self, width=width, stiffness=width**2)

    def at(self, params: Params) -> Tensor:
        """The position [P] of weights; noise that is not among them is put at its prior's centre."""
        flat = self.offset.clone()
        for name, (place, _) in self.places.items():
            if name in params:
                flat[place] = params[name].to(flat).flatten()
        z = (flat - self.offset) / self.scale
        if self.filters is not None:
            place, root = self.filters
            z[place] = (
                torch.linalg.solve(root.double(), flat[place].double().reshape(-1, len(root)).T).T.flatten().to(z)
            )
        return z if self.width is None else z / self.width

    def split(self, flat: Tensor) -> Params:
        """Flat weights [..., P] as views by name, [..., *shape]."""
        return {name: flat[..., place].view((*flat.shape[:-1], *shape)) for name, (place, shape) in self.places.items()}

    @staticmethod
    def _filtered(z: Tensor, place: slice, root: Tensor) -> Tensor:
        return (z[..., place].unflatten(-1, (-1, len(root))) @ root).flatten(-2)


def _scale(prior: Prior, name: str, like: Tensor) -> Tensor:
    """The scale of the prior of some weights, [] or shaped as they are; 1 for a prior that is not of this library."""
    match prior:
        case GaussianPrior():
            return prior.of(name, like).rsqrt()
        case EmpCovPrior():
            return like.new_tensor(prior.precision).rsqrt()
        case LaplacePrior() | StudentTPrior() | LogisticPrior():
            return like.new_tensor(prior.scale)
        case GaussianMixturePrior():
            variances = [weight * std**2 for weight, std in zip(prior.weights, prior.stds, strict=True)]
            return like.new_tensor(sum(variances) / sum(prior.weights)).sqrt()
    return like.new_ones(())
