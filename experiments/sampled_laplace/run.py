"""Sampled linearised Laplace against the exact posterior: LeNet-small (14,597 weights) on MNIST.

    CAVEAT_DATA=data python experiments/sampled_laplace/run.py --csv experiments/sampled_laplace/results.csv
    python experiments/sampled_laplace/run.py --cells em variances      # some of them
    python experiments/sampled_laplace/run.py --summary                 # only the table

Every line of the csv is (cell, setting, quantity, value, command, commit). The network and the exact matrix are made
once and kept.
"""

import argparse
import csv
import math
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from problem import Exact, Problem
from torch import Tensor

import caveat
from caveat import SampledLaplace
from caveat.engine.linear_model import (
    ConjugateGradients,
    SampleRandomness,
    Solver,
    StochasticDescent,
    Tuning,
    apply_factor,
    inner,
)
from caveat.engine.linear_model.features import apply_factor_transposed
from caveat.engine.linearised import Sampler
from caveat.engine.run import Run
from caveat.files import whole_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from pieces import commit

Found = Iterator[tuple[str, str, float]]  # setting, quantity, value
COLUMNS = ("cell", "setting", "quantity", "value", "command", "commit")
SAMPLES, TEST = 64, 400
PASSES = (10, 40, 160)
STEPS = 30_000  # of descent in small batches, at most: a step of few rows takes as long as one of many
ARRIVED = 0.02  # an error in the norm of H at which a solver need go no further
SOLVER = ConjugateGradients(rank=256)


def exact(problem: Problem, own: Exact) -> Found:
    """The network, its exact effective dimension and the exact fixed point of the updates."""
    x, y = problem.test
    labels = problem.start.predict(x).label
    yield "map", "accuracy", float((labels.cpu() == y).double().mean())
    yield "map", "weights", float(len(problem.linear.weights))
    yield "exact", "precision", own.precision
    yield "exact", "effective dimension", own.gamma(own.precision)


def em(problem: Problem, own: Exact) -> Found:
    """Two starts, with eight samples."""
    for first in (1.0, 1000.0):
        yield from _em(problem, own, f"from {first:g}", first, Tuning(), 0)


def one_sample(problem: Problem, own: Exact) -> Found:
    """One sample, five seeds."""
    for seed in range(5):
        yield from _em(problem, own, f"one sample, seed {seed}", 1.0, Tuning(samples=1), seed)


def _em(problem: Problem, own: Exact, name: str, first: float, tuning: Tuning, seed: int) -> Found:
    started = time.perf_counter()
    sampler = Sampler.of(problem.linear, SOLVER, Run(seed), 0.0)
    found = sampler.tuned(problem.under(first), tuning)
    print(f"{name}: {found.history}", file=sys.stderr, flush=True)
    alpha, gamma = float(found.hyper.prior), float(found.effective_dimension)
    yield name, "precision", alpha
    yield name, "precision, of the exact", alpha / own.precision
    yield name, "effective dimension, of the exact", gamma / own.gamma(alpha)
    yield name, "expected relative error of gamma", math.sqrt(2 / (tuning.samples * gamma))
    yield name, "steps", float(len(found.history))
    yield name, "products", sampler.prepared.preparation + found.vectors
    yield name, "seconds", time.perf_counter() - started


def variances(problem: Problem, own: Exact) -> Found:
    """Predictive variances of 64 samples against exact ones, at the exact precision; five seeds."""
    alpha = own.precision
    x = problem.test[0][:TEST]
    J, half = own.outputs(x, alpha)
    exactly, covariance = half.square().sum(0), half.T @ half
    error = float(covariance.norm() / covariance.trace()) * math.sqrt(2 / SAMPLES)
    yield "64 samples", "expected relative error of the mean variance", error
    # Outputs of one sample are correlated. In directions in which they are not, K times the ratio is chi-squared.
    chosen = torch.randperm(half.shape[1], generator=torch.Generator().manual_seed(0))[:500]
    values, vectors = torch.linalg.eigh(covariance[chosen][:, chosen])
    kept = values > 1e-6 * values[-1]
    yield "64 samples", "directions", float(kept.sum())
    method = SampledLaplace(samples=SAMPLES, precision=alpha, g_prior=False, solver=SOLVER)
    for seed in range(5):
        name, started = f"seed {seed}", time.perf_counter()
        posterior = caveat.fit(
            problem.task, method, start=problem.start, seed=seed, device=problem.device, progress=False
        )
        yield name, "seconds", time.perf_counter() - started
        yield name, "passes", posterior.info.diagnostics["passes"]
        u = torch.cat(list(posterior.state["samples"].values())).to(J) @ J.T  # [K, B m]
        sampled = u.square().mean(0)
        yield name, "mean variance, of the exact", float(sampled.mean() / exactly.mean())
        per_input = sampled.view(-1, 10).mean(1) / exactly.view(-1, 10).mean(1)
        for share in (0.05, 0.5, 0.95):
            yield name, f"variance of an input, of the exact, quantile {share:g}", float(per_input.quantile(share))
        statistic = (u[:, chosen] @ (vectors[:, kept] / values[kept].sqrt())).square().sum(0)
        below = torch.special.gammainc(torch.full_like(statistic, SAMPLES / 2), statistic / 2)
        yield name, "p of chi-squared (Kolmogorov-Smirnov)", ks(below)
        labels = posterior.predict(x).samples.mean(0).argmax(-1)
        yield name, "labels as the network's", float((labels == problem.start.predict(x).label).double().mean())


