"""Multiplicative noise with a log-uniform prior: what keeps a weight or unit, and what lets it go.

Gaussian, w ~ N(m, s^2), alpha = s^2 / m^2 (Molchanov et al. 2017, whose fit of the divergence has k1, k2, k3):

    KL(alpha) = E log|z + alpha^(-1/2)| - E log|z|,  z standard normal,   which is zero at alpha = infinity
              ~ k1 sigmoid(-k2 - k3 log alpha) + 1/2 log(1 + 1/alpha),    within .01 of it

Truncated log-normal, log t ~ N(mu, sigma^2) on [a, b] (Neklyudov et al. 2017), A = (a - mu)/sigma, B = (b - mu)/sigma:

    Z = Phi(B) - Phi(A),   log t = mu + sigma Phi^(-1)(Phi(A) + Z u),   u uniform
    E t^k = exp(k mu + k^2 sigma^2 / 2) [Phi(B - k sigma) - Phi(A - k sigma)] / Z
    KL = log(b - a) - 1/2 log(2 pi e) - log sigma - log Z - (A phi(A) - B phi(B)) / (2 Z)

mu is kept in [a, b], where Z is a sum of two terms of one sign; a location beyond it is no more than another shape of a
distribution that leans on the end. Moments are logarithms: exp(k^2 sigma^2 / 2) and the tails that it multiplies leave
the range of floating point long before their product does. All of the log-normal is in float64.
"""

import math

import torch
from torch import Tensor

__all__ = ["HIGH", "LOW", "log_alpha", "log_uniform_kl", "lognormal_kl", "lognormal_log_moment", "lognormal_log_snr",
           "lognormal_of"]  # fmt: skip

LOW, HIGH = -20.0, 0.0  # the interval of log t: the noise is between e^-20 and 1
_K1, _K2, _K3 = 0.63576, 1.87320, 1.48695
_TINY = 1e-8  # added to a squared mean: alpha stays finite
_EDGE = 1e-12  # uniform numbers stay this far from 0 and 1, where the inverse of Phi is infinite


def log_alpha(mean: Tensor, log_std: Tensor) -> Tensor:
    """The logarithm of variance over squared mean."""
    return 2 * log_std - (mean.square() + _TINY).log()


def log_uniform_kl(log_alpha: Tensor) -> Tensor:
    """The divergence of each Gaussian from the log-uniform prior."""
    return _K1 * torch.sigmoid(-_K2 - _K3 * log_alpha) + 0.5 * torch.nn.functional.softplus(-log_alpha)


def lognormal_kl(location: Tensor, log_scale: Tensor) -> Tensor:
    """The divergence of each truncated log-normal from the log-uniform prior on the same interval."""
    low, high, mass = _standard(location, log_scale)
    ends = (low * _density(low) - high * _density(high)) / (2 * mass)
    return math.log(HIGH - LOW) - 0.5 * math.log(2 * math.pi * math.e) - log_scale.double() - mass.log() - ends


def lognormal_of(location: Tensor, log_scale: Tensor, uniform: Tensor) -> Tensor:
    """Draws, of uniform numbers [..., G]; differentiable in both parameters [G]."""
    low, _, mass = _standard(location, log_scale)
    share = uniform.double().clamp(_EDGE, 1 - _EDGE)
    standard = torch.special.ndtri(torch.special.ndtr(low) + mass * share)
    return (location.double() + log_scale.double().exp() * standard).clamp(LOW, HIGH).exp()


def lognormal_log_moment(location: Tensor, log_scale: Tensor, k: int) -> Tensor:
    """The logarithm of E t^k."""
    low, high, mass = _standard(location, log_scale)
    shift = k * log_scale.double().exp()
    upper, lower = torch.special.log_ndtr(high - shift), torch.special.log_ndtr(low - shift)
    between = upper + torch.log1p(-(lower - upper).exp())
    return k * location.double() + 0.5 * shift.square() + between - mass.log()


def lognormal_log_snr(location: Tensor, log_scale: Tensor) -> Tensor:
    """The logarithm of mean over standard deviation."""
    first, second = (lognormal_log_moment(location, log_scale, k) for k in (1, 2))
    return -0.5 * torch.expm1((second - 2 * first).clamp(min=1e-30)).log()


def _standard(location: Tensor, log_scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The ends of the interval in standard units, and the mass between them."""
    scale = log_scale.double().exp()
    low, high = (LOW - location.double()) / scale, (HIGH - location.double()) / scale
    root = math.sqrt(2)
    return low, high, 0.5 * (torch.erf(high / root) + torch.erf(-low / root))


def _density(x: Tensor) -> Tensor:
    return (-0.5 * x.square()).exp() / math.sqrt(2 * math.pi)
