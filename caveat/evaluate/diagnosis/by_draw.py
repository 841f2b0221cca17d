"""What every draw of the chains says about rows of data, where a prediction would average: [chains, draws, ...]."""

from dataclasses import dataclass

import torch
from torch import Tensor

from caveat.batches import concatenate
from caveat.posterior import Posterior
from caveat.rows import Data, Rows

__all__ = ["LEARNED", "ByDraw", "chains_of", "predict_by_draw", "some_rows"]

LEARNED = "hyper/"  # the prefix of what the likelihood learned: each draw of the chains has its own value


@dataclass(frozen=True)
class ByDraw:
    """The predictions of every draw, on the CPU."""

    rows: Tensor  # [B] the numbers of the rows in the data
    targets: Tensor  # [B, ...]
    samples: Tensor  # [chains, draws, B, ...] probabilities, or means or rates
    log_prob: Tensor  # [chains, draws, B] log density of each row's targets


def chains_of(posterior: Posterior) -> tuple[int, int]:
    """Count the chains of a posterior and the draws of each; a posterior without chains is a TypeError."""
    stats = posterior.state.get("stats", {})
    if "lp" not in stats:
        raise TypeError(
            f"{type(posterior.method).__name__} runs no chains, so there is nothing to diagnose: "
            "fit a sampler such as caveat.HMC(chains=4)"
        )
    chains, draws = stats["lp"].shape
    return chains, draws


def some_rows(data: Data, count: int | None) -> Rows:
    """Return all rows of data, or at most `count` of them, spread evenly."""
    rows = Rows(data)
    if count is None or count >= len(rows):
        return rows
    if count < 1:
        raise ValueError(f"rows={count}: must be at least 1")
    return rows.part(torch.linspace(0, len(rows) - 1, count, dtype=torch.float64).long())


def predict_by_draw(posterior: Posterior, data: Data, rows: int | None = None) -> ByDraw:
    """Predict rows of data with every draw: all rows, or at most `rows` of them, spread evenly."""
    chains, draws = chains_of(posterior)
    chosen_rows, network = some_rows(data, rows), posterior.network
    batches = list(chosen_rows.ordered())
    x, y = concatenate([inputs for inputs, _ in batches]), torch.cat([targets for _, targets in batches])
    network.check_inputs(x)
    # Asked for as many draws as there are, a method gives each of them once, chain by chain.
    n = chains * draws
    outputs, hyper = posterior.predictor.outputs(x, n, torch.Generator().manual_seed(0))
    if outputs.dtype in (torch.bfloat16, torch.float16):
        outputs = outputs.float()
    targets = y.to(outputs.device)
    network.likelihood.check(outputs[0], targets)
    learned = {name.removeprefix(LEARNED) for name in posterior.state["params"] if name.startswith(LEARNED)}
    log_prob = torch.stack(
        [
            network.likelihood.log_prob(outputs[s], targets, {k: v[s] if k in learned else v for k, v in hyper.items()})
            for s in range(n)
        ]
    )
    samples = network.likelihood.predictive(outputs, hyper).samples
    by_chain = [values.detach().cpu().unflatten(0, (chains, draws)) for values in (samples, log_prob)]
    return ByDraw(chosen_rows.indices.cpu(), y.cpu(), *by_chain)