def ks(uniform: Tensor) -> float:
    """The probability of a distance this large from the uniform distribution, for many values."""
    ordered, n = uniform.sort().values, len(uniform)
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    distance = float(torch.maximum((steps[1:] - ordered.cpu()).max(), (ordered.cpu() - steps[:-1]).max()))
    scaled = (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n)) * distance
    terms = (2 * (-1) ** (j - 1) * math.exp(-2 * j * j * scaled * scaled) for j in range(1, 101))
    return min(max(sum(terms), 0.0), 1.0)


def objectives(problem: Problem, own: Exact) -> Found:
    """The variance of a batch's gradient of L and L', next to the square of the gradient at zero; at the solution."""
    model = problem.under(own.precision).model(problem.model)
    draws = SampleRandomness(model, 8)
    system = draws.system(model)
    root = own.root(own.precision)
    z = torch.cholesky_solve(system.right.double().T, root).T.to(system.right)
    rng = torch.Generator().manual_seed(0)
    for batch in (10, 30, 100, 300, 1000):
        squares = torch.zeros(2, dtype=torch.float64)
        for _ in range(20):
            index = torch.randperm(problem.rows, generator=rng)[:batch].to(problem.device)
            (block,) = model.features.blocks([index])
            factor, share = model.noise.factor(block), problem.rows / batch
            seen = apply_factor_transposed(factor, block.forward(z))
            reduced = share * block.backward(apply_factor(factor, seen)) + model.precision * z - system.right
            noise = share * block.backward(apply_factor(factor, seen - draws.noise(block)))
            plain = noise + model.precision * (z - system.prior)
            squares += torch.stack([inner(g, g).sum().cpu() for g in (plain, reduced)])
        whole = float(inner(system.right, system.right).sum())
        for name, value in zip(("L", "L'"), squares / 20 / whole, strict=True):
            yield f"batch {batch}", f"variance of the gradient of {name}", float(value)


def solvers(problem: Problem, own: Exact) -> Found:
    """Passes and seconds to a residual of 1e-2 with eight samples, and the error in the norm of H."""
    model = problem.under(own.precision).model(problem.model)
    system = SampleRandomness(model, 8).system(model)
    exactly = torch.cholesky_solve(system.right.double().T, own.root(own.precision)).T
    every: dict[str, Solver] = {
        f"conjugate gradients, rank {r}": ConjugateGradients(rank=r, tolerance=1e-2) for r in (0, 64, 256)
    }
    for objective in ("plain", "reduced", "dual"):
        every[f"descent, {objective}"] = StochasticDescent(objective, 100, passes=60)  # type: ignore[arg-type]
    for name, solver in every.items():
        started = time.perf_counter()
        prepared = solver.prepare(problem.model)
        found = prepared.solve(model, system)
        wrong = found.z.double() - exactly
        error = (wrong * (wrong @ own.M + own.precision * wrong)).sum(1)
        whole = (exactly * (exactly @ own.M + own.precision * exactly)).sum(1)
        yield name, "seconds", time.perf_counter() - started
        yield name, "passes of preparation", prepared.preparation / 8
        yield name, "passes", found.report.passes
        yield name, "residual", float(found.report.residuals.max())
        yield name, "error in the norm of H", float((error / whole).sqrt().mean())


