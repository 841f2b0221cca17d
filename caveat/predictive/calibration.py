"""Split conformal prediction: intervals and sets of labels that hold the target as often as they say.

A score says how badly a target fits its prediction. Of n calibration rows, which nothing was fitted to, the k-th
smallest score is a bound q, and every target whose score is at most q is in the interval or the set:

    k = ceil((n + 1) level),      level <= P(score of a new row <= q) <= level + 1 / (n + 1)

for a row that is exchangeable with those of calibration (Vovk et al., 2005); the upper bound where scores do not tie.
It holds on average over rows, whatever the posterior is, and it needs n >= level / (1 - level) rows.

    "deviation"     |y - mean| / standard deviation                                        (Lei et al., 2018)
    "quantile"      (y - median) / (95% quantile - median), below the median (median - y) / (median - 5% quantile):
                    conformalised quantiles that keep their shape (Romano et al., 2019; Kivaranovic et al., 2020)
    "aps"           what the labels before y have together, the most probable first, and u p_y (Romano et al., 2020)
    "raps"          the same, and `penalty` for each label after the first `free` up to y (Angelopoulos et al., 2021)
    "probability"   1 - p_y                                                                (Sadinle et al., 2019)

Here u is uniform on (0, 1) where sets are randomised, else 1. The scores have no unit, so the calibrated intervals
keep what the posterior says of one row against another.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from caveat.knobs import Count, NonNegative, NonNegativeInt, check_knobs

__all__ = [
    "KEPT",
    "Calibration",
    "ConformalScore",
    "Conformity",
    "Kind",
    "LabelScore",
    "NumberScore",
    "label_scores",
    "scrambled",
]

Kind = Literal["classification", "regression"]
NumberScore = Literal["deviation", "quantile"]
LabelScore = Literal["aps", "raps", "probability"]
ConformalScore = Literal["deviation", "quantile", "aps", "raps", "probability"]
_KNOWN = {"classification": get_args(LabelScore), "regression": get_args(NumberScore)}
KEPT = 10_000  # scores at most: of more rows, evenly spaced ones, which moves a bound by a ten-thousandth at most
_ODD = (0x5851F42D4C957F2D, 0x14057B7EF767814F)  # factors that scramble bits
LOWEST_LEVEL = 0.9  # a calibration must reach this one, which prediction files have


@dataclass(frozen=True)
class Conformity:
    """What a target is scored by, and how sets are made of it."""

    score: ConformalScore
    randomised: bool = False  # whether u is drawn, which "aps" and "raps" need to be exact
    penalty: NonNegative = 0.01  # of "raps", for each label after the free ones
    free: NonNegativeInt = 5

    def __post_init__(self) -> None:
        check_knobs(self)
        if self.randomised and self.score not in ("aps", "raps"):
            raise ValueError(f"score={self.score!r} draws nothing: leave randomised out, or take score='aps'")

    @classmethod
    def chosen(cls, kind: Kind, score: ConformalScore | None, randomised: bool | None) -> "Conformity":
        """What is asked for, or by default `"deviation"` for numbers and randomised `"aps"` for labels."""
        score = score or ("aps" if kind == "classification" else "deviation")
        conformity = cls(score, score in ("aps", "raps") if randomised is None else randomised)
        if not conformity.is_for(kind):
            known = ", ".join(map(repr, _KNOWN[kind]))
            raise ValueError(f"score={score!r} is none for {kind}: it must be one of {known}")
        return conformity

    def is_for(self, kind: Kind) -> bool:
        """Whether targets of a kind can be scored by this."""
        return self.score in _KNOWN[kind]


@dataclass(frozen=True)
class Calibration:
    """The scores of calibration rows in order, which is all that is kept of them."""

    conformity: Conformity
    scores: Tensor  # [K, D] float64, ascending: the ceil(rows (j + 1) / K)-th smallest, of each output on its own
    rows: Count  # how many rows (or positions of rows) there were

    def __post_init__(self) -> None:
        check_knobs(self)
        scores = self.scores
        whole = scores.ndim == 2 and scores.numel() > 0 and len(scores) == min(self.rows, KEPT)
        if not whole or scores.dtype != torch.float64:
            raise ValueError(f"scores of shape {list(scores.shape)} are not those of {self.rows} calibration rows")
        if bool((scores.diff(dim=0) < 0).any()):
            raise ValueError("scores of a calibration must ascend")

    def __repr__(self) -> str:
        return f"Calibration({self.conformity!r}, {self.rows:,} rows)"

    @classmethod
    def of(cls, conformity: Conformity, pieces: Iterable[Tensor]) -> "Calibration":
        """The calibration that scores [N, D] of rows make, a piece of the rows at a time."""
        scores = torch.cat([piece.double().cpu() for piece in pieces])
        rows = len(scores)
        if rows < _rows_for(LOWEST_LEVEL):
            raise ValueError(
                f"{rows} calibration rows are too few: a level of {LOWEST_LEVEL:g} takes at least "
                f"{_rows_for(LOWEST_LEVEL)}, and 0.99 takes {_rows_for(0.99)}: hold out more rows"
            )
        if bool(scores.isnan().any()):
            raise ValueError(f"{int(scores.isnan().sum())} scores of calibration rows are NaN: look at the predictions")
        kept = min(rows, KEPT)
        ranks = torch.tensor([-(-rows * (j + 1) // kept) for j in range(kept)])
        return cls(conformity, scores.sort(dim=0).values[ranks - 1].clone(), rows)

    def bound(self, level: float) -> Tensor:
        """The score that a new row stays within with probability `level`, of each output, [D]."""
        if not 0 < level < 1:
            raise ValueError(f"level={level!r}: must be above 0 and below 1, such as 0.9 for 90%")
        rank = math.ceil((self.rows + 1) * level - 1e-9)
        if rank > self.rows:
            needed, highest = _rows_for(level), self.rows / (self.rows + 1)
            raise ValueError(
                f"level={level:g} takes at least {needed:,} calibration rows, and there were {self.rows:,}: calibrate "
                f"with more rows, or ask for a level of at most {highest:.3g}"
            )
        kept = len(self.scores)
        return self.scores[math.ceil(rank * kept / self.rows - 1e-9) - 1]


def label_scores(log_probs: Tensor, conformity: Conformity, u: Tensor) -> Tensor:
    """The score of every label, [..., C] float64, from log probabilities [..., C] and uniform numbers [...]."""
    p = log_probs.double().exp()
    if conformity.score == "probability":
        return 1 - p
    ordered, order = p.sort(dim=-1, descending=True, stable=True)
    share = u.to(p).unsqueeze(-1) if conformity.randomised else 1.0
    scores = ordered.cumsum(-1) - ordered + share * ordered
    if conformity.score == "raps":
        rank = torch.arange(1, p.shape[-1] + 1, device=p.device)
        scores = scores + conformity.penalty * (rank - conformity.free).clamp_min(0)
    return torch.empty_like(scores).scatter_(-1, order, scores)


def scrambled(log_probs: Tensor) -> Tensor:
    """A number in [0, 1) for each row of log probabilities [..., C], as if drawn: any other digit makes another."""
    bits = log_probs.double().contiguous().view(torch.int64)
    places = torch.arange(1, bits.shape[-1] + 1, device=bits.device)
    mixed = _mixed(_mixed(bits + places * _ODD[0]).sum(-1))
    return (mixed & (2**53 - 1)).double() * 2.0**-53


def _mixed(bits: Tensor) -> Tensor:
    """Whole numbers of 64 bits whose every bit depends on all of those given: shifts and odd factors, one to one."""
    for shift, factor in ((32, _ODD[0]), (29, _ODD[1]), (32, 1)):
        bits = (bits ^ (bits >> shift & 2 ** (64 - shift) - 1)) * factor
    return bits


def _rows_for(level: float) -> int:
    """The fewest rows that have a bound at a level."""
    return math.ceil(level / (1 - level) - 1e-9)
