"""Have the chains mixed? Rank-normalised split R-hat and effective sample sizes (Vehtari et al. 2021), and E-BFMI.

Each chain is cut into halves, and all draws of a quantity are replaced by the normal scores z of their ranks, so that
heavy tails do no harm. With m half-chains of n draws each,

    R-hat = sqrt((B/W + n - 1) / n),   B = n var(means of z),   W = mean(variances of z)

and the larger of two is taken: that of the draws (do the chains agree on the location?) and that of their distances
from the median (on the spread?). The effective sample size is m n / tau, tau = -1 + 2 sum_k min_{j <= k} P_j, with
P_k = rho_2k + rho_2k+1 the sums of neighbouring autocorrelations, added up until one of them is negative (Geyer 1992).

The numbers are those of ArviZ. Its engine takes one quantity at a time; this one takes them by the thousand. A quantity
that holds NaN or infinity has no diagnostics (NaN); one that never changes has no R-hat, and all its draws count.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

__all__ = [
    "ESS_NOTHING",
    "RHAT_APART",
    "RHAT_THRESHOLD",
    "Convergence",
    "RhatNull",
    "convergence",
    "e_bfmi",
    "effective_sample_size",
    "rank_normalised_split_rhat",
    "rhat_null",
    "rhat_null_cdf",
]

RHAT_THRESHOLD = 1.01  # above it, the chains of one quantity have not mixed
RHAT_APART = 1.05  # chains further apart than this are not samples of one posterior
ESS_NOTHING = 10  # so few effective draws a chain say nothing at all
TAIL = 0.05  # share of the draws in each tail

_BLOCK_NUMBERS = 2**19  # draws worked on at once: working tensors of 4 MB, whatever the number of quantities
_CONSTANT = 1e-15  # draws that lie closer together are one value


@dataclass(frozen=True)
class Convergence:
    """How well the chains of each quantity have mixed; float64, one number a quantity."""

    rhat: Tensor
    ess_bulk: Tensor
    ess_tail: Tensor


def convergence(draws: Tensor) -> Convergence:
    """R-hat and effective sample sizes of draws [chains, draws, ...], each of shape [...]."""

    def of_block(x: Tensor) -> Tensor:
        block = _QuantityBlock(x)
        return torch.stack([block.rhat(), block.ess_bulk(), block.ess_tail()])

    return Convergence(*_by_blocks(draws, of_block))


def rank_normalised_split_rhat(draws: Tensor) -> Tensor:
    """R-hat of draws [chains, draws, ...], of shape [...]; NaN with fewer than 2 chains or 4 draws."""
    return _by_blocks(draws, lambda x: _QuantityBlock(x).rhat()[None])[0]


def effective_sample_size(draws: Tensor) -> tuple[Tensor, Tensor]:
    """Bulk and tail effective sample size of draws [chains, draws, ...], of shape [...]; NaN with fewer than 4 draws.

    The bulk's is that of the rank-normalised draws, the tail's the smaller one of being below the 5% and the 95%
    quantile.
    """

    def of_block(x: Tensor) -> Tensor:
        block = _QuantityBlock(x)
        return torch.stack([block.ess_bulk(), block.ess_tail()])

    bulk, tail = _by_blocks(draws, of_block)
    return bulk, tail


def e_bfmi(energy: Tensor) -> Tensor:
    """Energy's Bayesian fraction of missing information (Betancourt 2016): [chains, draws] to one number a chain.

    The mean square of the steps between energies over their variance: fresh momenta must be able to reach all energies
    that the posterior has; below 0.3 they cannot, and the chain creeps from one to the next.
    """
    energy = energy.double()
    if energy.shape[1] < 2:
        return energy.new_full(energy.shape[:1], math.nan)
    return energy.diff(dim=1).square().mean(1) / energy.var(1)


@dataclass(frozen=True)
class RhatNull:
    """What R-hat comes to when nothing is wrong: over independent quantities of independent draws."""

    share_above: float  # of quantities above 1.01, on average
    maximum: float  # half of all maxima lie below
    limit: float  # 99 of 100 maxima lie below


def rhat_null(chains: int, draws: int, quantities: int) -> RhatNull:
    """The share of R-hats above 1.01 and the largest one that independent draws alone would give.

    Scores of independent draws split into m half-chains of n like a one-way analysis of variance without effects, so
    B/W follows F(m - 1, m (n - 1)); the R-hats of location and of spread are as good as independent. Quantities that
    are correlated, as the predictions of one network are, are worth fewer independent ones: their maximum tends to be
    lower than this, and `limit` is an upper guide.
    """
    if chains < 2 or draws < 4 or quantities < 1:
        raise ValueError(
            f"rhat_null(chains={chains}, draws={draws}, quantities={quantities}): R-hat needs at least 2 chains of 4 "
            "draws and 1 quantity"
        )
    rhat, tail = _null_of_one(chains, draws)

    def of_maximum(level: float) -> float:
        """The R-hat that the largest of 2 q stays below with this probability."""
        above = -math.expm1(math.log(level) / (2 * quantities))
        return float(rhat[int((tail > above).sum())])

    share_above = 1 - float(rhat_null_cdf(chains, draws, torch.tensor(RHAT_THRESHOLD)))
    return RhatNull(share_above, of_maximum(0.5), of_maximum(0.99))


def rhat_null_cdf(chains: int, draws: int, rhat: Tensor) -> Tensor:
    """The share of R-hats at most as large as these among independent draws, float64."""
    grid, tail = _null_of_one(chains, draws)
    place = torch.searchsorted(grid, rhat.double().contiguous())
    above = torch.where(place == 0, 1.0, tail[place.clamp_max(len(tail) - 1)])
    return (1 - above.where(place < len(tail), 0.0)).square()


def _null_of_one(chains: int, draws: int) -> tuple[Tensor, Tensor]:
    """A grid of R-hats and the probability of a larger one in location (or in spread) alone."""
    groups, n = 2 * chains, draws // 2
    between, within = groups - 1, groups * (n - 1)  # degrees of freedom
    x = torch.logspace(-6, 8, 100_001, dtype=torch.float64)  # (m - 1) B/W
    log_density = (between / 2 - 1) * x.log() - (between + within) / 2 * torch.log1p(x / within)
    density = (log_density - log_density.amax()).exp()
    above = torch.cumulative_trapezoid(density.flip(0), -x.flip(0)).flip(0)  # [i]: what lies above x[i]
    return ((x[:-1] / between + n - 1) / n).sqrt(), above / above[0]


def _by_blocks(draws: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """A function of [quantities, chains, draws] in float64, a block of quantities at a time, as [results, ...]."""
    if draws.ndim < 2 or not draws.shape[0] or not draws.shape[1]:
        raise ValueError(f"draws must be of shape [chains, draws, ...], got {list(draws.shape)}")
    chains, length, *shape = draws.shape
    flat = draws.detach().reshape(chains, length, -1)
    pieces = flat.split(max(1, _BLOCK_NUMBERS // (chains * length)), -1)
    results = [function(piece.permute(2, 0, 1).double().contiguous()) for piece in pieces]
    return torch.cat(results, -1).reshape(-1, *shape)


class _QuantityBlock:
    """Draws of some quantities, [q, chains, draws], and their half-chains in order of size."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.chains, self.draws = x.shape[1:]
        self.halves = _halves(x)  # [q, m, n]
        self.ordered, self.order = self.halves.flatten(1).sort(-1)  # [q, m n]
        self.unusable = ~x.isfinite().flatten(1).all(1) | (self.draws < 4)

    @cached_property
    def scores(self) -> Tensor:
        """Normal scores of the half-chains."""
        return _normal_scores(self.ordered, self.order).view_as(self.halves)

    def rhat(self) -> Tensor:
        """The larger R-hat of location and spread."""
        if self.draws < 4 or self.chains < 2:
            return torch.full_like(self.x[:, 0, 0], math.nan)
        middle = self.ordered.shape[-1] // 2
        median = self.ordered[:, middle - 1 : middle + 1].mean(-1, keepdim=True)
        # Below and above the median the distances are in order already: a stable sort only has to merge them.
        distances = (self.ordered - median).abs()
        ordered, merged = _two_runs(distances, middle).sort(stable=True, dim=-1)
        order = _two_runs(self.order, middle).gather(-1, merged)
        location = _rhat(self.scores)
        spread = _rhat(_normal_scores(ordered, order).view_as(self.halves))
        larger = torch.where(spread > location, spread, location)  # two equally likely values have no spread to compare
        return larger.masked_fill(self.unusable, math.nan)

    def ess_bulk(self) -> Tensor:
        """Of the rank-normalised draws."""
        if self.draws < 4:
            return torch.full_like(self.x[:, 0, 0], math.nan)
        return _effective_size(self.scores).masked_fill(self.unusable, math.nan)

    def ess_tail(self) -> Tensor:
        """The smaller one of the two tails."""
        if self.draws < 4:
            return torch.full_like(self.x[:, 0, 0], math.nan)
        # Of an odd number of draws the middle one is in no half.
        ordered = self.ordered if self.draws % 2 == 0 else self.x.flatten(1).sort(-1).values
        sizes = [
            _effective_size((self.halves <= _quantile(ordered, share)[:, None, None]).double())
            for share in (TAIL, 1 - TAIL)
        ]
        return torch.minimum(*sizes).masked_fill(self.unusable, math.nan)


