"""May these chains be trusted? A verdict with reasons, from what the chains predict before anything else.

A network has many equal modes (its units can be swapped, their signs turned), so chains that agree on every prediction
may sit at weights that have nothing in common. The verdict therefore goes by function space: the probabilities or means
and the log density of each row. The log posterior density comes second. The weights are shown, and decide nothing.

    trust          no R-hat of a prediction above max(1.01, what independent draws would reach), at most one in a
                   hundred (or twice as many as of independent draws) above 1.01, 100 effective draws a chain of every
                   prediction and of the log density, no divergence, half of the proposals accepted, E-BFMI at least 0.3
    caution        one of these fails, or there is one chain only
    do not trust   an R-hat of a prediction above 1.05 (and above what independent draws would reach), fewer than 10
                   effective draws a chain, one draw in a hundred divergent, or predictions that are not finite
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from caveat.engine.chains import ESS_NOTHING, RHAT_APART, RHAT_THRESHOLD, e_bfmi
from caveat.evaluate.diagnosis.evidence import Evidence, Mixing, gather_evidence
from caveat.posterior import Posterior
from caveat.rows import Data

__all__ = ["Diagnosis", "diagnose", "judge"]

Verdict = Literal["trust", "caution", "do not trust"]

SHARE_ABOVE = 0.01  # of predictions that may have an R-hat above 1.01
ESS_PER_CHAIN = 100
E_BFMI_LOW = 0.3
ACCEPTANCE_LOW = 0.5
DIVERGENT_SHARE = 0.01


@dataclass(frozen=True)
class Diagnosis:
    """Whether to trust chains, and why; `dataclasses.asdict` makes plain json of it, `print` a short report."""

    verdict: Verdict
    reasons: list[str]
    method: str
    chains: int
    draws: int  # of each chain
    rows: int  # that were predicted
    predictions: Mixing
    log_density: Mixing
    weights: Mixing  # of a sample of them; large R-hats are expected here, and do not count
    acceptance_rate: list[float] | None  # of each chain, as what follows; None where the method has no such thing
    divergences: list[int] | None
    e_bfmi: list[float] | None

    def __str__(self) -> str:
        lines = [f"Verdict: {self.verdict} ({self.method}, {self.chains} x {self.draws} draws, {self.rows} rows)"]
        lines += [f"  - {reason}" for reason in self.reasons]
        lines += ["", f"{'':<17}quantities  R-hat max  by chance  above {RHAT_THRESHOLD}  ESS bulk  ESS tail"]
        parts = {"predictions": self.predictions, "log density": self.log_density, "weights (sample)": self.weights}
        lines += [_table_line(name, mixing) for name, mixing in parts.items()]
        per_chain = {"acceptance": self.acceptance_rate, "divergences": self.divergences, "E-BFMI": self.e_bfmi}
        shown = [f"{name} {' '.join(f'{v:.3g}' for v in values)}" for name, values in per_chain.items() if values]
        return "\n".join([*lines, *(["each chain: " + "; ".join(shown)] if shown else [])])


def diagnose(posterior: Posterior, data: Data, *, rows: int = 500, weights: int = 2000, seed: int = 0) -> Diagnosis:
    """Say whether the chains of a posterior may be trusted, and why.

    Args:
        posterior: of a method that runs chains.
        data: rows with targets whose predictions are looked at, best such as were not trained on.
        rows: at most this many of them, spread evenly; the predictions of all draws are held in memory.
        weights: how many weights are looked at, chosen at random.
        seed: of that choice.
    """
    return judge(gather_evidence(posterior, data, rows=rows, weights=weights, seed=seed))


@dataclass(frozen=True)
class _Finding:
    """One thing that was looked at: how bad it is, as a verdict, and what to say of it."""

    verdict: Verdict
    reason: str


def judge(evidence: Evidence) -> Diagnosis:
    """Reach a verdict from the evidence: the worst of all findings, with the reasons for it."""
    stats = evidence.stats
    chains, draws = stats["lp"].shape
    predictions, log_density = evidence.predictions.mixing(), evidence.log_density.mixing()
    acceptance: list[float] | None = (
        stats["acceptance_rate"].double().mean(1).tolist() if "acceptance_rate" in stats else None
    )
    divergences: list[int] | None = stats["diverging"].sum(1).tolist() if "diverging" in stats else None
    energies: list[float] | None = e_bfmi(stats["energy"]).tolist() if "energy" in stats else None
    findings = [
        *_of_predictions(predictions, chains),
        *_of_log_density(log_density, chains),
        *_of_sampler(acceptance, divergences, energies, draws),
    ]
    by_badness: tuple[Verdict, ...] = ("do not trust", "caution", "trust")
    verdict = next(v for v in by_badness if any(finding.verdict == v for finding in findings))
    shown = [f for v in by_badness for f in findings if f.verdict == v and (verdict == "trust" or v != "trust")]
    return Diagnosis(
        verdict,
        [finding.reason for finding in shown],
        evidence.method,
        chains,
        draws,
        evidence.rows,
        predictions,
        log_density,
        evidence.weights.mixing(),
        acceptance,
        divergences,
        energies,
    )


def _of_predictions(mixing: Mixing, chains: int) -> Iterator[_Finding]:
    """Judge whether predictions are finite, move, agree between chains, and have enough effective draws."""
    if mixing.not_finite:
        yield _Finding("do not trust", f"{mixing.not_finite:,} predictions are NaN or infinite in some draw")
    if mixing.ess_bulk_min is None or mixing.ess_tail_min is None:
        yield _Finding("do not trust", "no prediction changes from draw to draw: the chains do not move")
        return
    yield from _of_rhat(mixing)
    size, needed = min(mixing.ess_bulk_min, mixing.ess_tail_min), ESS_PER_CHAIN * chains
    fewest = f"the fewest effective draws that a prediction has are {size:,.0f}"
    if size >= needed:
        yield _Finding("trust", f"{fewest}, and {needed:,} are enough")
    else:
        verdict: Verdict = "caution" if size >= ESS_NOTHING * chains else "do not trust"
        yield _Finding(verdict, f"{fewest}, and {needed:,} are needed ({ESS_PER_CHAIN} a chain): draw longer chains")


def _of_rhat(mixing: Mixing) -> Iterator[_Finding]:
    """Judge whether the chains agree on predictions, against what independent draws would show by chance."""
    if mixing.rhat_max is None or mixing.rhat_share_above is None or mixing.null is None:
        reason = "there is one chain, which cannot show whether another start would have ended elsewhere: run chains=4"
        yield _Finding("caution", reason)
        return
    moving = mixing.quantities - mixing.constant - mixing.not_finite
    limit = max(RHAT_THRESHOLD, mixing.null.limit)
    largest = f"the largest R-hat of {moving:,} predictions is {mixing.rhat_max:.3f} ({mixing.worst})"
    chance = f"independent draws would stay below {limit:.3f}"
    if mixing.rhat_max > max(RHAT_APART, limit):
        advice = "a longer warm-up, or longer chains"
        yield _Finding("do not trust", f"the chains disagree about predictions: {largest}, {chance}; {advice}")
    elif mixing.rhat_max > limit:
        yield _Finding("caution", f"the chains have not quite mixed: {largest}, {chance}; draw longer chains")
    else:
        yield _Finding("trust", f"the chains agree on predictions: {largest}, {chance}")
    if mixing.rhat_share_above > max(SHARE_ABOVE, 2 * mixing.null.share_above):
        share = f"{mixing.rhat_share_above:.1%} of the predictions have an R-hat above {RHAT_THRESHOLD}"
        chance = f"of independent draws {mixing.null.share_above:.1%} would"
        yield _Finding("caution", f"{share}, {chance}: draw longer chains")


def _of_log_density(mixing: Mixing, chains: int) -> Iterator[_Finding]:
    """Judge the log density, never worse than caution: chains in modes of different density may predict alike."""
    if mixing.ess_bulk_min is None or mixing.ess_tail_min is None:
        yield _Finding("caution", "the log posterior density is not finite, or the same in every draw")
        return
    if mixing.rhat_max is not None and mixing.null is not None:
        limit = max(RHAT_THRESHOLD, mixing.null.limit)
        rhat = f"R-hat of the log posterior density is {mixing.rhat_max:.3f}"
        if mixing.rhat_max <= limit:
            yield _Finding("trust", rhat)
        else:
            yield _Finding(
                "caution", f"{rhat}, above {limit:.3f}: the chains are at different heights of the posterior"
            )
    size = min(mixing.ess_bulk_min, mixing.ess_tail_min)
    if size < ESS_PER_CHAIN * chains:
        yield _Finding(
            "caution", f"the log posterior density has {size:,.0f} effective draws, below {ESS_PER_CHAIN} a chain"
        )


def _of_sampler(
    acceptance: Sequence[float] | None, divergences: Sequence[int] | None, energies: Sequence[float] | None, draws: int
) -> Iterator[_Finding]:
    """Judge what the sampler recorded of each chain: acceptance, divergences, and E-BFMI."""
    if acceptance is None:
        yield _Finding(
            "caution",
            "the method has no accept step: the bias of its steps does not show in its own chains; compare a smaller "
            "learning rate, or HMC on a smaller problem (caveat.fidelity)",
        )
    elif min(acceptance) < ACCEPTANCE_LOW:
        yield _Finding(
            "caution",
            f"a chain accepts {min(acceptance):.0%} of its proposals, below {ACCEPTANCE_LOW:.0%}: a smaller step size",
        )
    diverged = None if divergences is None else sum(divergences)
    if divergences and diverged:
        total = draws * len(divergences)
        yield _Finding(
            "do not trust" if diverged > DIVERGENT_SHARE * total else "caution",
            f"{diverged:,} of {total:,} draws diverged ({diverged / total:.1%}): a part of the posterior is too steep "
            "for the sampler's steps; a smaller step size",
        )
    elif diverged == 0:
        yield _Finding("trust", "no draw diverged")
    if energies is not None and min(energies) < E_BFMI_LOW:
        yield _Finding(
            "caution",
            f"E-BFMI is {min(energies):.2f} in a chain, below {E_BFMI_LOW}: the momenta explore the energies slowly; "
            "longer chains, or another parameterisation",
        )


def _table_line(name: str, mixing: Mixing) -> str:
    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    limit = None if mixing.null is None else mixing.null.limit
    return (
        f"{name:<17}{mixing.quantities:>10,}{number(mixing.rhat_max, '.3f'):>11}{number(limit, '.3f'):>11}"
        f"{number(mixing.rhat_share_above, '.1%'):>12}{number(mixing.ess_bulk_min, ',.0f'):>10}"
        f"{number(mixing.ess_tail_min, ',.0f'):>10}"
    )
