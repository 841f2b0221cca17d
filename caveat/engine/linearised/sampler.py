"""Samples of a linearised network's posterior over all its weights, made in groups and kept as they are made.

    H z = A theta_0 + J^T R e   gives   z ~ N(0, H^-1),   H = J^T B J + A

(Antoran et al. 2023). The sketch that preconditions the solves is made once; the prior precision comes from MacKay's
updates with a few samples; then all samples are solved for, some at a time. Each of the three is kept in the run's
folder, so that a killed run goes on from the last. The device holds the samples of a group, whatever their number.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from caveat.batches import Inputs, count_rows, map_tensors, move
from caveat.engine.cost import forward_flops
from caveat.engine.flat_weights import flat
from caveat.engine.linear_model import (
    ConjugateGradients,
    Exact,
    Hyperparameters,
    PosteriorSolution,
    PreparedSolver,
    SampleRandomness,
    Solver,
    SolveReport,
    Tuning,
    tune,
    unfinished_warnings,
    units,
)
from caveat.engine.linearised.fisher_noise import LikelihoodNoise
from caveat.engine.linearised.held_features import HeldFeatures, holding_pays
from caveat.engine.linearised.jacobian_features import NetworkFeatures
from caveat.engine.linearised.linearised_network import NetworkModel
from caveat.engine.linearised.row_space import in_row_space, outer_products, row_space_pays
from caveat.engine.run import Run
from caveat.likelihoods import Hyper
from caveat.network import Network, Params
from caveat.rows import Batch, Rows
from caveat.task import Task

__all__ = [
    "NEGLIGIBLE",
    "InputRows",
    "Sampler",
    "check_shifts",
    "copies_of_the_weights",
    "linearise",
    "marginal_variances",
    "normalisations",
    "solver_for",
]


NEGLIGIBLE = 1e-3  # the share of the information that rows may hold and be left out: variances grow by about .2%


@dataclass
class Sampler:
    """A linear model, the solver that knows it, and the run that keeps what is found."""

    linear: NetworkModel
    prepared: PreparedSolver
    run: Run
    seed: int
    flops: float  # of a product with the curvature
    by_rows: PreparedSolver | None = None  # of the linear model's other form, where it has one

    @classmethod
    def of(cls, linear: NetworkModel, solver: Solver, run: Run, flops: float) -> "Sampler":
        """Prepare the solver, or take what a killed run had prepared."""
        part = run.child("sketch")
        earlier = part.appended("sketch")
        if linear.by_rows is not None:  # whose matrix is that of the weights' model, and too large to be kept
            with part.counting("product") as counted:
                by_rows = solver.prepare(linear.by_rows.model, counted=counted)
            prepared = solver.prepare(linear.model, stored=by_rows.tensors())
            return cls(linear, prepared, run, run.seed, flops, by_rows)
        if earlier is None:
            with part.counting("product") as counted:
                prepared = solver.prepare(linear.model, run.seed, counted=counted)
            part.gradient_evaluations += prepared.preparation
            if run.ranks.first:
                part.append("sketch", {"sketch": prepared.tensors()})
        else:
            on = {name: value.to(linear.features.device) for name, value in earlier[0]["sketch"].items()}
            prepared = solver.prepare(linear.model, run.seed, on)
        sampler = cls(linear, prepared, run, run.seed, flops)
        sampler._absorb(part)
        return sampler

    def tuned(self, hyper: Hyperparameters, tuning: Tuning) -> PosteriorSolution:
        """The prior precision and, where it is learned, the noise."""
        part = self.run.child("precision")
        earlier = part.appended("tuned")
        if earlier is not None:
            tensors, note = earlier[0]["tuned"], earlier[1]
            device = hyper.prior.device
            hyper = replace(hyper, prior=hyper.prior.new_tensor(note["prior"]), noise=note["noise"])
            gamma = hyper.prior.new_tensor(note["effective_dimension"])
            mean, samples = (tensors[name].to(device) for name in ("mean", "samples"))
            report = SolveReport()
            tuned = PosteriorSolution(hyper, gamma, mean, samples, report, 0.0, note["history"], note["warnings"])
        else:
            linear, prepared = self.linear.by_rows or self.linear, self.by_rows or self.prepared
            solve, misfit = linear.solving(tuning.tolerance)
            randomness = SampleRandomness(linear.model, range(tuning.samples), self.seed)
            tuned = tune(linear.model, hyper, prepared, randomness, solve, tuning, misfit, part)
            if self.by_rows is not None:  # without passes through the network, and in other coordinates
                part.gradient_evaluations, tuned = 0, replace(tuned, samples=tuned.samples[:0])
            note = {"prior": tuned.hyper.prior.tolist(), "noise": tuned.hyper.noise, "history": tuned.history}
            note |= {"effective_dimension": tuned.effective_dimension.tolist(), "warnings": tuned.warnings}
            if self.run.ranks.first:
                part.append("tuned", {"tuned": {"mean": tuned.mean, "samples": tuned.samples}}, note)
        self._absorb(part)
        return tuned

    def groups(
        self, hyper: Hyperparameters, samples: int, at_once: int, known: Tensor | None = None
    ) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Deviations from the mean in weights, [k, d] at a time, on disk or on the CPU, with a note on each solve.

        Samples that are known already, of unit noise and in the linear model's coordinates, are where the first start.
        """
        model = hyper.model(self.linear.model)
        part = self.run.child("samples")
        with part.bar(samples, "sample") as bar:
            self.prepared.progress = lambda passes, residual: part.tell(
                bar, f"pass {passes:.0f}, residual {residual:.1e}"
            )
            for first in range(0, samples, at_once):
                numbers = range(first, min(first + at_once, samples))
                earlier = part.appended(str(first))
                if earlier is None:
                    system = SampleRandomness(model, numbers, self.seed).system(model)
                    start = None
                    if known is not None and first < len(known):
                        start = torch.cat([known[first : numbers.stop], system.prior[len(known) - first :]])
                    solution = self.prepared.solve(model, system, start)
                    report = solution.report
                    note = {
                        "passes": report.passes,
                        "residual": float(report.residuals.max()),
                        "energies": (solution.z * solution.image).sum(1, dtype=torch.float64).tolist(),  # z^T M z
                        "warnings": unfinished_warnings(report),
                    }
                    part.gradient_evaluations += report.vectors + len(numbers)
                    deviations = (self.linear.outside(solution.z) * hyper.noise**-0.5).cpu()
                    if self.run.ranks.first:
                        part.append(str(first), {"samples": {"deviations": deviations}}, note)
                        earlier = part.appended(str(first))  # large ones are on disk from here on
                if earlier is not None:
                    deviations, note = earlier[0]["samples"]["deviations"], earlier[1]
                bar.update(len(numbers))
                yield deviations, note
        self.prepared.progress = None
        self._absorb(part)

    def _absorb(self, part: Run) -> None:
        part.flops = part.gradient_evaluations * self.flops
        self.run.absorb(part)


