"""Whether predictions of scored rows are better than those rows' own marginals: than never looking at the inputs.

    mean gain = 1/N sum_k ( sum_{i in k} log p(y_i | x_i, posterior) - (N b(y) - (N - |k|) b(y without k)) )

in nats a row, over blocks k of the N rows. b is the mean log likelihood of targets under the best prediction that is
the same for all of them (`Likelihood.baseline`), so that the bracket is what a block adds to the code length of the
other rows: marginals of these rows, which have not seen the row that they predict. A fit looks at its validation rows
in the same way (`engine.training`), and cannot see what rows will come.

A few rows may decide: rows that lie far from all that was trained on, of which a posterior is sure and wrong. They are
named where without them there is no doubt of a gain.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Baseline", "MarginalGain", "gain_over_marginals"]

FEWEST = 10  # rows that can say anything
BLOCKS = 256  # at most, and with many decisions fewer
DECISIONS = 2**22  # that are gone through for all blocks together, but for the fewest blocks
FEWEST_BLOCKS = 16
NO_DOUBT = 4.0  # standard errors, for the worst rows are chosen after they were seen
NAMED = 10  # rows at most that can be said to decide, and at most a hundredth of all

Baseline = Callable[
    [Tensor], float
]  # the mean log likelihood of decisions [m, ...] under their best constant prediction


@dataclass(frozen=True)
class MarginalGain:
    """Nats a row that predictions gain over the marginals of the targets, and its standard error."""

    mean: float
    error: float
    count: int  # rows
    deciding: tuple[int, ...] = ()  # numbers of rows, in the data set, without which there is no doubt of a gain
    without: tuple[float, float] | None = None  # mean gain and standard error without those

    @property
    def is_clear(self) -> bool:
        """Whether it is above zero by more than its standard error."""
        return self.mean > self.error

    @property
    def warning(self) -> str | None:
        """What to say where the gain is not clear."""
        if self.is_clear:
            return None
        text = (
            "predictions are no better than the marginals of these targets, or not clearly: "
            f"{self.mean:+.3g} ± {self.error:.2g} nats a row"
        )
        if self.without is None:
            return text
        gain, error = self.without
        which = "row" if len(self.deciding) == 1 else "rows"
        return (
            f"{text}; {which} {', '.join(map(str, self.deciding))} of {self.count:,} alone make it so "
            f"({gain:+.3g} ± {error:.2g} without)"
        )


def gain_over_marginals(log_prob: Tensor, targets: Tensor, rows: Tensor, baseline: Baseline) -> MarginalGain | None:
    """Compare log probabilities [M] of M decisions with the marginals of their targets [M, ...]; None of too few rows.

    `rows` [M] says which row a decision belongs to: a row's log probability is the sum of its decisions'.
    """
    numbers, row = rows.unique(return_inverse=True)
    count = len(numbers)
    if count < FEWEST:
        return None
    by_row = torch.zeros(count, dtype=torch.float64).index_add(0, row, log_prob.double())
    mean, error = _gain(by_row, targets, row, baseline)
    found = MarginalGain(mean, error, count)
    if found.is_clear:
        return found
    worst = by_row.argsort(stable=True)
    for few in range(1, min(NAMED, count // 100) + 1):
        kept = torch.ones(count, dtype=torch.bool)
        kept[worst[:few]] = False
        others = targets[kept[row]]
        if float(by_row[kept].sum()) < len(others) * baseline(others):
            continue
        place = kept.cumsum(0) - 1
        gain, error_without = _gain(by_row[kept], others, place[row][kept[row]], baseline)
        if gain > NO_DOUBT * error_without:
            deciding = tuple(sorted(numbers[worst[:few]].tolist()))
            return MarginalGain(mean, error, count, deciding, (gain, error_without))
    return found


def _gain(by_row: Tensor, targets: Tensor, row: Tensor, baseline: Baseline) -> tuple[float, float]:
    """The mean gain of rows and its standard error, from log probabilities [N] and targets [M, ...] of rows [M]."""
    blocks = min(len(by_row), max(FEWEST_BLOCKS, min(BLOCKS, DECISIONS // len(targets))))
    # Dealt out by chance, for rows may be in an order.
    order = torch.randperm(len(by_row), generator=torch.Generator().manual_seed(0))
    block = torch.empty(len(by_row), dtype=torch.int64)
    block[order] = torch.arange(len(by_row)) % blocks
    of_target = block[row]

    def code(chosen: Tensor) -> float:
        return len(chosen) * baseline(chosen)

    everything = code(targets)
    added = [everything - code(targets[of_target != k]) for k in range(blocks)]
    won = torch.zeros(blocks, dtype=torch.float64).index_add(0, block, by_row)
    gains = won - torch.tensor(added, dtype=torch.float64)
    mean = float(gains.sum()) / len(by_row)
    if not math.isfinite(mean):
        return mean, math.inf
    return mean, float(gains.std()) * math.sqrt(blocks) / len(by_row)
