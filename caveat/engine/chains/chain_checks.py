"""What a fit of chains says of itself when it is over: have they mixed, and do they explain the rows at all?

R-hat and effective sample sizes are those of what the draws predict for some training rows, of learned noise, and of
the log density. A warning is what `diagnose` would call "do not trust": an R-hat above 1.05 and above what independent
draws reach by chance, or fewer than ten effective draws a chain. What that is to predictions is another question:

    between_chains = mean over predictions of   var_c(mean of chain c) / predictive variance, noise included

is the share of what a prediction leaves open that depends on which chain is asked. Draws that explain the rows worse
than the marginal distribution of the targets are another warning: learned noise can grow until it hides a chain that
is not stable.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from caveat.batches import Inputs
from caveat.engine.chains.chain_state import ChainState
from caveat.engine.chains.diagnostics import ESS_NOTHING, RHAT_APART, convergence, rhat_null
from caveat.engine.run import Run
from caveat.likelihoods import Hyper
from caveat.task import Task

__all__ = ["DrawChecks", "check_chains"]

ROWS = 50  # training rows, spread evenly, whose predictions are looked at
LOG_NOISE = "log_noise"


def check_chains(state: ChainState, task: Task, run: Run) -> dict[str, Any]:
    """What is found of chains over the weights of a network, as json; adds warnings to the run."""
    checks, network = DrawChecks(task, run), task.network.to(run.device)
    for draw in state.draws(network, state.stats["lp"].numel(), torch.Generator().manual_seed(0)):
        noise = {LOG_NOISE: draw[f"hyper/{LOG_NOISE}"]} if f"hyper/{LOG_NOISE}" in draw else {}
        with torch.no_grad():
            outputs = network({name: draw[name] for name in network.names}, checks.x)
        checks.add(outputs, noise)
    lp = state.stats["lp"].double().cpu()
    return {"lp": float(lp.mean())} | checks.findings(len(lp), {"lp": lp})


class DrawChecks:
    """Looks at one draw after the other, chain after chain."""

    def __init__(self, task: Task, run: Run) -> None:
        self.task, self.run = task, run
        places = torch.linspace(0, task.n - 1, min(task.n, ROWS), dtype=torch.float64).long()
        self.x: Inputs
        self.x, self.y = next(iter(task.train.batches([places], run.device)))
        self.hyper = {name: value.to(run.device) for name, value in task.hyper.items()}
        self.predictions: list[Tensor] = []  # of each draw, [quantities]
        self.noise: list[Tensor] = []  # of each draw, the variance of what is predicted around it
        self.log_prob: list[Tensor] = []  # of each draw, [rows]

    def add(self, outputs: Tensor, learned: Hyper) -> None:
        """Look at a draw's outputs for the rows x and at what the likelihood learned with it."""
        likelihood, hyper = self.task.network.likelihood, self.hyper | learned
        predictive = likelihood.predictive(outputs.unsqueeze(0), hyper)
        samples: Tensor = predictive.samples[0]
        # Of a class: whether it comes.
        noise = samples * (1 - samples) if predictive.kind == "classification" else predictive.aleatoric
        self.noise.append(noise.flatten().double().cpu())
        values = [samples.flatten(), *(value.flatten() for value in learned.values())]
        self.predictions.append(torch.cat([value.double().cpu() for value in values]))
        self.log_prob.append(likelihood.log_prob(outputs, self.y, hyper).double().flatten().cpu())

    def findings(self, chains: int, more: dict[str, Tensor]) -> dict[str, Any]:
        """R-hats and effective sizes of predictions and of `more`, [chains, draws] by name; adds warnings to the run.

        One chain is looked at as its two halves, which have to agree as chains do.
        """
        groups = {"predictions": torch.stack(self.predictions).unflatten(0, (chains, -1))}
        groups |= {name: draws.unsqueeze(-1) for name, draws in more.items()}
        share = self._between_chains(groups["predictions"])
        found: dict[str, Any] = {"between_chains": share}
        for name, draws in groups.items():
            mixing = _mixing(draws)
            found |= {f"rhat_{name}": _number(mixing.rhat), f"ess_{name}": _number(mixing.size)}
            if mixing.told is not None:
                what = "the log density" if name == "lp" else name
                lies = name == "predictions" and share is not None
                lying = f", and {share:.1%} of the predictive variance lies between them" if lies else ""
                self.run.warnings.append(f"{mixing.told} ({what}){lying}: draw longer chains (length, thin)")
        self._check_fit()
        return found

    def _between_chains(self, draws: Tensor) -> float | None:
        """The share of the predictive variance between chains, of quantities [chains, draws, ...] that are predictions.

        None for one chain.
        """
        if len(draws) == 1:
            return None
        noise = torch.stack(self.noise).mean(0)
        draws = draws[..., : len(noise)]
        total = noise + draws.flatten(0, 1).var(0, correction=0)
        share = draws.mean(1).var(0, correction=0) / total
        return _number(float(share[total > 0].mean()))

    def _check_fit(self) -> None:
        """Warn of draws that explain the rows worse than if the inputs were not looked at."""
        each = torch.stack(self.log_prob).mean(0)  # [rows]
        mean, error = float(each.mean()), float(each.std() / math.sqrt(len(each))) if len(each) > 1 else 0.0
        if not mean + 2 * error >= self.task.baseline:
            self.run.warnings.append(
                f"the draws explain the training rows worse than the marginal distribution of the targets does (log "
                f"likelihood {mean:.3g} a row against {self.task.baseline:.3g}): the chains have not found the "
                "posterior, or the prior keeps the network from the data; do not use them"
            )


@dataclass(frozen=True)
class _Mixing:
    rhat: float  # the largest
    size: float  # the smallest effective sample size
    told: str | None  # what is wrong, if anything


def _mixing(draws: Tensor) -> _Mixing:
    """How well quantities [chains, draws, quantities] have mixed."""
    chains, length = draws.shape[:2]
    if chains == 1 and length >= 8:
        draws = torch.stack(draws[0, length % 2 :].chunk(2))
    found = convergence(draws)
    flat = draws.flatten(0, 1)
    moving = flat.isfinite().all(0) & (flat.amax(0) > flat.amin(0))
    if length < 4:
        return _Mixing(math.nan, math.nan, None)
    if not bool(moving.any()):
        return _Mixing(math.nan, math.nan, "the chains do not move, or are not finite")
    size = float(found.ess_bulk[moving].min())
    rhat = found.rhat[moving & found.rhat.isfinite()]
    largest, limit = math.nan, math.inf
    if len(rhat):
        largest, limit = float(rhat.max()), rhat_null(draws.shape[0], draws.shape[1], len(rhat)).limit
    effective = f"{size:,.0f} effective draws of {len(flat):,}"
    if largest > max(RHAT_APART, limit):
        return _Mixing(largest, size, f"the chains have not mixed: R-hat up to {largest:.2f}, {effective}")
    slow = size < min(ESS_NOTHING * chains, len(flat) / 2)
    return _Mixing(largest, size, f"the chains have mixed slowly: {effective}" if slow else None)


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
