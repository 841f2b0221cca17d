"""Which weights of a factorised Gaussian to keep: six scores of theta ~ N(mean, std^2), high for those worth keeping.

With a = |mean| / std, phi and Q the standard normal density and upper tail, r = 2 [phi(a) - a Q(a)] and s = lam std:

    magnitude           |mean|
    snr                 a
    expected_magnitude  E|theta| = std (a + r)
    snr_magnitude       E|theta| / sd|theta| = (a + r) / sqrt(1 - 2 a r - r^2), which grows with a alone: ranks as snr
    exponential         L(lam) = log E e^(lam |theta|) = lam |mean| + s^2 / 2 + M(s)
    snr_exponential     log (E / sd)[e^(lam |theta|)] = -1/2 log expm1(D),   D = L(2 lam) - 2 L(lam)

    M(s) = log [Phi(a + s) + e^(-2 a s) Phi(s - a)], between 0 and log 2

The large terms of D cancel on paper, D = s^2 + M(2 s) - 2 M(s), so that they need not cancel in rounding. Where s is
small, M and D are their series in the cumulants of |theta| / std. All is in float64, and nothing is NaN: a weight that
is surely zero (mean and std 0) has a = 0, a weight without spread has an infinite signal-to-noise ratio.
"""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

__all__ = [
    "CRITERIA", "Criterion", "expected_magnitude", "keep_scores", "log_expected_exponential", "log_snr_of_exponential",
    "signal_to_noise", "snr_of_magnitude",
]  # fmt: skip

Criterion = Literal[
    "magnitude", "snr", "expected_magnitude", "snr_magnitude", "exponential", "snr_exponential"
]  # fmt: skip
CRITERIA: tuple[Criterion, ...] = get_args(Criterion)

_SMALL = 1e-4  # below this s, the series is nearer than the difference of logarithms
_LARGE = 30.0  # above this D, log expm1(D) is D to the last digit
_FAR = 40.0  # beyond this a, r is zero in float64


def keep_scores(criterion: Criterion, mean: Tensor, std: Tensor, lam: float = 1.0) -> Tensor:
    """Scores in float64, of which the highest are to be kept; `lam` matters to the exponential ones alone."""
    if not 0 < lam < math.inf:
        raise ValueError(f"lam multiplies |theta| in an exponent and must be positive and finite, got {lam}")
    match criterion:
        case "magnitude":
            return mean.double().abs()
        case "snr" | "snr_magnitude":  # one order; the latter is flat at a = 0, where its own digits would be ties
            return signal_to_noise(mean, std)
        case "expected_magnitude":
            return expected_magnitude(mean, std)
        case "exponential":
            return log_expected_exponential(mean, std, lam)
        case "snr_exponential":
            return log_snr_of_exponential(mean, std, lam)
    raise ValueError(f"criterion={criterion!r} is not one of {', '.join(CRITERIA)}")


def signal_to_noise(mean: Tensor, std: Tensor) -> Tensor:
    """The ratio a = |mean| / std: infinite where only std is zero, zero where the mean is."""
    mean = mean.double().abs()
    return torch.where(mean == 0, 0.0, mean / std.double())


def expected_magnitude(mean: Tensor, std: Tensor) -> Tensor:
    """E|theta|."""
    return mean.double().abs() + std.double() * _excess(signal_to_noise(mean, std))[0]


def snr_of_magnitude(mean: Tensor, std: Tensor) -> Tensor:
    """E|theta| / sd|theta|; it rises from 1.32 at a = 0, where it is flat, so rank by `signal_to_noise` instead."""
    a = signal_to_noise(mean, std)
    r, variance, _ = _excess(a)
    return (a + r) / variance.sqrt()


def log_expected_exponential(mean: Tensor, std: Tensor, lam: float) -> Tensor:
    """The logarithm of E e^(lam |theta|)."""
    s, shift = lam * std.double(), lam * mean.double().abs()
    return shift + s.square() / 2 + _mirrored(signal_to_noise(mean, std), s, shift)


def log_snr_of_exponential(mean: Tensor, std: Tensor, lam: float) -> Tensor:
    """The logarithm of E e^(lam |theta|) over its standard deviation; infinite without spread."""
    a, s, shift = signal_to_noise(mean, std), lam * std.double(), lam * mean.double().abs()
    D = s.square() + _mirrored(a, 2 * s, 2 * shift) - 2 * _mirrored(a, s, shift)
    exact = torch.where(D > _LARGE, -D / 2, -D.clamp(max=_LARGE).expm1().log() / 2)
    # D = s^2 (variance + third s) + O(s^4), in logarithms since s^2 may be too small for float64.
    _, variance, third = _excess(a)
    series = -s.log() - (variance + third * s).log() / 2
    return torch.where(s < _SMALL, series, exact)


def _mirrored(a: Tensor, s: Tensor, shift: Tensor) -> Tensor:
    """M(s): what the part of the Gaussian beyond zero adds to L; `shift` is a s, known also where a is infinite."""
    exact = torch.logaddexp(torch.special.log_ndtr(a + s), torch.special.log_ndtr(s - a) - 2 * shift)
    r, variance, third = _excess(a)
    series = s * (r + s * ((variance - 1) / 2 + s * third / 6))
    return torch.where(s < _SMALL, series, exact)


def _excess(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of |z|, z ~ N(a, 1): mean less a (which is r), variance, and third cumulant.

    The third is (4 a^2 - 1) r - 2 a Q(a) + 6 a r^2 + 2 r^3: E|z|^3 with its cubes cancelled on paper.
    """
    a = a.clamp(max=_FAR)
    tail = torch.special.ndtr(-a)
    r = 2 * ((-a.square() / 2).exp() / math.sqrt(2 * math.pi) - a * tail)
    variance = 1 - 2 * a * r - r.square()
    third = (4 * a.square() - 1) * r - 2 * a * tail + 6 * a * r.square() + 2 * r**3
    return r, variance, third
