"""The prior precision of a linear model, and its noise, by MacKay's updates: EM with posterior samples.

    alpha <- gamma / |mean|^2,   gamma = (1/K) sum_k z_k^T M z_k        for all parameters, or for each group of them
    beta  <- (n m - gamma) / |y - Phi mean|^2_B                         the noise precision is beta B

A fixed point is a stationary point of the log evidence. Solves see alpha / beta only: H / beta = M + alpha / beta, so
neither update invalidates what a solver has prepared, and samples are those of unit noise over sqrt(beta). The noise of
the samples stays the same from step to step, and they start from where they were, times sqrt(alpha_old / alpha_new).
The fixed point is sought by `hyperparameters.Search`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from caveat.engine.linear_model.fixed_point import Hyperparameters, Search, spread
from caveat.engine.linear_model.model import Draws, LinearModel, System
from caveat.engine.linear_model.solvers import Prepared, Report, Solution
from caveat.engine.run import Run
from caveat.knobs import Count, Positive, check_knobs

__all__ = ["Hyperparameters", "Solve", "Tuned", "Tuning", "posterior", "spread", "together", "tune", "unfinished"]

# How samples and the posterior mean [d] are found under a prior: the start holds the samples, then the mean.
Solve = Callable[[LinearModel, Prepared, System, Tensor | None], tuple[Solution, Tensor]]


@dataclass(frozen=True)
class Tuning:
    """Knobs of the updates."""

    steps: Count = 30
    tolerance: Positive = 1e-2  # of the precisions and the effective dimension: how far they may still be from rest
    samples: Count = 8  # one is enough for a large effective dimension: the relative error is sqrt(2 / (samples gamma))

    def __post_init__(self) -> None:
        check_knobs(self)


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
    if report.stood_still:
        advice = (
            "the products have too few digits for so weak a prior; use double precision, arithmetic='full' where it "
            "was 'float16', or a larger prior precision"
        )
    else:
        advice = "allow more passes, or give conjugate gradients a sketch of higher rank"
    return [
        *report.warnings,
        f"the solver stopped after {report.passes:.0f} passes at a relative residual of "
        f"{float(report.residuals.max()):.2g}, and samples of an unfinished solve are too wide: {advice}",
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
    search, found, start = Search(prepared.top, knobs.tolerance), None, None
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
        prepared.progress = lambda passes, residual: run.tell(
            bar, f"precision {float(hyper.prior.log().mean().exp()):.3g}, pass {passes:.0f}, residual {residual:.1e}"
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
