"""Spike-and-slab priors whose latent quantities follow stochastic approximation while the weights are drawn.

    beta | gamma ~ gamma N(0, sigma^2 v1) + (1 - gamma) Laplace(0, sigma v0),   gamma ~ Bernoulli(delta of the layer)
    delta ~ Beta(size of the layer, size of the layer),   sigma^2 ~ inverse gamma(p/2, p/2) for p weights

Given the weights, the expectation and maximisation steps are in closed form (Deng et al. 2019, after Rockova and George
2014):

    rho   = P(gamma = 1 | beta, sigma, delta),   kappa_0 = (1 - rho) / v0,   kappa_1 = rho / v1
    sigma = (B + sqrt(B^2 + 4 A C)) / (2 A),     A = 2 p + 2,  B = sum kappa_0 |beta|,  C = sum kappa_1 beta^2 + p
    delta = (sum of the layer's rho + size - 1) / (3 size - 2)

and each quantity moves a part omega_t = 10 (1000 + t)^-0.75 of the way there at step t. The weights are drawn under

    log prior = -sum kappa_0 |beta| / sigma - sum kappa_1 beta^2 / (2 sigma^2).

The priors of delta and sigma say 1/2 and 1 as firmly as all weights together say otherwise. With vague ones there is a
fixed point where delta falls to 0 and sigma grows until the spike is as wide as the weights, and nothing is sparse.
"""

import math

import torch
from torch import Tensor

from caveat.network import Params

__all__ = ["SpikeSlab"]


class SpikeSlab:
    """The latent quantities of weights that lie one after the other, layer by layer, in a flat tensor."""

    def __init__(self, sizes: list[int], spike: float, slab: float, like: Tensor) -> None:
        """`sizes` are the layers', `spike` is v0 and `slab` v1."""
        self.spike, self.slab = spike, slab
        self.sizes = torch.tensor(sizes, device=like.device)  # of the layers, weights that were removed included
        self.counts = list(sizes)  # of their weights that are there
        self.inclusion = torch.full((sum(sizes),), 0.5, dtype=like.dtype, device=like.device)  # rho
        self.share = torch.full((len(sizes),), 0.5, dtype=torch.float64, device=like.device)  # delta
        self.variance = torch.ones((), dtype=torch.float64, device=like.device)  # sigma^2

    @staticmethod
    def share_of_way(step: int) -> float:
        """Omega: the share of the way that a step goes, counted from 0."""
        return float(10 * (1000 + step) ** -0.75)

    def log_prior(self, values: Tensor) -> Tensor:
        """The log prior of flat weights [size], but for what does not depend on them."""
        std = self.variance.sqrt().to(values)
        spike = ((1 - self.inclusion) * values.abs()).sum() / (self.spike * std)
        return -spike - (self.inclusion * values.square()).sum() / (2 * self.slab * std**2)

    def expected_inclusion(self, values: Tensor) -> Tensor:
        """P(gamma = 1) of each weight at its value, [size]."""
        std = self.variance.sqrt().to(values)
        slab = -0.5 * (values / std).square() / self.slab - 0.5 * math.log(2 * math.pi * self.slab)
        spike = -(values / std).abs() / self.spike - math.log(2 * self.spike)
        odds = torch.logit(self.share).to(values)
        of_weights = torch.cat([odds[layer].expand(count) for layer, count in enumerate(self.counts)])
        return torch.sigmoid(slab - spike + of_weights)

    def update(self, values: Tensor, omega: float | Tensor) -> None:
        """A step of stochastic approximation at these weights; those at zero were removed and have no scale.

        On a GPU nothing waits for it. A number of a recorded step is a tensor, [] in float64.
        """
        of_weights = omega.to(self.inclusion) if isinstance(omega, Tensor) else omega
        self.inclusion.lerp_(self.expected_inclusion(values), of_weights)
        there = values.count_nonzero().double()
        absolute = ((1 - self.inclusion) * values.abs()).sum().double() / self.spike
        square = (self.inclusion * values.square()).sum().double() / self.slab + there
        a = 2 * there + 2
        std = (absolute + (absolute**2 + 4 * a * square).sqrt()) / (2 * a)
        self.variance.lerp_(std**2, omega)
        sums = torch.stack([part.sum() for part in self.inclusion.split(self.counts)]).double()
        self.share.lerp_((sums + self.sizes - 1) / (3 * self.sizes - 2), omega)

    def select(self, places: Tensor, counts: list[int]) -> None:
        """Go on with some of the weights, `counts` of each layer; the others count as excluded."""
        self.inclusion, self.counts = self.inclusion[places].clone(), counts

    def tensors(self) -> Params:
        """What a checkpoint keeps."""
        return {"inclusion": self.inclusion, "share": self.share, "variance": self.variance}

    def restore(self, tensors: Params) -> None:
        """Go on from a checkpoint."""
        self.inclusion, self.share, self.variance = (
            tensors[name].to(self.share.device, copy=True) for name in ("inclusion", "share", "variance")
        )
