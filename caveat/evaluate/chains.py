"""What chains hold, draw by draw, where a prediction would average: [chains, draws, ...], and how well it has mixed."""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from caveat.batches import concatenate
from caveat.engine.chains import RHAT_THRESHOLD, Convergence, RhatNull, convergence, rhat_null
from caveat.posterior import Posterior
from caveat.rows import Data, Rows

__all__ = ["OWN", "ByDraw", "Evidence", "Mixing", "Quantities", "chains_of", "gather", "predict_by_draw", "some_rows"]

OWN = "hyper/"  # begins the name of what the likelihood learned beside the weights, in every draw anew


@dataclass(frozen=True)
class Mixing:
    """How well the chains of a group of quantities have mixed; None where that cannot be said."""

    quantities: int
    constant: int  # that are the same in every draw, and left out of what follows
    not_finite: int  # that hold NaN or infinity, left out too
    ess_bulk_min: float | None = None
    ess_tail_min: float | None = None
    rhat_max: float | None = None
    rhat_share_above: float | None = None  # 1.01
    worst: str | None = None  # the quantity with the largest R-hat
    null: RhatNull | None = None  # what as many independent quantities of independent draws would give


@dataclass(frozen=True)
class Quantities:
    """Named numbers that every draw has, [chains, draws, quantities], and how well they mixed."""

    names: list[str]
    draws: Tensor
    found: Convergence

    @staticmethod
    def of(names: list[str], draws: Tensor) -> "Quantities":
        """Numbers on the CPU with their diagnostics."""
        draws = draws.detach().cpu()
        return Quantities(names, draws, convergence(draws))

    @property
    def worst(self) -> int:
        """The number of the quantity with the largest R-hat; with one chain, the fewest effective draws."""
        rhat = self.found.rhat
        if bool(rhat.isnan().all()):
            return int(self.found.ess_bulk.nan_to_num(torch.inf).argmin())
        return int(rhat.nan_to_num(-1.0, posinf=torch.inf).argmax())

    def mixing(self) -> Mixing:
        """The summary."""
        flat = self.draws.flatten(0, 1)
        finite = flat.isfinite().all(0)
        constant = finite & (flat.amax(0) == flat.amin(0))
        chains, draws, quantities = self.draws.shape
        if chains > 1:  # a quantity that moves in the one draw that no half has has no R-hat
            constant |= finite & self.found.rhat.isnan()
        moving = finite & ~constant
        counts = quantities, int(constant.sum()), int((~finite).sum())
        if not bool(moving.any()):
            return Mixing(*counts)
        bulk, tail = (float(values[moving].min()) for values in (self.found.ess_bulk, self.found.ess_tail))
        if chains == 1:
            return Mixing(*counts, bulk, tail)
        rhat = self.found.rhat[moving]
        above = float((rhat > RHAT_THRESHOLD).double().mean())
        null = rhat_null(chains, draws, int(moving.sum()))
        return Mixing(*counts, bulk, tail, float(rhat.max()), above, self.names[self.worst], null)


@dataclass(frozen=True)
class Evidence:
    """Everything that a verdict goes by."""

    method: str
    rows: int
    predictions: Quantities
    log_density: Quantities
    weights: Quantities
    stats: dict[str, Tensor]  # what the sampler recorded, [chains, draws] each


def gather(posterior: Posterior, data: Data, *, rows: int = 500, weights: int = 2000, seed: int = 0) -> Evidence:
    """What the chains predict for rows of data, their log density, and some of their weights."""
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


@dataclass(frozen=True)
class ByDraw:
    """Predictions of every draw, on the CPU."""

    rows: Tensor  # [B] their numbers in the data
    targets: Tensor  # [B, ...]
    samples: Tensor  # [chains, draws, B, ...] probabilities, or means or rates
    log_prob: Tensor  # [chains, draws, B] log density of each row's targets


