"""The evidence for a verdict on chains: what they predict, their log density and some weights, and how these mixed."""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from caveat.engine.chains import RHAT_THRESHOLD, Convergence, RhatNull, convergence, rhat_null
from caveat.evaluate.diagnosis.by_draw import LEARNED, ByDraw, chains_of, predict_by_draw
from caveat.posterior import Posterior
from caveat.rows import Data

__all__ = ["Evidence", "Mixing", "Quantities", "gather_evidence"]


@dataclass(frozen=True)
class Mixing:
    """How well the chains of a group of quantities have mixed; a number is None where it cannot be computed."""

    quantities: int
    constant: int  # quantities that are the same in every draw, which are left out of what follows
    not_finite: int  # quantities that hold NaN or infinity, which are left out too
    ess_bulk_min: float | None = None
    ess_tail_min: float | None = None
    rhat_max: float | None = None
    rhat_share_above: float | None = None  # the share of quantities with an R-hat above 1.01
    worst: str | None = None  # the quantity with the largest R-hat
    null: RhatNull | None = None  # what as many independent quantities of independent draws would give


@dataclass(frozen=True)
class Quantities:
    """Named numbers that every draw has, and how well they mixed."""

    names: list[str]
    draws: Tensor  # [chains, draws, quantities]
    convergence: Convergence  # one number a quantity

    @staticmethod
    def of(names: list[str], draws: Tensor) -> "Quantities":
        """Quantities from their draws [chains, draws, quantities], moved to the CPU, with their diagnostics."""
        draws = draws.detach().cpu()
        return Quantities(names, draws, convergence(draws))

    @property
    def worst(self) -> int:
        """The index of the quantity with the largest R-hat; with one chain, of that with the fewest effective draws."""
        rhat = self.convergence.rhat
        if bool(rhat.isnan().all()):
            return int(self.convergence.ess_bulk.nan_to_num(torch.inf).argmin())
        return int(rhat.nan_to_num(-1.0, posinf=torch.inf).argmax())

    def mixing(self) -> Mixing:
        """Sum up how well the quantities mixed."""
        flat = self.draws.flatten(0, 1)
        finite = flat.isfinite().all(0)
        constant = finite & (flat.amax(0) == flat.amin(0))
        chains, draws, quantities = self.draws.shape
        if chains > 1:  # of an odd number of draws one is in no half: a quantity that moves only there has no R-hat
            constant |= finite & self.convergence.rhat.isnan()
        moving = finite & ~constant
        counts = quantities, int(constant.sum()), int((~finite).sum())
        if not bool(moving.any()):
            return Mixing(*counts)
        bulk, tail = (float(values[moving].min()) for values in (self.convergence.ess_bulk, self.convergence.ess_tail))
        if chains == 1:
            return Mixing(*counts, bulk, tail)
        rhat = self.convergence.rhat[moving]
        above = float((rhat > RHAT_THRESHOLD).double().mean())
        null = rhat_null(chains, draws, int(moving.sum()))
        return Mixing(*counts, bulk, tail, float(rhat.max()), above, self.names[self.worst], null)


@dataclass(frozen=True)
class Evidence:
    """Everything that a verdict on chains rests on."""

    method: str
    rows: int
    predictions: Quantities
    log_density: Quantities
    weights: Quantities
    stats: dict[str, Tensor]  # what the sampler recorded, [chains, draws] each


def gather_evidence(
    posterior: Posterior, data: Data, *, rows: int = 500, weights: int = 2000, seed: int = 0
) -> Evidence:
    """Collect what the chains predict for rows of data, their log density, and some weights; see `diagnose`."""
    if weights < 1:
        raise ValueError(f"weights={weights}: must be at least 1")
    _, draws = chains_of(posterior)
    if draws < 4:
        raise ValueError(f"the chains have {draws} draws each, and diagnostics need at least 4: draw longer chains")
    by_draw = predict_by_draw(posterior, data, rows)
    stats = {name: value.detach().cpu() for name, value in posterior.state["stats"].items()}
    return Evidence(
        type(posterior.method).__name__,
        len(by_draw.rows),
        Quantities.of(*_predictions(by_draw, posterior)),
        Quantities.of(["log posterior density"], stats["lp"].unsqueeze(-1)),
        Quantities.of(*_some_weights(posterior, weights, seed)),
        stats,
    )


def _predictions(by_draw: ByDraw, posterior: Posterior) -> tuple[list[str], Tensor]:
    """Probabilities or means and log densities, row by row, and learned noise: names, [chains, draws, quantities]."""
    kind = "probability" if posterior.network.likelihood.kind == "classification" else "mean"
    rows = by_draw.rows.tolist()
    outputs = list(itertools.product(*(range(n) for n in by_draw.samples.shape[3:])))  # the indices of a row's outputs
    names = [f"row {row}: {kind}{''.join(f' {i}' for i in output)}" for row in rows for output in outputs]
    values = [by_draw.samples.flatten(2), by_draw.log_prob]
    names += [f"row {row}: log density" for row in rows]
    for name, stack in posterior.state["params"].items():
        if name.startswith(LEARNED):
            learned = stack.flatten(2).cpu()
            values.append(learned)
            names += [f"{name.removeprefix(LEARNED)} {i}" for i in range(learned.shape[-1])]
    return names, torch.cat([value.double() for value in values], -1)


def _some_weights(posterior: Posterior, count: int, seed: int) -> tuple[list[str], Tensor]:
    """Weights chosen at random from all layers: names, [chains, draws, weights]."""
    stacks = {name: posterior.state["params"][name].flatten(2) for name in posterior.network.names}
    total = sum(stack.shape[-1] for stack in stacks.values())
    chosen = torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:count].sort().values
    names, values, start = [], [], 0
    for name, stack in stacks.items():
        in_layer = chosen[(chosen >= start) & (chosen < start + stack.shape[-1])] - start
        names += [f"{name} {int(i)}" for i in in_layer]
        values.append(stack[..., in_layer.to(stack.device)].cpu().double())
        start += stack.shape[-1]
    return names, torch.cat(values, -1)
