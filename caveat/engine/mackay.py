"""The prior precision of a linear model, and its noise, by MacKay's updates: EM with posterior samples.

    alpha <- gamma / |mean|^2,   gamma = (1/K) sum_k z_k^T M z_k        for all parameters, or for each group of them
    beta  <- (n m - gamma) / |y - Phi mean|^2_B                         the noise precision is beta B

A fixed point is a stationary point of the log evidence. Solves see alpha / beta only: H / beta = M + alpha / beta, so
neither update invalidates what a solver has prepared, and samples are those of unit noise over sqrt(beta). The noise of
the samples stays the same from step to step, and they start from where they were, times sqrt(alpha_old / alpha_new).
The fixed point is sought in logarithms, with a secant in each coordinate.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from caveat.engine.linear_model import Draws, LinearModel, System
from caveat.engine.solvers import Prepared, Solution
from caveat.knobs import Count, Positive, check_knobs

__all__ = ["Hyperparameters", "Tuned", "Tuning", "spread", "tune"]

# The system of the posterior mean, under a prior and from an earlier mean [d]; for least squares they do not matter.
MeanSystem = Callable[[LinearModel, Tensor | None], System]
_LOWEST, _HIGHEST = 1e-10, 1e4  # of alpha / beta, in units of the curvature's largest eigenvalue
_NOISE = 1e-4, 1e8  # of beta, in units of where it starts


@dataclass(frozen=True)
class Tuning:
    """Knobs of the updates."""

    steps: Count = 30
    tolerance: Positive = 1e-2  # of the precisions and the effective dimension: how far they may still be from rest
    samples: Count = 8  # one is enough for a large effective dimension: the relative error is sqrt(2 / (samples gamma))

    def __post_init__(self) -> None:
        check_knobs(self)


@dataclass(frozen=True)
class Hyperparameters:
    """Prior and noise."""

    prior: Tensor  # alpha of each group, [G], float64
    noise: float = 1.0  # beta
    groups: tuple[int, ...] | None = None  # how many consecutive parameters each has; None: one for all

    def model(self, model: LinearModel) -> LinearModel:
        """The model that solves see: unit beta, and a prior precision of alpha / beta."""
        return model.with_precision(spread(self.prior / self.noise, self.groups).to(model.precision))


def spread(values: Tensor, groups: tuple[int, ...] | None) -> Tensor:
    """A value of each group for each of its parameters, [d], or [1] where there is one group."""
    return values if groups is None else values.repeat_interleave(torch.tensor(groups, device=values.device))


@dataclass(frozen=True)
class Tuned:
    """What the updates found; mean and samples are those under these hyperparameters."""

    hyper: Hyperparameters
    effective_dimension: Tensor  # of each group, [G]
    mean: Tensor  # [d]
    samples: Tensor  # of unit beta, [K, d]
    solution: Solution  # of the last solve: the samples, then the mean
    vectors: float = 0.0  # products of all solves
    history: list[dict[str, list[float]]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def posterior(
    model: LinearModel,
    hyper: Hyperparameters,
    prepared: Prepared,
    draws: Draws,
    mean_system: MeanSystem,
    start: Tensor | None = None,
) -> Tuned:
    """Mean and samples under given hyperparameters; the start holds the samples, then the mean."""
    own = hyper.model(model)
    samples = draws.system(own)
    system = samples.beside(mean_system(own, None if start is None else start[-1]))
    solution = prepared.solve(own, system, start)
    report = solution.report
    only = Solution(solution.z[:-1], solution.image[:-1], report)
    warnings = []
    if not report.converged:
        warnings.append(
            f"the solver stopped after {report.passes:.0f} passes at a relative residual of "
            f"{float(report.residuals.max()):.2g}: samples of an unfinished solve are too wide; allow more passes, or "
            "give conjugate gradients a sketch of higher rank"
        )
    gamma = only.effective_dimension(hyper.groups)
    return Tuned(hyper, gamma, solution.z[-1], only.z, solution, report.vectors, [], warnings)


def tune(
    model: LinearModel,
    hyper: Hyperparameters,
    prepared: Prepared,
    draws: Draws,
    mean_system: MeanSystem,
    knobs: Tuning | None = None,
    misfit: Callable[[Tensor], float] | None = None,
) -> Tuned:
    """Find the prior precisions and, with `misfit` (a mean's |y - Phi mean|^2_B), the noise precision too."""
    knobs = knobs or Tuning()
    search, found, start = _Search(prepared.top, knobs.tolerance), None, None
    history: list[dict[str, list[float]]] = []
    vectors = 0.0
    for _ in range(knobs.steps):
        found = posterior(model, hyper, prepared, draws, mean_system, start)
        vectors += found.vectors
        gamma = found.effective_dimension
        history.append({"prior": hyper.prior.tolist(), "noise": [hyper.noise], "gamma": gamma.tolist()})
        following = search.next(hyper, gamma, *_updates(model, found, misfit))
        if search.resting:
            break
        ratio = (hyper.prior / hyper.noise) / (following.prior / following.noise)
        rescaled = found.samples * spread(ratio.sqrt(), hyper.groups).to(found.samples)
        start, hyper = torch.cat([rescaled, found.mean.unsqueeze(0)]), following
    assert found is not None
    warnings = found.warnings + search.complaints(knobs.steps)
    return replace(found, vectors=vectors, history=history, warnings=warnings)


def _updates(model: LinearModel, found: Tuned, misfit: Callable[[Tensor], float] | None) -> tuple[Tensor, float | None]:
    """Where MacKay's updates lead."""
    groups, gamma = found.hyper.groups, found.effective_dimension
    squares = found.mean.double().square()
    size = torch.stack([part.sum() for part in squares.split(groups or len(squares))])
    # Few samples can give a group that the data say little of a gamma below zero: it waits.
    prior = torch.where(gamma > 0, gamma / size, found.hyper.prior)
    if misfit is None:
        return prior, None
    outputs = model.features.rows * model.features.outputs
    return prior, max(outputs - float(gamma.sum()), 1e-3 * outputs) / max(misfit(found.mean), 1e-300)


class _Search:
    """A fixed point in the logarithms of the precisions, by secants, within bounds."""

    def __init__(self, top: float, tolerance: float) -> None:
        self.top, self.tolerance, self.resting = top or 1.0, tolerance, False
        self.at_bound: Tensor | None = None  # of the priors: -1, 0 or 1
        self.noise_at_bound, self._first_noise = False, 0.0
        self._last: tuple[Tensor, Tensor] | None = None  # a point and the update's step from it
        self._gamma: Tensor | None = None

    def next(self, hyper: Hyperparameters, gamma: Tensor, prior: Tensor, noise: float | None) -> Hyperparameters:
        """Where to go from here; `resting` then says whether that is near enough to stay."""
        at = torch.cat([hyper.prior, hyper.prior.new_tensor([hyper.noise])]).log()
        to = torch.cat([prior, prior.new_tensor([hyper.noise if noise is None else noise])])
        step = to.clamp(1e-300, 1e300).log() - at
        reach = torch.ones_like(step)
        if self._last is not None:
            moved = at - self._last[0]
            slope = torch.where(moved.abs() > 1e-12, (step - self._last[1]) / moved, -1.0)
            # The slope is -1 where the update leads to the fixed point at once; long steps are not made longer.
            reach = torch.where(step.abs() < 1, -1 / slope.clamp(-1.5, -0.25), 1.0)
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
        """Where the noise precision goes from here, within bounds about where it started."""
        self._first_noise = self._first_noise or now
        if wanted is None:
            return now
        low, high = (self._first_noise * bound for bound in _NOISE)
        self.noise_at_bound = not low < wanted < high
        return min(max(wanted, low), high)

    def complaints(self, steps: int) -> list[str]:
        """What a person should know."""
        said = []
        several = self.at_bound is not None and len(self.at_bound) > 1
        for sign, way, meaning in (
            (1, "infinity", "the data do not support these features"),
            (-1, "zero", "the data outweigh the prior entirely"),
        ):
            which = [] if self.at_bound is None else (self.at_bound == sign).nonzero().flatten().tolist()
            if which:
                where = f" of groups {which}" if several else ""
                said.append(f"the prior precision{where} runs to {way} and was bounded: {meaning}")
        if self.noise_at_bound:
            said.append(
                "the noise runs to zero or infinity and was bounded: the features may fit the targets exactly; give it"
            )
        if not self.resting:
            said.append(f"the precisions had not come to rest after {steps} steps: allow more")
        return said