def _halves(x: Tensor) -> Tensor:
    """Chains [q, chains, draws] cut into first and last halves, [q, 2 chains, draws // 2]."""
    n = x.shape[-1] // 2
    return torch.cat([x[..., :n], x[..., x.shape[-1] - n :]], 1)


def _two_runs(values: Tensor, middle: int) -> Tensor:
    """What belongs to sorted draws, seen from the middle: downwards, then upwards."""
    return torch.cat([values[:, :middle].flip(-1), values[:, middle:]], -1)


def _normal_scores(ordered: Tensor, order: Tensor) -> Tensor:
    """Blom's scores Phi^-1((rank - 3/8) / (N + 1/4)) in the draws' own order; equal draws share their mean rank."""
    count = ordered.shape[-1]
    changes = ordered[:, 1:] != ordered[:, :-1]
    position = torch.arange(count, dtype=torch.int32, device=ordered.device)
    starts = torch.nn.functional.pad(changes, (1, 0), value=True)  # of a run of equal draws
    ends = torch.nn.functional.pad(changes, (0, 1), value=True).flip(-1)
    first = torch.where(starts, position, 0).cummax(-1).values
    last = count - 1 - torch.where(ends, position, 0).cummax(-1).values.flip(-1)
    twice_rank = torch.arange(2, 2 * count + 1, dtype=torch.float64, device=ordered.device)
    score = torch.special.ndtri((twice_rank / 2 - 3 / 8) / (count + 1 / 4))
    return torch.empty_like(ordered).scatter_(-1, order, score[first + last])