def copies_of_the_weights(samples: int, at_once: int, rank: int) -> int:
    """How many copies of the weights sampling holds: the samples, ten vectors for each solved for, and the sketch."""
    return samples + 10 * at_once + 6 * rank


def marginal_variances(
    task: Task, network: Network, params: Params, hyper: Hyper, prior: Tensor, run: Run, samples: int = 64
) -> Tensor:
    """The variance of every weight under a prior of precisions [d], all others counted, [d]; by samples."""
    mean = float(prior.double().log().mean().exp())
    model, flops = linearise(
        task, network, params, hyper, run, g_prior=False, prior=prior / mean, negligible=NEGLIGIBLE
    )
    sampler = Sampler.of(model, solver_for(model, 1), run, flops)
    under = Hyperparameters(torch.full((1,), mean, dtype=torch.float64, device=network.device))
    total = torch.zeros(len(prior), dtype=torch.float64)
    for deviations, note in sampler.groups(under, samples, 16):
        total += deviations.double().square().sum(0)
        run.warnings.extend(text for text in note["warnings"] if text not in run.warnings)
    return total / samples


def linearise(
    task: Task,
    network: Network,
    params: Params,
    hyper: Hyper,
    run: Run,
    *,
    g_prior: bool,
    prior: Tensor | None = None,
    negligible: float = 0.0,
    exact: bool = True,
    precisions: int = 1,
    coarse: bool = False,
    block_rows: int | None = None,
    float16: bool = False,
) -> tuple[NetworkModel, float]:
    """The linear model of a task at a point, and the FLOPs of a product with its curvature.

    Args:
        task: the data.
        network: restricted to the weights of the linear model, on the device of the work.
        params: the point.
        hyper: of the likelihood, there.
        run: keeps the units of a g-prior, and shows how far they are.
        g_prior: measure each weight in units of its curvature.
        prior: precisions [d] to measure weights by instead; None measures all alike.
        negligible: the share of the information that rows left out of the curvature may hold.
        exact: hold the Jacobian itself, or a matrix over rows and outputs, where that is the cheaper way.
        precisions: how many the prior has; the matrix is for one.
        coarse: whether the prior will be no weaker than the evidence has it, for which the matrix may be coarse.
        block_rows: rows in a block of a pass.
        float16: products in float16.
    """
    outputs, targets = task.outputs(network, params, task.train)
    if not outputs.isfinite().all():
        row = int((~outputs.isfinite()).flatten(1).any(1).nonzero()[0])
        raise ValueError(f"the network's outputs hold NaN or infinity, first in row {row}: look at its weights")
    noise, weights = LikelihoodNoise(network.likelihood, hyper, outputs, targets), flat(network, params)
    features = NetworkFeatures(
        network, params, task.train, block_rows=block_rows, float16=float16, row_numbers=noise.row_numbers
    )
    x, _ = next(task.train.batches([torch.arange(1)], network.device))
    flops = forward_flops(network, params, x)
    why = holding_pays(features, noise.width, flops) if exact else ""
    held: NetworkFeatures | HeldFeatures = features
    if why:
        part = run.child("rows")
        with part.counting("row") as counted:
            held = HeldFeatures.of_network(features, why, counted)
        run.absorb(part)
    linear = NetworkModel(held, noise, weights, None if prior is None else prior.rsqrt(), negligible)
    if g_prior:
        part = run.child("scale")
        linear = replace(linear, scale=_units(linear, part))
        run.absorb(part)
    if exact and not why and precisions == 1 and row_space_pays(features, flops):
        part = run.child("matrix")
        with part.counting("weight") as counted:
            gram = outer_products(features, linear.scale, counted, coarse=coarse)
        linear = replace(linear, by_rows=in_row_space(linear, gram))
        part.gradient_evaluations += 2 * features.outputs
        run.absorb(part)
    # There and back, twice a forward pass each; with the Jacobian itself, two products of matrices.
    of_row = 4 * features.outputs * features.size if why else 4 * flops
    return linear, of_row * linear.model.features.rows


