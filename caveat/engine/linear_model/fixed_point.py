"""The prior and noise precisions of a linear model, and the search for the fixed point of an update of them.

    log x <- log x + reach (log u(x) - log x),   reach = -1 / slope of (log u - log x), by a secant in each coordinate

x are the precisions and u(x) is the update of them. The slope is -1 where one update reaches the fixed point. With more
weights than the data determine it is steeper, because a stronger prior means a smaller effective dimension, for which
the update asks for a weaker prior: about -1.5 for large networks, for which plain updates would oscillate. Precisions
are positive and range over many orders of magnitude, so the search is in logarithms. Those that run to zero or infinity
end at a bound, with a warning.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from caveat.engine.linear_model.model import LinearModel

__all__ = ["FixedPointSearch", "Hyperparameters", "spread"]

_LOWEST, _HIGHEST = 1e-10, 1e4  # of alpha / beta, in units of the curvature's largest eigenvalue
_FIRST_SLOPE = -1.5  # until there are two points
_NOISE = 1e-4, 1e8  # of beta, in units of where it starts


@dataclass(frozen=True)
class Hyperparameters:
    """The precisions of prior and noise."""

    prior: Tensor  # alpha of each group, [G], float64
    noise: float = 1.0  # beta
    groups: tuple[int, ...] | None = None  # how many consecutive parameters each has; None: one for all
    names: tuple[str, ...] | None = None  # of the groups, for what is said about them

    def which(self, numbers: list[int]) -> str:
        """Groups in words, from their numbers."""
        if self.groups is None:
            return ""
        return f" of groups {numbers}" if self.names is None else f" of {', '.join(self.names[i] for i in numbers)}"

    def model(self, model: LinearModel) -> LinearModel:
        """The model as solvers see it: with unit beta, and a prior precision of alpha / beta."""
        return model.with_precision(spread(self.prior / self.noise, self.groups).to(model.precision))


def spread(values: Tensor, groups: tuple[int, ...] | None) -> Tensor:
    """Values of groups [G] repeated for each of their parameters, [d], or [1] where there is one group."""
    return values if groups is None else values.repeat_interleave(torch.tensor(groups, device=values.device))


class FixedPointSearch:
    """A search for the fixed point in the logarithms of the precisions, by secants, within bounds."""

    def __init__(self, top: float, tolerance: float) -> None:
        self.top, self.tolerance, self.resting = top or 1.0, tolerance, False
        self.at_bound: Tensor | None = None  # of the priors: -1, 0 or 1
        self.noise_at_bound, self._first_noise = False, 0.0
        self._last: tuple[Tensor, Tensor] | None = None  # a point and the update's step from it
        self._gamma: Tensor | None = None

    def state(self) -> dict[str, Any]:
        """What the next step depends on, as json."""
        last = None if self._last is None else [part.tolist() for part in self._last]
        return {
            "last": last,
            "gamma": None if self._gamma is None else self._gamma.tolist(),
            "noise": self._first_noise,
        }

    def restore(self, state: dict[str, Any], like: Tensor) -> None:
        """Continue from a state that `state` returned; `like` has the type and device of the precisions."""
        at, step = (like.new_tensor(part) for part in state["last"])
        self._last, self._gamma, self._first_noise = (at, step), like.new_tensor(state["gamma"]), state["noise"]

    def next(self, hyper: Hyperparameters, gamma: Tensor, prior: Tensor, noise: float | None) -> Hyperparameters:
        """The next precisions, given where an update leads; `resting` then says whether to stop there."""
        at = torch.cat([hyper.prior, hyper.prior.new_tensor([hyper.noise])]).log()
        to = torch.cat([prior, prior.new_tensor([hyper.noise if noise is None else noise])])
        step = to.clamp(1e-300, 1e300).log() - at
        slope = torch.full_like(step, _FIRST_SLOPE)
        slope[-1] = -1.0  # of the noise
        if self._last is not None:
            moved = at - self._last[0]
            slope = torch.where(moved.abs() > 1e-12, (step - self._last[1]) / moved, -1.0)
        reach = -1 / slope.clamp(-3, -0.25)
        reach = torch.where(step.abs() < 1, reach, reach.clamp(max=1))  # long steps are not made longer
        self._last = (at, step)
        there = (at + step * reach).exp()
        new_noise = self._bounded_noise(hyper.noise, None if noise is None else float(there[-1]))
        low, high = _LOWEST * self.top * new_noise, _HIGHEST * self.top * new_noise
        new_prior = there[:-1].clamp(low, high)
        self.at_bound = (there[:-1] > high).int() - (there[:-1] < low).int()
        change = (torch.cat([new_prior, new_prior.new_tensor([new_noise])]).log() - at).abs().max()
        settled = self._gamma is not None and bool(
            ((gamma - self._gamma).abs() <= self.tolerance * gamma.sum().clamp_min(1e-3)).all()
        )
        self._gamma = gamma
        self.resting = settled and float(change) <= self.tolerance
        return replace(hyper, prior=new_prior, noise=new_noise)

    def _bounded_noise(self, now: float, wanted: float | None) -> float:
        """The next noise precision, within bounds around where it started."""
        self._first_noise = self._first_noise or now
        if wanted is None:
            return now
        low, high = (self._first_noise * bound for bound in _NOISE)
        self.noise_at_bound = not low < wanted < high
        return min(max(wanted, low), high)

    def complaints(self, steps: int, hyper: Hyperparameters) -> list[str]:
        """What a person should be warned of after so many steps."""
        said = []
        for sign, way, meaning in (
            (1, "infinity", "the data do not support these features"),
            (-1, "zero", "the data outweigh the prior entirely"),
        ):
            which = [] if self.at_bound is None else (self.at_bound == sign).nonzero().flatten().tolist()
            if which:
                said.append(f"the prior precision{hyper.which(which)} runs to {way} and was bounded: {meaning}")
        unknown = [] if self._gamma is None else (self._gamma <= 0).nonzero().flatten().tolist()
        if unknown:
            said.append(
                f"too few samples to tell the effective dimension{hyper.which(unknown)}, whose estimate is below zero: "
                "the prior precision was left where it was; take more, Tuning(samples=...)"
            )
        if self.noise_at_bound:
            said.append(
                "the noise runs to zero or infinity and was bounded: the features may fit the targets exactly; give it"
            )
        if not self.resting:
            said.append(f"the precisions had not come to rest after {steps} steps: allow more")
        return said
