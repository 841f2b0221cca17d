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
from typing import Any

import torch
from torch import Tensor

from caveat.engine.linear_model import Draws, LinearModel, System
from caveat.engine.run import Run
from caveat.engine.solvers import Prepared, Report, Solution
from caveat.knobs import Count, Positive, check_knobs

__all__ = ["Hyperparameters", "Solve", "Tuned", "Tuning", "posterior", "spread", "together", "tune", "unfinished"]

# How samples and the posterior mean [d] are found under a prior: the start holds the samples, then the mean.
Solve = Callable[[LinearModel, Prepared, System, Tensor | None], tuple[Solution, Tensor]]
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
    names: tuple[str, ...] | None = None  # of the groups, for what is said about them

    def which(self, numbers: list[int]) -> str:
        """Groups in words."""
        if self.groups is None:
            return ""
        return f" of groups {numbers}" if self.names is None else f" of {', '.join(self.names[i] for i in numbers)}"

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
    report: Report  # of the last solve
    vectors: float = 0.0  # products of all solves
    history: list[dict[str, list[float]]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def together(right: System) -> Solve:
    """The mean of least squares, which solves a system of the same matrix, beside the samples."""

    def solve(model: LinearModel, prepared: Prepared, samples: System, start: Tensor | None) -> tuple[Solution, Tensor]:
        found = prepared.solve(model, samples.beside(right), start)
        return Solution(found.z[:-1], found.image[:-1], found.report), found.z[-1]

    return solve


def posterior(
    model: LinearModel,
    hyper: Hyperparameters,
    prepared: Prepared,
    draws: Draws,
    solve: Solve,
    start: Tensor | None = None,
) -> Tuned:
    """Mean and samples under given hyperparameters; the start holds the samples, then the mean."""
    own = hyper.model(model)
    solution, mean = solve(own, prepared, draws.system(own), start)
    report = solution.report
    gamma = solution.effective_dimension(hyper.groups)
    return Tuned(hyper, gamma, mean, solution.z, report, report.vectors, [], unfinished(report))


def unfinished(report: Report) -> list[str]:
    """What to say of a solve that stopped before its end."""
    if report.converged:
        return report.warnings
    return [
        *report.warnings,
        f"the solver stopped after {report.passes:.0f} passes at a relative residual of "
        f"{float(report.residuals.max()):.2g}: samples of an unfinished solve are too wide; allow more passes, or "
        "give conjugate gradients a sketch of higher rank",
    ]


def tune(
    model: LinearModel,
    hyper: Hyperparameters,
    prepared: Prepared,
    draws: Draws,
    solve: Solve,
    knobs: Tuning | None = None,
    misfit: Callable[[Tensor], float] | None = None,
    run: Run | None = None,
) -> Tuned:
    """Find the prior precisions and, with `misfit` (a mean's |y - Phi mean|^2_B), the noise precision too.

    A run keeps the place after each step.
    """
    knobs, run = knobs or Tuning(), run or Run()
    search, found, start = _Search(prepared.top, knobs.tolerance), None, None
    history: list[dict[str, list[float]]] = []
    vectors = 0.0
    kept = run.resume()
    if kept is not None:
        carry, note = kept
        start, history, vectors = (
            carry["unknowns"]["start"].to(model.precision.device),
            note["history"],
            note["vectors"],
        )
        hyper = replace(hyper, prior=hyper.prior.new_tensor(note["prior"]), noise=note["noise"])
        search.restore(note["search"], hyper.prior)
    with run.bar(knobs.steps, "step") as bar:
        bar.update(len(history))
        prepared.progress = lambda passes, residual: bar.set_postfix_str(
            f"precision {float(hyper.prior.log().mean().exp()):.3g}, pass {passes:.0f}, residual {residual:.1e}"
        )
        for _ in range(len(history), knobs.steps):
            found = posterior(model, hyper, prepared, draws, solve, start)
            vectors += found.vectors
            run.gradient_evaluations += found.vectors
            gamma = found.effective_dimension
            history.append({"prior": hyper.prior.tolist(), "noise": [hyper.noise], "gamma": gamma.tolist()})
            following = search.next(hyper, gamma, *_updates(model, found, misfit))
            if search.resting or len(history) == knobs.steps:
                break
            ratio = (hyper.prior / hyper.noise) / (following.prior / following.noise)
            rescaled = found.samples * spread(ratio.sqrt(), hyper.groups).to(found.samples)
            start, hyper = torch.cat([rescaled, found.mean.unsqueeze(0)]), following
            bar.update()
            if run.checkpoint_due():
                state = {"prior": hyper.prior.tolist(), "noise": hyper.noise, "search": search.state()}
                run.checkpoint({"unknowns": {"start": start}}, state | {"history": history, "vectors": vectors})
    prepared.progress = None
    assert found is not None
    warnings = found.warnings + search.complaints(len(history), hyper)
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

    def state(self) -> dict[str, Any]:
        """What the next step depends on, as json."""
        last = None if self._last is None else [part.tolist() for part in self._last]
        return {
            "last": last,
            "gamma": None if self._gamma is None else self._gamma.tolist(),
            "noise": self._first_noise,
        }

    def restore(self, state: dict[str, Any], like: Tensor) -> None:
        """Go on from a state."""
        at, step = (like.new_tensor(part) for part in state["last"])
        self._last, self._gamma, self._first_noise = (at, step), like.new_tensor(state["gamma"]), state["noise"]

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

    def complaints(self, steps: int, hyper: Hyperparameters) -> list[str]:
        """What a person should know."""
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