def solver_for(linear: NetworkModel, precisions: int) -> Solver:
    """The solver that suits a linear model under so many precisions: exact where rows and outputs are few."""
    suits = (isinstance(linear.features, HeldFeatures) or linear.by_rows is not None) and precisions == 1
    return Exact() if suits else ConjugateGradients()


def _units(linear: NetworkModel, run: Run) -> Tensor:
    """One over the root of each weight's curvature, zero where it has none; made once, or what a killed run had."""
    earlier = run.appended("scale")
    if earlier is not None:
        return earlier[0]["scale"]["scale"].to(linear.features.device)
    features, noise = linear.counted(linear.noise)
    with run.counting("row") as counted:
        diagonal = features.curvature_diagonal(noise, counted)
    if not diagonal.isfinite().all():
        linear.model.check_finite()
    scale = units(diagonal, linear.model.features.dtype)
    if run.ranks.first:
        run.append("scale", {"scale": {"scale": scale}})
    return scale


def check_shifts(shifts: Tensor, first: int = 0) -> None:
    """Refuse J z [K, B, m] that are not finite; rows are counted from the first's number."""
    if not shifts.isfinite().all():
        row = first + int((~shifts.isfinite()).any(2).any(0).nonzero()[0])
        raise ValueError(f"the network's derivatives at row {row} hold NaN or infinity: look at that row's inputs")


class InputRows(Rows):
    """Inputs of any structure as rows without targets."""

    def __init__(self, x: Inputs) -> None:
        self.x, self.batch_size, self.known_finite = x, 128, True

    def __len__(self) -> int:
        return count_rows(self.x)

    def on(self, device: torch.device) -> Rows:
        """The rows themselves: batches are moved as they are read."""
        return self

    def batches(self, order: Any, device: torch.device | str = "cpu") -> Iterator[Batch]:
        """One batch for each tensor of positions."""
        for rows in order:
            chosen = map_tensors(lambda t, rows=rows: t[rows.to(t.device)] if t.ndim else t, self.x)  # type: ignore[misc]
            yield move(chosen, torch.device(device)), torch.zeros(len(rows), dtype=torch.long, device=device)


def normalisations(network: Network) -> set[str]:
    """Names of the normalisation layers: in front of one, the scale of weights does not matter."""
    layers = ((name, child) for name, child in network.module.named_modules() if not list(child.children()))
    return {name for name, child in layers if "Norm" in type(child).__name__}