def descent(problem: Problem, own: Exact) -> Found:
    """Error in the norm of H after more and more passes, by objective and batch, beside conjugate gradients."""
    model = problem.under(own.precision).model(problem.model)
    system = SampleRandomness(model, 8).system(model)
    exactly = torch.cholesky_solve(system.right.double().T, own.root(own.precision)).T
    whole = (exactly * (exactly @ own.M + own.precision * exactly)).sum(1)

    def error(z: Tensor) -> float:
        wrong = z.double() - exactly
        return float(((wrong * (wrong @ own.M + own.precision * wrong)).sum(1) / whole).sqrt().mean())

    every: dict[str, tuple[int, Callable[[int], Solver]]] = {}  # and the rows of a step
    for rank in (0, 64):
        every[f"conjugate gradients, rank {rank}"] = problem.rows, partial(_gradients, rank)
    for batch in (500, 100, 20):
        for objective in ("plain", "reduced", "dual"):
            every[f"descent, {objective}, batch {batch}"] = batch, partial(_descent, objective, batch)
    for name, (batch, solver) in every.items():
        for passes in (p for p in PASSES if p * problem.rows <= STEPS * batch or p == PASSES[0]):
            started, prepared = time.perf_counter(), solver(passes).prepare(problem.model)
            reached = error(prepared.solve(model, system).z)
            yield name, f"error after {passes} passes and {prepared.preparation / 8:.3g} before", reached
            yield name, f"seconds of {passes} passes", time.perf_counter() - started
            if reached <= ARRIVED:
                break


def _gradients(rank: int, passes: int) -> Solver:
    return ConjugateGradients(rank=rank, tolerance=1e-9, rest=1e-12, iterations=passes)


def _descent(objective: Literal["plain", "reduced", "dual"], batch: int, passes: int) -> Solver:
    looks = {"look_every": min(passes, 5), "tolerance": 1e-9, "rest": 1e-12}
    return StochasticDescent(objective, batch, passes=passes, **looks)  # type: ignore[arg-type]


def joint(problem: Problem, own: Exact) -> Found:
    """Likelihood of ten labels drawn from two test rows, a label, and of single rows."""
    x, y = problem.test
    methods: dict[str, caveat.Method | None] = {"map": None, "sampled": SampledLaplace(g_prior=False, solver=SOLVER)}
    for name, method in methods.items():
        posterior = problem.start
        if method is not None:
            posterior = caveat.fit(problem.task, method, start=problem.start, device=problem.device, progress=False)
        log_p = torch.cat([posterior.predict(part).log_samples.cpu() for part in x.split(1000)], 1)  # type: ignore[attr-defined]
        right = log_p.gather(-1, y.expand(len(log_p), -1).unsqueeze(-1)).squeeze(-1)  # [S, N]
        rng = torch.Generator().manual_seed(0)
        rows = torch.randint(len(y), (5000, 2), generator=rng)
        chosen = rows.gather(1, torch.randint(2, (5000, 10), generator=rng))
        yield name, "nll", -float((right.logsumexp(0) - math.log(len(right))).mean())
        together = right[:, chosen].sum(-1).logsumexp(0) - math.log(len(right))
        yield name, "joint nll a label", -float(together.mean()) / 10


CELLS: dict[str, Callable[[Problem, Exact], Found]] = {
    cell.__name__: cell for cell in (exact, em, variances, one_sample, objectives, solvers, descent, joint)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--folder", type=Path, default=Path("runs/sampled_laplace"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="a smaller network, to see whether everything runs")
    parser.add_argument("--cells", nargs="+", choices=list(CELLS), default=list(CELLS))
    parser.add_argument("--csv", type=Path, default=Path(__file__).parent / "results.csv")
    parser.add_argument("--summary", action="store_true")
    given = parser.parse_args()
    if not given.summary:
        given.folder.mkdir(parents=True, exist_ok=True)
        problem = Problem(given.rows, given.folder, given.device, given.quick)
        own = Exact(problem)
        lines = [row for row in _read(given.csv) if row["cell"] not in given.cells]
        command = f"run.py --rows {given.rows} --device {given.device} --cells"
        for name in given.cells:
            started = time.perf_counter()
            about = {"cell": name, "command": f"{command} {name}{' --quick' * given.quick}", "commit": commit()}
            for setting, quantity, value in CELLS[name](problem, own):
                lines.append(about | {"setting": setting, "quantity": quantity, "value": str(value)})
                with whole_file(given.csv) as temporary, temporary.open("w", newline="") as file:
                    writer = csv.DictWriter(file, COLUMNS, restval="")
                    writer.writeheader()
                    writer.writerows(lines)
            print(f"{name}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    print("| cell | setting | quantity | value |\n|---|---|---|---|")
    for row in _read(given.csv):
        print(f"| {row['cell']} | {row['setting']} | {row['quantity']} | {float(row['value']):.4g} |")


def _read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


if __name__ == "__main__":
    main()
