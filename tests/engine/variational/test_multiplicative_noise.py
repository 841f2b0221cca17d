"""Divergences and moments of multiplicative noise against numerical integration and scipy."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import Tensor

from caveat.engine.variational.multiplicative_noise import (
    HIGH,
    LOW,
    log_alpha,
    log_uniform_kl,
    lognormal_kl,
    lognormal_log_moment,
    lognormal_log_snr,
    lognormal_of,
)

PAIRS = [(mu, s) for mu in (-20.0, -19.0, -12.0, -3.0, -0.5, 0.0) for s in (-6.0, -2.0, 0.0, 1.0, 2.0, 4.0)]


def exact_kl(alpha_log: float) -> float:
    """E log|z + alpha^(-1/2)| - E log|z|, split where the logarithm is infinite."""
    shift = math.exp(-alpha_log / 2)

    def integrand(z: float) -> float:
        return math.log(abs(z + shift)) * math.exp(-z * z / 2) / math.sqrt(2 * math.pi)

    pole = max(-shift, -12.0)
    value = sum(integrate.quad(integrand, a, b, limit=200)[0] for a, b in ((-12, pole), (pole, 0), (0, 12)) if a < b)
    return value + (np.euler_gamma + math.log(2)) / 2  # E log|z| in closed form


def test_the_divergence_from_the_log_uniform_prior_is_near_its_integral() -> None:
    logs = torch.linspace(-10, 10, 41, dtype=torch.float64)
    exact = torch.tensor([exact_kl(float(value)) for value in logs], dtype=torch.float64)
    found = log_uniform_kl(logs)
    assert float((found - exact).abs().max()) < 0.01
    assert float((found - exact).abs().max()) > 1e-4, "it is an approximation"
    assert (found.diff() < 0).all()
    far = log_uniform_kl(torch.tensor([-200.0, 200.0], dtype=torch.float64))
    torch.testing.assert_close(far, torch.tensor([100 + 0.63576, 0.0], dtype=torch.float64))
    assert torch.autograd.gradcheck(log_uniform_kl, logs.requires_grad_())


def test_log_alpha_is_of_variance_over_squared_mean() -> None:
    mean, std = torch.tensor([0.5, -2.0, 0.0]).double(), torch.tensor([0.1, 4.0, 1.0]).double()
    expected = torch.tensor([math.log(0.04), math.log(4.0), math.log(1e8)]).double()
    torch.testing.assert_close(log_alpha(mean, std.log()), expected, rtol=1e-6, atol=1e-6)


def both(location: float, log_scale: float) -> tuple[Tensor, Tensor]:
    return torch.tensor([location], dtype=torch.float64), torch.tensor([log_scale], dtype=torch.float64)


@pytest.mark.parametrize(("location", "log_scale"), PAIRS)
def test_the_truncated_log_normal_has_scipys_moments_and_entropy(location: float, log_scale: float) -> None:
    scale = math.exp(log_scale)
    known = stats.truncnorm((LOW - location) / scale, (HIGH - location) / scale, location, scale)
    ends = max(LOW, location - 40 * scale), min(HIGH, location + 40 * scale)
    moments = [
        integrate.quad(lambda v, k=k: math.exp(k * v) * known.pdf(v), *ends, limit=500, epsabs=0, points=[location])[0]
        for k in (1, 2)
    ]
    for k, exact in enumerate(moments, 1):
        assert float(lognormal_log_moment(*both(location, log_scale), k)) == pytest.approx(math.log(exact), abs=1e-6)
    ratio = moments[0] / math.sqrt(max(moments[1] - moments[0] ** 2, 1e-300))
    assert float(lognormal_log_snr(*both(location, log_scale))) == pytest.approx(math.log(ratio), abs=1e-3)
    exact = math.log(HIGH - LOW) - known.entropy()  # the prior's density is constant
    assert float(lognormal_kl(*both(location, log_scale))) == pytest.approx(exact, abs=1e-6)
    uniform = torch.linspace(0.01, 0.99, 9, dtype=torch.float64)[:, None]
    draws = lognormal_of(*both(location, log_scale), uniform).log()
    np.testing.assert_allclose(known.cdf(draws[:, 0].numpy()), uniform[:, 0].numpy(), rtol=1e-6)


def test_noise_and_its_gradients_are_finite_everywhere() -> None:
    location, log_scale = torch.meshgrid(torch.linspace(LOW, HIGH, 9), torch.linspace(-8, 4, 13), indexing="ij")
    location, log_scale = location.flatten().requires_grad_(), log_scale.flatten().requires_grad_()
    for uniform in (0.0, 0.5, 1.0):
        draws = lognormal_of(location, log_scale, torch.full((3, location.numel()), uniform))
        (draws.sum() + lognormal_kl(location, log_scale).sum()).backward()
        assert float(draws.detach().min()) >= math.exp(LOW)
        assert float(draws.detach().max()) <= 1
    assert location.grad is not None
    assert log_scale.grad is not None
    assert bool(location.grad.isfinite().all() and log_scale.grad.isfinite().all())
    assert bool(lognormal_log_snr(location, log_scale).isfinite().all())


def test_gradients_of_draws_and_divergence() -> None:
    location = torch.tensor([-18.0, -7.0, -0.4], dtype=torch.float64, requires_grad=True)
    log_scale = torch.tensor([0.5, 1.5, -1.0], dtype=torch.float64, requires_grad=True)
    uniform = torch.rand(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda a, b: lognormal_of(a, b, uniform).log(), (location, log_scale))
    assert torch.autograd.gradcheck(lognormal_kl, (location, log_scale))


def test_noise_that_is_wide_is_pruned_and_noise_that_is_narrow_is_not() -> None:
    location, log_scale = torch.tensor([0.0, -10.0, 0.0]), torch.tensor([-5.0, 3.0, 0.5])
    ratio = lognormal_log_snr(location, log_scale).exp()
    assert ratio.gt(1).tolist() == [True, False, True]
