"""Draws of a row's outputs under many prior precisions, from covariances of no more outputs than a target needs.

The log probability of a target is a function of few of a row's outputs: the classes of its own pixel, or one label. For
the mean over rows of such log probabilities outputs may be drawn as if they covaried within these groups only.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from caveat.engine.cost import refuse_if_too_large
from caveat.engine.laplace.gaussians import PrecisionPath
from caveat.engine.row_gradients import Jacobian, RowPass
from caveat.likelihoods import Hyper, Likelihood

__all__ = ["covariances", "drawn_outputs", "output_groups", "rows_at_once"]

AT_ONCE = 32  # outputs of a row whose covariance is made at once, unless a group has more


def output_groups(likelihood: Likelihood, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Tensor:
    """The groups of a row's flat outputs that belong to one log probability each, [P, C]."""
    count = likelihood.predictive(outputs[:1].unsqueeze(0), hyper).log_prob(targets[:1]).numel()
    places = torch.arange(outputs[0].numel()).reshape(1, *outputs.shape[1:])
    return places.movedim(likelihood.output_axis, -1).reshape(count, -1)


def covariances(path: PrecisionPath, row_pass: RowPass, scales: Sequence[float], groups: Tensor) -> Tensor:
    """The covariance of each group of outputs for each scale of the prior, [K, B, P, C, C]."""
    parts = []
    for part in groups.split(max(1, AT_ONCE // groups.shape[1])):
        whole = len(part) == len(groups)
        outputs_of_part = row_pass if whole else row_pass.of_outputs(part.flatten())
        at = part if whole else torch.arange(part.numel()).reshape(part.shape)
        parts.append(path.covariances(outputs_of_part, scales)[:, :, at.unsqueeze(2), at.unsqueeze(1)])
    return torch.cat(parts, 2)


def rows_at_once(path: PrecisionPath, jacobian: Jacobian, groups: Tensor, scales: int, draws: int = 1) -> int:
    """How many rows a pass should take, so that the covariances of all scales and the draws of one scale fit."""
    (count, width), network = groups.shape, jacobian.network
    numbers = scales * max(count * width**2, max(AT_ONCE, width) ** 2)
    what = f"the covariance of {width:,} outputs of a row for {scales} prior precisions"
    advice = "give precision='evidence', or the precision itself"
    refuse_if_too_large(what, 3 * numbers * network.dtype.itemsize, network.device, advice)
    return max(1, min(path.rows_at_once(jacobian), 2**26 // max(numbers, draws * groups.numel())))


def drawn_outputs(mean: Tensor, covariance: Tensor, noise: Tensor, groups: Tensor) -> Tensor:
    """Outputs [S, B, ...] with this mean and covariances [B, P, C, C] of the groups, from normals [S, B, P, C].

    By the symmetric root, which changes as little as the covariance does: the same noise then gives neighbouring scales
    neighbouring outputs, and their difference is not of the draws.
    """
    values, vectors = torch.linalg.eigh(covariance)
    root = (vectors * values.clamp_min(0).sqrt().unsqueeze(-2)) @ vectors.mT
    shift = mean.new_empty(len(noise), len(mean), groups.numel())
    shift[..., groups.flatten()] = torch.einsum("bpij,sbpj->sbpi", root, noise).flatten(2)
    return mean + shift.reshape(len(noise), *mean.shape)
