"""The terms of the evidence lower bound over sparse layers, and the noise that its expectation is drawn with.

KL(N(mu, sigma^2) || N(0, s^2)) = log(s / sigma) + (sigma^2 + mu^2) / (2 s^2) - 1/2
"""

from collections.abc import Callable

import torch
from torch import Tensor

from caveat.engine.sparse import WeightLayout
from caveat.engine.training import BatchPart
from caveat.network import Network
from caveat.priors import gaussian_precisions

__all__ = [
    "check_fine",
    "gaussian_kl",
    "kl_weight_for",
    "noise_of_batch",
    "noise_of_weights",
    "precisions",
    "std_rate_for",
    "warm_up",
]


def gaussian_kl(mean: Tensor, log_std: Tensor, precision: Tensor, variance: Tensor | None = None) -> Tensor:
    """KL(N(mean, std^2) || N(0, 1/precision)) summed over all weights; `variance` is std^2 where it is known already.

    It is summed term by term: with millions of weights, every pass over them counts.
    """
    variance = (2 * log_std).exp() if variance is None else variance
    if precision.ndim:
        squares, logs = (precision * (variance + mean.square())).sum(), precision.log().sum()
    else:
        squares, logs = precision * (variance.sum() + mean.square().sum()), mean.numel() * precision.log()
    return 0.5 * (squares - logs - mean.numel()) - log_std.sum()


def precisions(network: Network, layout: WeightLayout) -> Tensor:
    """The prior precision of each weight of a layout, [size], or one number for all."""
    parameters = dict(network.module.named_parameters())
    names = layout.parameter_names()
    by_weight = gaussian_precisions(network.prior, {weight: parameters[weight] for weight in names.values()})
    if by_weight is None:
        raise ValueError(
            f"variational layers need a Gaussian prior, for its KL divergence in closed form, and this one is "
            f"{type(network.prior).__name__}: use caveat.GaussianPrior(precision)"
        )
    values = [*by_weight.values()]
    if all(value.ndim == 0 and value == values[0] for value in values):
        return values[0]
    by_layer = {name: by_weight[weight] for name, weight in names.items()}
    return layout.gathered({name: p.expand(layout.geometries[name].shape) for name, p in by_layer.items()})


def check_fine(log_std: Tensor) -> None:
    """Refuse log standard deviations in half precision: a step of .01 at -5 rounds away, and sigma would never move."""
    if torch.finfo(log_std.dtype).bits < 32:
        raise ValueError(
            f"steps of log sigma are lost in {str(log_std.dtype).removeprefix('torch.')}: give the module in float32, "
            "and for speed Training(precision='bfloat16')"
        )


def noise_of_batch(rows: int, part: BatchPart, rng: torch.Generator) -> Callable[[Tensor], Tensor]:
    """A function that draws standard normals as one process would for the whole batch, for this rank's rows."""

    def draw(like: Tensor) -> Tensor:
        _refuse_in_backward()
        times, rest = divmod(len(like), rows)  # a module may have folded another axis into the rows
        total, start = (len(like), 0) if rest else (times * part.batch_rows, times * part.start)
        shape = (total, *like.shape[1:])
        whole = torch.randn(shape, generator=rng, dtype=like.dtype, device=like.device)
        return whole[start : start + len(like)]

    return draw


def noise_of_weights(rng: torch.Generator) -> Callable[[Tensor], Tensor]:
    """A function that draws standard normals for weights, the same on every rank."""

    def draw(like: Tensor) -> Tensor:
        _refuse_in_backward()
        return torch.randn(like.shape, generator=rng, dtype=like.dtype, device=like.device)

    return draw


def _refuse_in_backward() -> None:
    if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() >= 0:  # in a backward pass
        raise ValueError(
            "the network computes activations again in its backward pass (torch.utils.checkpoint), where the noise "
            "would be another one: switch gradient checkpointing off in the module"
        )


def warm_up(highest: float, share: float) -> Callable[[float], float]:
    """The weight of a divergence by the share of training that is over: it rises from 0 to `highest` over `share`."""
    return lambda progress: highest * (min(1.0, progress / share) if share else 1.0)


def kl_weight_for(given: float | None, rows: int, weights: int) -> float:
    """The highest weight of the divergence: as given, or that of the bound, 1, less where weights outnumber rows.

    The divergence is a sum over weights and the likelihood one over rows. With many weights a row the former outweighs
    what the rows say, and the network forgets them; at rows / weights it counts for as many weights as there are rows.
    """
    return min(1.0, rows / weights) if given is None else given


def std_rate_for(given: float | None, steps: int) -> float:
    """The learning rate of log standard deviations: as given, or enough to travel ten units in this many steps.

    Adam moves a number by about its rate a step, which a cosine halves on average: 20 / steps, within .01 and .1.
    """
    return min(0.1, max(0.01, 20 / steps)) if given is None else given
