"""Diagnosis: may the chains of a sampler be trusted?

    R-hat = sqrt((B/W + n - 1) / n)    of every prediction, against what as many independent draws would reach by chance

`by_draw` asks every draw for its prediction; `evidence` gathers predictions, log densities and weights with their
R-hats and effective sample sizes (`engine` computes them); `verdict` judges: trust, caution, or do not trust.
`surface` is the log posterior density on a plane through three draws; `arviz_export` hands the chains to ArviZ.

Called by `caveat.diagnose`, `caveat.posterior_surface` and `caveat.to_arviz`, by `reference`, and by
`report.chains_page`, which draws the evidence.
"""

from caveat.evaluate.diagnosis.arviz_export import to_arviz
from caveat.evaluate.diagnosis.evidence import Evidence, Mixing, Quantities, gather_evidence
from caveat.evaluate.diagnosis.surface import Surface, posterior_surface
from caveat.evaluate.diagnosis.verdict import Diagnosis, diagnose, judge

__all__ = [
    "Diagnosis",
    "Evidence",
    "Mixing",
    "Quantities",
    "Surface",
    "diagnose",
    "gather_evidence",
    "judge",
    "posterior_surface",
    "to_arviz",
]
