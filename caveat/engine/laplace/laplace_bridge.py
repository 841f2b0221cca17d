"""The Laplace bridge: a Dirichlet over classes in the place of a Gaussian over logits (Hobbhahn et al. 2022)."""

import torch
from torch import Tensor

__all__ = ["bridge"]


def bridge(mean: Tensor, covariance: Tensor, n: int, rng: torch.Generator) -> Tensor:
    """Draws of log probabilities from the Dirichlet that the Laplace bridge gives (Hobbhahn et al. 2022).

    alpha_k = (1 - 2/C + e^mu_k / C^2 sum_l e^-mu_l) / Sigma_kk, with mu and Sigma conditioned on logits that sum to 0.
    """
    if mean.ndim != 2:
        raise ValueError(f"prediction='bridge' is for one target a row, and outputs are {tuple(mean.shape)}")
    dtype, mean, covariance = mean.dtype, mean.double(), covariance.double()
    classes = mean.shape[1]
    marginal = covariance.diagonal(dim1=-2, dim2=-1)
    total, towards = covariance.sum((-1, -2)), covariance.sum(-1)  # 1^T Sigma 1 and Sigma 1
    # Logits whose sum does not vary need no conditioning, and rounding is all that total then holds.
    share = torch.where(total > 1e-5 * classes * marginal.sum(-1), 1 / total, torch.zeros_like(total)).unsqueeze(-1)
    mu = mean - towards * mean.sum(-1, keepdim=True) * share
    variance = marginal - towards.square() * share
    tail = (mu + torch.logsumexp(-mu, -1, keepdim=True)).exp()
    alpha = ((1 - 2 / classes + tail / classes**2) / variance.clamp_min(1e-12)).clamp(1e-6, 1e12)
    drawn = torch._standard_gamma(alpha.cpu().expand(n, *alpha.shape), generator=rng).clamp_min(1e-300)
    return (drawn.log() - drawn.sum(-1, keepdim=True).log()).to(mean.device, dtype)