def chains_of(posterior: Posterior) -> tuple[int, int]:
    """How many chains a posterior has, and how many draws each; a TypeError where it has none."""
    stats = posterior.state.get("stats", {})
    if "lp" not in stats:
        raise TypeError(
            f"{type(posterior.method).__name__} runs no chains, so there is nothing to diagnose: "
            "fit a sampler such as caveat.HMC(chains=4)"
        )
    chains, draws = stats["lp"].shape
    return chains, draws


def some_rows(data: Data, count: int | None) -> Rows:
    """All rows of data, or at most `count` spread evenly."""
    rows = Rows(data)
    if count is None or count >= len(rows):
        return rows
    if count < 1:
        raise ValueError(f"rows={count}: must be at least 1")
    return rows.part(torch.linspace(0, len(rows) - 1, count, dtype=torch.float64).long())


def predict_by_draw(posterior: Posterior, data: Data, rows: int | None = None) -> ByDraw:
    """What every draw says about rows of data: all of them, or at most `rows` spread evenly."""
    chains, draws = chains_of(posterior)
    found, network = some_rows(data, rows), posterior.network
    pieces = list(found.ordered())
    x, y = concatenate([piece for piece, _ in pieces]), torch.cat([targets for _, targets in pieces])
    network.check_inputs(x)
    # Asked for as many draws as there are, a method gives each of them once, chain by chain.
    n = chains * draws
    outputs, hyper = posterior.predictor.outputs(x, n, torch.Generator().manual_seed(0))
    if outputs.dtype in (torch.bfloat16, torch.float16):
        outputs = outputs.float()
    targets = y.to(outputs.device)
    network.likelihood.check(outputs[0], targets)
    own = {name.removeprefix(OWN) for name in posterior.state["params"] if name.startswith(OWN)}
    log_prob = torch.stack(
        [
            network.likelihood.log_prob(outputs[s], targets, {k: v[s] if k in own else v for k, v in hyper.items()})
            for s in range(n)
        ]
    )
    samples = network.likelihood.predictive(outputs, hyper).samples
    by_chain = [values.detach().cpu().unflatten(0, (chains, draws)) for values in (samples, log_prob)]
    return ByDraw(found.indices.cpu(), y.cpu(), *by_chain)


def _predictions(by_draw: ByDraw, posterior: Posterior) -> tuple[list[str], Tensor]:
    """Probabilities or means and log densities, row by row, and learned noise: names, [chains, draws, quantities]."""
    kind = "probability" if posterior.network.likelihood.kind == "classification" else "mean"
    rows = by_draw.rows.tolist()
    places = list(itertools.product(*(range(n) for n in by_draw.samples.shape[3:])))  # of the outputs of a row
    names = [f"row {row}: {kind}{''.join(f' {i}' for i in place)}" for row in rows for place in places]
    values = [by_draw.samples.flatten(2), by_draw.log_prob]
    names += [f"row {row}: log density" for row in rows]
    for name, stack in posterior.state["params"].items():
        if name.startswith(OWN):
            learned = stack.flatten(2).cpu()
            values.append(learned)
            names += [f"{name.removeprefix(OWN)} {i}" for i in range(learned.shape[-1])]
    return names, torch.cat([value.double() for value in values], -1)


def _some_weights(posterior: Posterior, count: int, seed: int) -> tuple[list[str], Tensor]:
    """Weights chosen at random from all layers: names, [chains, draws, weights]."""
    stacks = {name: posterior.state["params"][name].flatten(2) for name in posterior.network.names}
    total = sum(stack.shape[-1] for stack in stacks.values())
    chosen = torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:count].sort().values
    names, values, start = [], [], 0
    for name, stack in stacks.items():
        mine = chosen[(chosen >= start) & (chosen < start + stack.shape[-1])] - start
        names += [f"{name} {int(i)}" for i in mine]
        values.append(stack[..., mine.to(stack.device)].cpu().double())
        start += stack.shape[-1]
    return names, torch.cat(values, -1)
