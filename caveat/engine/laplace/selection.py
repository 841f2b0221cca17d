"""Which weights to be Bayesian about: a score for every weight, and the best of them.

With G the GGN's diagonal, R = sum_n ||dF(x_n)/dw||^2, w the weight and d its prior precision:

    energy     R / (G + d)      how much the outputs would move, were the weight drawn from its own posterior
    gradient   R                how much the outputs feel the weight
    variance   1 / (G + d)      the rule of Daxberger et al. 2021: least squared Wasserstein distance under independence
    sampled    the weight's variance under the posterior of all weights, by samples (`engine/linearised/sampler.py`)
    sampled_energy   R times that
    swag       variance of the weight along one epoch of SGD
    obd        w^2 G / 2        what removing the weight would cost (optimal brain damage)
    magnitude  |w|
    random

A weight without curvature (G = 0) does nothing on the rows looked at: its posterior is its prior and the outputs do not
move with it, so it is left out. The variance rule would take such weights first.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from caveat.engine.flat_weights import flat
from caveat.engine.laplace.sweep import Sweep
from caveat.engine.run import Run
from caveat.engine.running_moments import RunningMoments
from caveat.network import Params
from caveat.randomness import seeded
from caveat.task import Task

__all__ = ["Selection", "SubnetworkScore", "gaussian_wasserstein", "select_weights"]

SubnetworkScore = Literal[
    "energy", "gradient", "variance", "sampled", "sampled_energy", "swag", "obd", "magnitude", "random"
]

# The variance of every weight under the posterior of all of them, [n], given the prior precisions [n].
MarginalVariances = Callable[[Task, Sweep, Tensor, Run], Tensor]

ROWS = 5_000  # that scores are averages over, unless they are to be exact
EXACT_UP_TO = 2e9  # gradients of single weights; beyond it a row takes one random cotangent instead of all


@dataclass(frozen=True)
class Selection:
    """The chosen weights, and what there is to say about the choice."""

    index: Tensor  # ascending, into the concatenation of all selected parameters
    report: dict[str, Any]


def select_weights(
    task: Task,
    sweep: Sweep,
    count: int,
    score: SubnetworkScore | Tensor,
    prior: Tensor,
    run: Run,
    keep_dead: bool = False,
    marginal_variances: MarginalVariances | None = None,
    exact: bool = False,
) -> Selection:
    """The `count` weights of the highest score, from one pass over the rows (and what "swag" and "sampled" take).

    A score of -inf is never chosen. `prior` has the precision of every weight, [n]; the
    "sampled" scores need `marginal_variances`. `exact` takes all rows and all outputs, whatever the network's size.
    """
    network = sweep.network
    n = network.n_parameters
    if isinstance(score, Tensor) and score.numel() != n:
        raise ValueError(f"score has {score.numel():,} numbers, but the network has {n:,} weights: give one to each")
    if isinstance(score, Tensor) and keep_dead:  # nothing to ask of the data
        values = score.detach().flatten().double()
        best = _best(values, values > -torch.inf, count, "a score of -inf", run)
        return Selection(best.cpu(), {"weights": len(best), "of": n, "score": "given"})
    rows = len(sweep.rows) if exact else min(len(sweep.rows), ROWS)
    some = torch.linspace(0, len(sweep.rows) - 1, rows, dtype=torch.float64).long()
    seen = replace(sweep, rows=sweep.rows.part(some), run=run, fisher="exact")
    outputs = seen.jacobian().plan.outputs
    exact = exact or 2.0 * outputs * n * len(some) <= EXACT_UP_TO
    ggn, energy = (flat(network, sums) * (len(sweep.rows) / len(some)) for sums in seen.scores(exact))
    values = (
        score.detach().flatten().to(ggn.device, torch.float64)
        if isinstance(score, Tensor)
        else _scores(score, task, sweep, ggn, energy, prior, run, marginal_variances)
    )
    dead = ~(ggn > 1e-10 * ggn.mean())
    because = f"no curvature on the {len(some):,} rows looked at (keep_dead=True takes them too)"
    because += " or a score of -inf" if bool((values == -torch.inf).any()) else ""
    best = _best(values, (values > -torch.inf) & (~dead | keep_dead), count, because, run)
    variance = 1 / (ggn + prior.to(ggn))
    dropped = torch.ones_like(dead)
    dropped[best] = False
    report = {
        "weights": len(best),
        "of": n,
        "score": "given" if isinstance(score, Tensor) else score,
        "score_from": f"{len(some)} rows, {'exact' if exact else 'one random cotangent each'}",
        "without_curvature": int(dead.sum()),
        # The paper's distance, under which weights are independent: the root of what the dropped variances sum to.
        "wasserstein": float(variance[dropped].double().sum().sqrt()),
        "share_of_variance": float(variance[best].double().sum() / variance.double().sum()),
        "share_of_energy": float((energy / (ggn + prior.to(ggn)))[best].double().sum())
        / max(float((energy / (ggn + prior.to(ggn))).double().sum()), 1e-300),
    }
    return Selection(best.cpu(), report)


def _best(values: Tensor, allowed: Tensor, count: int, because: str, run: Run) -> Tensor:
    """Places of the highest scores, in order; `because` says what keeps the others from being chosen."""
    if bool(values.isnan().any()):
        raise ValueError("the score holds NaN: give every weight a number")
    available = int(allowed.sum())
    if not available:
        raise ValueError(f"no weight can be chosen: all have {because}")
    if available < count:
        run.warnings.append(
            f"weights={count:,} were asked for, but only {available:,} of {len(values):,} can be chosen: the others "
            f"have {because}"
        )
    return values.masked_fill(~allowed, -torch.inf).topk(min(count, available)).indices.sort().values


def _scores(
    score: SubnetworkScore,
    task: Task,
    sweep: Sweep,
    ggn: Tensor,
    energy: Tensor,
    prior: Tensor,
    run: Run,
    marginal_variances: MarginalVariances | None,
) -> Tensor:
    """The score of every weight, [n]."""
    weights = flat(sweep.network, sweep.params)
    if score == "energy":
        return energy / (ggn + prior.to(ggn))
    if score == "gradient":
        return energy
    if score == "variance":
        return 1 / (ggn + prior.to(ggn))
    if score in ("sampled", "sampled_energy"):
        if marginal_variances is None:
            raise ValueError(f"score={score!r} goes by the marginal variances of all weights: give marginal_variances=")
        part = run.child("marginal")
        variances = marginal_variances(task, sweep, prior, part).to(ggn)
        run.absorb(part)
        return variances if score == "sampled" else energy * variances
    if score == "obd":
        return 0.5 * weights.square() * ggn
    if score == "magnitude":
        return weights.abs()
    if score == "swag":
        return flat(sweep.network, path_variance(task, sweep, run))
    rng = torch.Generator().manual_seed(run.seed)
    return torch.rand(len(ggn), generator=rng, dtype=torch.float64).to(ggn.device)


def path_variance(task: Task, sweep: Sweep, run: Run, rate: float = 0.05, looks: int = 50) -> Params:
    """The variance of each weight over one epoch of SGD at a constant rate, looked at `looks` times."""
    network = sweep.network.with_fixed(sweep.params)
    parameters = dict(network.module.named_parameters())
    weights = {name: parameters[name].requires_grad_() for name in network.names}
    optimizer = torch.optim.SGD(weights.values(), rate, momentum=0.9)
    seed = int(torch.randint(2**62, (), generator=run.rng))
    order = torch.randperm(task.n, generator=torch.Generator().manual_seed(seed)).tensor_split(
        max(2, task.n // task.train.batch_size)
    )
    moments = {name: RunningMoments.like(weight) for name, weight in weights.items()}
    every = max(1, len(order) // looks)
    with seeded(seed, network.device), run.bar(task.n, "row") as bar:
        for step, (x, y) in enumerate(task.train.batches(order, network.device)):
            optimizer.zero_grad(set_to_none=True)
            outputs = network.training_pass(x)
            (-task.log_joint(outputs, y, weights, sweep.hyper) / task.n).backward()
            torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
            optimizer.step()
            bar.update(len(y))
            if (step + 1) % every == 0:
                with torch.no_grad():
                    for name, weight in weights.items():
                        moments[name].add(weight)
    run.gradient_evaluations += 1
    return {name: path.squares / max(path.count, 1) for name, path in moments.items()}


def gaussian_wasserstein(covariance: Tensor, other: Tensor) -> float:
    """The 2-Wasserstein distance between Gaussians of equal mean.

    W^2 = tr(A + B - 2 (B^1/2 A B^1/2)^1/2)
    """
    root = _root(other)
    return float((covariance + other - 2 * _root(root @ covariance @ root)).trace().clamp_min(0).sqrt())


def _root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    return (vectors * values.clamp_min(0).sqrt()) @ vectors.mT