def _rhat(z: Tensor) -> Tensor:
    """R-hat of half-chains [q, m, n]."""
    n = z.shape[-1]
    between = n * z.mean(-1).var(-1)
    return ((between / z.var(-1).mean(-1) + n - 1) / n).sqrt()


def _effective_size(x: Tensor) -> Tensor:
    """Effective sample size of half-chains [q, m, n]."""
    _, m, n = x.shape
    means = x.mean(-1, keepdim=True)
    spectrum = torch.fft.rfft(x - means, n=_fast_length(2 * n))
    # The mean over half-chains is taken here, so that one transform back serves them all.
    power = (spectrum.real.square() + spectrum.imag.square()).mean(1)
    autocovariance = torch.fft.irfft(power, n=_fast_length(2 * n))[:, :n] / n  # [q, n]
    within = autocovariance[:, :1] * n / (n - 1)
    total = within * (n - 1) / n + means.var(1)
    rho = 1 - (within - autocovariance) / total
    rho[:, 0] = 1
    last_pair = max((n - 1) // 2 - 1, 0)
    pairs = rho[:, : 2 * last_pair + 2].unflatten(-1, (-1, 2))  # [q, k, 2]
    sums = pairs.sum(-1)
    # Pairs before number `stop` are positive; of that one, the first that is not or the last there is, half may count.
    stop = (sums[:, :-1] > 0).cumprod(-1).sum(-1, keepdim=True)
    before = torch.arange(last_pair + 1, device=x.device) < stop
    monotone = sums.cummin(-1).values
    even, total_of_pair = pairs[..., 0].gather(-1, stop)[:, 0], sums.gather(-1, stop)[:, 0]
    half = torch.where((even > 0) | (total_of_pair >= 0), even, 0)
    tau = (-1 + 2 * (monotone * before).sum(-1) + half).clamp_min(1 / math.log10(m * n))
    size = m * n / tau
    constant = x.amax((1, 2)) - x.amin((1, 2)) < _CONSTANT
    return size.masked_fill(constant, m * n)


def _quantile(ordered: Tensor, share: float) -> Tensor:
    """A quantile of sorted draws [q, N], between neighbours as numpy takes it, so that ties fall alike."""
    place = (ordered.shape[-1] - 1) * share
    low = math.floor(place)
    below, above = ordered[:, low], ordered[:, min(low + 1, ordered.shape[-1] - 1)]
    t = place - low
    return below + (above - below) * t if t < 0.5 else above - (above - below) * (1 - t)


def _fast_length(n: int) -> int:
    """The next length of a Fourier transform without prime factors above 5."""
    while True:
        rest = n
        for prime in (2, 3, 5):
            while rest % prime == 0:
                rest //= prime
        if rest == 1:
            return n
        n += 1
