"""The prior precision of a linear model, and its noise, by MacKay's updates: EM with posterior samples.

    alpha <- gamma / |mean|^2,   gamma = (1/K) sum_k z_k^T M z_k        for all parameters, or for each group of them
    beta  <- (n m - gamma) / |y - Phi mean|^2_B                         the noise precision is beta B

A fixed point is a stationary point of the log evidence. Solvers see only alpha / beta, as H / beta = M + alpha / beta,
so neither update invalidates what a solver has prepared, and samples are those of unit noise over sqrt(beta). The
random numbers of the samples stay the same from step to step, and each solve starts from the samples before it, times
sqrt(alpha_old / alpha_new). The search for the fixed point is in `fixed_point`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from caveat.engine.linear_model.fixed_point import FixedPointSearch, Hyperparameters, spread
from caveat.engine.linear_model.model import LinearModel, LinearSystem, SampleRandomness
from caveat.engine.linear_model.solvers import PreparedSolver, Solution, SolveReport
from caveat.engine.run import Run
from caveat.knobs import Count, Positive, check_knobs

__all__ = [
    "Hyperparameters",
    "PosteriorSolution",
    "Solve",
    "Tuning",
    "mean_beside_samples",
    "solve_posterior",
    "spread",
    "tune",
    "unfinished_warnings",
]

# Solves for the samples and the posterior mean [d] under a model's prior; the start holds the samples, then the mean.
Solve = Callable[[LinearModel, PreparedSolver, LinearSystem, Tensor | None], tuple[Solution, Tensor]]


@dataclass(frozen=True)
class Tuning:
    """Knobs of the updates."""

    steps: Count = 30
    tolerance: Positive = 1e-2  # of the precisions and the effective dimension: how far they may still be from rest
    samples: Count = 8  # one is enough for a large effective dimension: the relative error is sqrt(2 / (samples gamma))

    def __post_init__(self) -> None:
        check_knobs(self)


@dataclass(frozen=True)
class PosteriorSolution:
    """The posterior under some hyperparameters: its mean, samples of it, and how they were found."""

    hyper: Hyperparameters
    effective_dimension: Tensor  # of each group, [G]
    mean: Tensor  # [d]
    samples: Tensor  # of unit beta, [K, d]
    report: SolveReport  # of the last solve
    vectors: float = 0.0  # products that all solves took
    history: list[dict[str, list[float]]] = field(default_factory=list)  # prior, noise and gamma at each update
    warnings: list[str] = field(default_factory=list)


def mean_beside_samples(right: LinearSystem) -> Solve:
    """Solve for the mean of least squares along with the samples: its system has the same matrix."""

    def solve(
        model: LinearModel, prepared: PreparedSolver, samples: LinearSystem, start: Tensor | None
    ) -> tuple[Solution, Tensor]:
        both = prepared.solve(model, samples.beside(right), start)
        return Solution(both.z[:-1], both.image[:-1], both.report), both.z[-1]

    return solve


def solve_posterior(
    model: LinearModel,
    hyper: Hyperparameters,
    prepared: PreparedSolver,
    draws: SampleRandomness,
    solve: Solve,
    start: Tensor | None = None,
) -> PosteriorSolution:
    """Mean and samples under given hyperparameters; the start holds the samples, then the mean."""
    scaled = hyper.model(model)
    solution, mean = solve(scaled, prepared, draws.system(scaled), start)
    report = solution.report
    gamma = solution.effective_dimension(hyper.groups)
    return PosteriorSolution(hyper, gamma, mean, solution.z, report, report.vectors, [], unfinished_warnings(report))


def unfinished_warnings(report: SolveReport) -> list[str]:
    """The warnings of a solve, with what to do if it stopped before it converged."""
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
    prepared: PreparedSolver,
    draws: SampleRandomness,
    solve: Solve,
    knobs: Tuning | None = None,
    misfit: Callable[[Tensor], float] | None = None,
    run: Run | None = None,
) -> PosteriorSolution:
    """Find the prior precisions and, with `misfit` (a mean's |y - Phi mean|^2_B), the noise precision too.

    The run stores how far the search is after each step.
    """
    knobs, run = knobs or Tuning(), run or Run()
    search, solution, start = FixedPointSearch(prepared.top, knobs.tolerance), None, None
    history: list[dict[str, list[float]]] = []
    vectors = 0.0
    resumed = run.resume()
    if resumed is not None:
        carry, note = resumed
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
            solution = solve_posterior(model, hyper, prepared, draws, solve, start)
            vectors += solution.vectors
            run.gradient_evaluations += solution.vectors
            gamma = solution.effective_dimension
            history.append({"prior": hyper.prior.tolist(), "noise": [hyper.noise], "gamma": gamma.tolist()})
            following = search.next(hyper, gamma, *_updates(model, solution, misfit))
            if search.resting or len(history) == knobs.steps:
                break
            ratio = (hyper.prior / hyper.noise) / (following.prior / following.noise)
            rescaled = solution.samples * spread(ratio.sqrt(), hyper.groups).to(solution.samples)
            start, hyper = torch.cat([rescaled, solution.mean.unsqueeze(0)]), following
            bar.update()
            if run.checkpoint_due():
                state = {"prior": hyper.prior.tolist(), "noise": hyper.noise, "search": search.state()}
                run.checkpoint({"unknowns": {"start": start}}, state | {"history": history, "vectors": vectors})
    prepared.progress = None
    assert solution is not None
    warnings = solution.warnings + search.complaints(len(history), hyper)
    return replace(solution, vectors=vectors, history=history, warnings=warnings)


def _updates(
    model: LinearModel, solution: PosteriorSolution, misfit: Callable[[Tensor], float] | None
) -> tuple[Tensor, float | None]:
    """The prior precisions [G] and the noise precision to which MacKay's updates lead."""
    groups, gamma = solution.hyper.groups, solution.effective_dimension
    squares = solution.mean.double().square()
    size = torch.stack([part.sum() for part in squares.split(groups or len(squares))])
    # A group that the data say little about can have a gamma below zero, by few samples: it stays as it is.
    prior = torch.where(gamma > 0, gamma / size, solution.hyper.prior)
    if misfit is None:
        return prior, None
    outputs = model.features.rows * model.features.outputs
    return prior, max(outputs - float(gamma.sum()), 1e-3 * outputs) / max(misfit(solution.mean), 1e-300)
