"""Fidelity: how far is a posterior's prediction from that of a reference, which is HMC where it can be had?

With p the posterior's predictive distribution of a row and q the reference's, averaged over all of its draws:

    classification    agreement        = mean of 1[argmax p = argmax q]
                      total variation  = mean of 1/2 sum_k |p_k - q_k|
    regression        W1, W2           = mean Wasserstein distance of p and q (noise included), in the targets' units,
                                         and divided by the standard deviation of q

(Izmailov et al., 2021). Means are over rows and positions, standard errors over rows. Beside each score stands its
floor: the same score of one chain of the reference against the mixture of the others, averaged over chains. It is what
finite chains cost: a posterior at the floor cannot be told from the reference. One chain is not the whole: the mixture
of all C chains is nearer to the truth, so that an exact posterior falls below the floor, for total variation to about
sqrt(C - 1) / C of it (0.43 with four chains).
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from caveat.batches import Inputs
from caveat.evaluate.fidelity.reference_set import ReferenceSet, activations, identity, in_use
from caveat.evaluate.fidelity.wasserstein import one_against_others, wasserstein
from caveat.evaluate.metrics import Columns, Score, mean_and_stderr
from caveat.evaluate.predictions import row_blocks
from caveat.posterior import Posterior
from caveat.predictive import BernoulliPredictive, CategoricalPredictive, Kind, PoissonPredictive, Predictive
from caveat.predictive.protocol import row_numbers
from caveat.rows import Data, Rows

__all__ = ["Fidelity", "fidelity", "fidelity_on", "noise_floor", "on_cpu", "some_draws"]

_BLOCK_ROWS = 1024  # predicted at once; a reference has many draws
_FLOOR = "floor/"
_BY_DRAW = ("log_samples", "logits", "means", "variances", "rates")  # fields of predictions with an axis of draws
_TITLES = {
    "agreement": "agreement",
    "total_variation": "total variation",
    "w1": "W1",
    "w2": "W2",
    "relative_w1": "W1 / std",
    "relative_w2": "W2 / std",
}


@dataclass(frozen=True)
class Fidelity:
    """How far a posterior is from a reference: `closeness["total_variation"].mean`; `floor` has the same names."""

    kind: Kind
    scores: dict[str, Score]
    floor: dict[str, Score]  # of one chain against the others; empty where the reference has one chain
    rows: int
    chains: int  # of the reference
    draws: int  # of each chain
    notes: tuple[str, ...] = ()  # what beside the method differs between the two

    def __getitem__(self, name: str) -> Score:
        if name not in self.scores:
            raise KeyError(f"no score {name!r}: there are {', '.join(self.scores)}")
        return self.scores[name]

    def __str__(self) -> str:
        title = f"against {self.chains} chain{'s' if self.chains > 1 else ''} of {self.draws} draws on {self.rows} rows"
        lines = [f"  {_TITLES[name]:<15}  {score!s:<20}" for name, score in self.scores.items()]
        floors = [f"one chain against the others: {self.floor[name]}" if self.floor else "" for name in self.scores]
        body = [f"{line} {floor}".rstrip() for line, floor in zip(lines, floors, strict=True)]
        return "\n".join([title, *body, *(f"  note: {note}" for note in self.notes)])


def fidelity(
    posterior: Posterior,
    reference: Posterior | ReferenceSet,
    data: Data,
    *,
    draws: int | None = None,
    seed: int = 0,
) -> Fidelity:
    """Compare what a posterior predicts with what a reference does.

    Args:
        posterior: what to judge.
        reference: a posterior with chains (`HMC`), or a stored set (`caveat.load_reference`), which has predictions of
            certain rows only.
        data: the rows to compare on. Targets only say which positions are ignored, and may be missing.
        draws: posterior draws a prediction; the method's default unless given.
        seed: of the draws.
    """
    return fidelity_on(posterior, reference, Rows(data, False, posterior.network.class_names), draws, seed)


def fidelity_on(
    posterior: Posterior, reference: Posterior | ReferenceSet, rows: Rows, draws: int | None, seed: int
) -> Fidelity:
    """Compare a posterior with a reference on rows that were read already; see `fidelity`."""
    by_chain, chains, draws_each = (
        _stored(reference, rows) if isinstance(reference, ReferenceSet) else _fitted(reference)
    )
    blocks: list[Columns] = []
    rows_done = 0
    for x, y in row_blocks(rows, _BLOCK_ROWS):
        ours = on_cpu(posterior.predict(x, draws=draws, seed=seed))
        theirs = [on_cpu(chain) for chain in by_chain(x, slice(rows_done, rows_done + len(y)))]
        _check_same_outputs(ours, theirs[0])
        columns = _compare(ours, theirs, y)
        blocks.append(columns | {"rows": columns["rows"] + rows_done})
        rows_done += len(y)
    joined = {name: torch.cat([block[name] for block in blocks]) for name in blocks[0]}
    if not len(joined["rows"]):
        raise ValueError("there is nothing to compare: every target is one that the likelihood ignores")
    scores, floor = _scores(joined)
    return Fidelity(ours.kind, scores, floor, len(rows), chains, draws_each, _differences(posterior, reference))


def noise_floor(chains: Sequence[Predictive]) -> dict[str, Score]:
    """Score one chain against the mixture of the others, averaged over chains."""
    nothing_ignored = torch.empty(0)
    return _scores(_compare(chains[0], chains, nothing_ignored))[1]


def _compare(ours: Predictive, chains: Sequence[Predictive], targets: Tensor) -> Columns:
    return _compare_classes(ours, chains, targets) if ours.kind == "classification" else _compare_numbers(ours, chains)


def _scores(columns: Columns) -> tuple[dict[str, Score], dict[str, Score]]:
    """Means over rows: the scores, and their floors."""
    rows = columns["rows"]
    scores = {name: Score(*mean_and_stderr(column, rows)) for name, column in columns.items() if name != "rows"}
    return (
        {name: score for name, score in scores.items() if not name.startswith(_FLOOR)},
        {name.removeprefix(_FLOOR): score for name, score in scores.items() if name.startswith(_FLOOR)},
    )


ByChain = Callable[[Inputs, slice], Sequence[Predictive]]  # what each chain predicts for rows of the data


def _fitted(reference: Posterior) -> tuple[ByChain, int, int]:
    """What each chain of a fitted posterior predicts, how many chains there are, and how many draws each has."""
    log_density = reference.state.get("stats", {}).get("lp")
    if log_density is None:
        raise ValueError(
            f"a reference is a posterior with chains, such as HMC, or a stored set, not a "
            f"{type(reference.method).__name__}: fit caveat.HMC(), or use caveat.load_reference(...)"
        )
    chains, draws = log_density.shape

    def by_chain(x: Inputs, rows: slice) -> Sequence[Predictive]:
        prediction = reference.predict(x, draws=chains * draws)  # every stored draw once, chain by chain
        return [some_draws(prediction, slice(c * draws, (c + 1) * draws)) for c in range(chains)]

    return by_chain, chains, draws


def _stored(reference: ReferenceSet, rows: Rows) -> tuple[ByChain, int, int]:
    """What each chain of a stored set predicts for the rows that it holds, how many chains, and how many draws each."""
    part = reference.part_of(rows)
    return lambda x, rows: reference.by_chain(part, rows), reference.chains, reference.draws


def on_cpu(prediction: Predictive) -> Predictive:
    """Move a prediction to the CPU, where a stored reference is."""
    fields = {field.name: getattr(prediction, field.name) for field in dataclasses.fields(cast(Any, prediction))}
    moved = {name: value.cpu() for name, value in fields.items() if isinstance(value, Tensor)}
    return dataclasses.replace(cast(Any, prediction), **moved)


def some_draws(prediction: Predictive, draws: slice) -> Predictive:
    """Reduce a prediction to some of its draws; `noise` stays as it is, because no comparison here reads it."""
    fields = {field.name: getattr(prediction, field.name) for field in dataclasses.fields(cast(Any, prediction))}
    return dataclasses.replace(
        cast(Any, prediction), **{name: value[draws] for name, value in fields.items() if name in _BY_DRAW}
    )


def _compare_classes(ours: Predictive, chains: Sequence[Predictive], targets: Tensor) -> Columns:
    """Agreement and total variation of every decision, and of each chain against the others."""
    p, by_chain = _probs(ours), torch.stack([_probs(chain) for chain in chains])  # [B, ..., C], [chains, B, ..., C]
    pairs = [(p, by_chain.mean(0)), *one_against_others(by_chain)]
    agreement = [(one.argmax(-1) == other.argmax(-1)).double() for one, other in pairs]
    variation = [(one - other).abs().sum(-1) / 2 for one, other in pairs]
    columns = {"rows": row_numbers(p[..., 0])}
    for name, values in (("agreement", agreement), ("total_variation", variation)):
        columns |= _with_floor(name, values[0].flatten(), [value.flatten() for value in values[1:]])
    if isinstance(ours, CategoricalPredictive) and targets.shape == p.shape[:-1]:
        counted = ours.decisions(targets).flatten().to(p.device) != ours.ignore_index
        columns = {name: column[counted] for name, column in columns.items()}
    return columns


def _compare_numbers(ours: Any, chains: Sequence[Any]) -> Columns:
    """W1 and W2 of every row and output, in the targets' units and in the reference's standard deviations."""
    distances, floors = wasserstein(ours, chains)
    std = _variance(chains).sqrt()
    columns = {"rows": row_numbers(ours.mean[..., 0])}
    for prefix, scale in (("", torch.ones_like(std)), ("relative_", std)):
        for name, values in distances.items():
            floor = [(other[name] / scale).flatten(0, -2) for other in floors]
            columns |= _with_floor(f"{prefix}{name}", (values / scale).flatten(0, -2), floor)
    return columns


def _with_floor(name: str, values: Tensor, floors: Sequence[Tensor]) -> Columns:
    return {name: values} | ({f"{_FLOOR}{name}": torch.stack(list(floors)).mean(0)} if floors else {})


def _probs(prediction: Any) -> Tensor:
    """Class probabilities, [B, ..., C], float64; of independent labels no and yes."""
    probs: Tensor = prediction.probs.double()
    return torch.stack([1 - probs, probs], -1) if isinstance(prediction, BernoulliPredictive) else probs


def _variance(chains: Sequence[Any]) -> Tensor:
    """Variance of the mixture of chains, float64: mean of variances, and variance of means."""
    parts = [(c.rates, c.rates) if isinstance(c, PoissonPredictive) else (c.means, c.variances) for c in chains]
    means, variances = (torch.cat(group).double() for group in zip(*parts, strict=True))
    return variances.mean(0) + means.var(0, correction=0)


def _check_same_outputs(ours: Predictive, theirs: Predictive) -> None:
    shapes = [tuple(prediction.samples.shape[1:]) for prediction in (ours, theirs)]
    if ours.kind != theirs.kind or shapes[0] != shapes[1]:
        raise ValueError(
            f"the posterior and the reference do not predict the same: {ours.kind} of shape {list(shapes[0])} against "
            f"{theirs.kind} of shape {list(shapes[1])} for the same rows"
        )


def _differences(posterior: Posterior, reference: Posterior | ReferenceSet) -> tuple[str, ...]:
    """Say where the two are not about the same model, so that the distance is not one between methods alone."""
    ours = identity(posterior.network)
    if isinstance(reference, ReferenceSet):
        theirs = {name: in_use(text) for name, text in reference.facts["identity"].items()}
        module = reference.facts["network"]
    else:
        theirs, module = identity(reference.network), str(reference.network.module)
    kinds = [activations(text) for text in (str(posterior.network.module), module)]
    if all(kinds):  # one that is not a module is not seen
        ours["activation"], theirs["activation"] = kinds
    return tuple(
        f"the reference's {name} {'are' if name == 'weights' else 'is'} {theirs[name]}, the posterior's {ours[name]}"
        for name in ours
        if name in theirs and ours[name] != theirs[name]  # of published predictions not all may be known
    )
