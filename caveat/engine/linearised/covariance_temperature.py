"""The temperature of a posterior: what its covariance is multiplied by, so that validation rows are most likely.

    NLL(T) = - sum_n log mean_k p(y_n | f(x_n) + sqrt(T) J(x_n) z_k),   z_k a sample's deviation from the point

over a grid of T; where predictions are made from the samples' variance, that is what T multiplies. (The temperature of
`engine/training/temperature_scaling.py` divides logits, and leaves the posterior as it is.)

Samples are large and on disk: they are read once, some at a time, for all rows. What is kept of a row meanwhile is a
sum over the samples so far, of densities at each T or of squares. Rows of which more must be kept than memory is
allowed, those of many positions, go in groups; each group reads the samples once.
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from caveat.engine.linearised.jacobian_features import NetworkBlock, NetworkFeatures
from caveat.engine.linearised.sample_posterior import SampleState
from caveat.engine.linearised.sampler import check_shifts
from caveat.engine.run import Run
from caveat.likelihoods import Hyper
from caveat.network import Network
from caveat.rows import Rows

__all__ = ["TEMPERATURES", "best_temperature"]

ROWS = 2000  # validation rows looked at
NUMBERS = 2**24  # kept of the rows of a group, and in the outputs of some samples for some rows
TEMPERATURES = tuple(10.0 ** (exponent / 4) for exponent in range(-20, 13))  # 1e-5 to 1000

Pushed = tuple[int, Tensor, Tensor, Tensor]  # block, its targets, f [B, ...] and J z of some samples [k, B, ...]


@torch.no_grad()
def best_temperature(
    network: Network, state: SampleState, rows: Rows, run: Run, *, closed: bool, at_once: int
) -> tuple[float, float]:
    """What to multiply the covariance by, so that validation rows are the most likely, and their NLL then.

    Args:
        network: restricted to the weights that samples are of, on the device of the work.
        state: the point and the samples.
        rows: those of validation.
        run: shows how far it is, and hears what a person should know.
        closed: predictions are made from the samples' variance, and not of the samples.
        at_once: samples that the device holds.
    """
    some, nll = rows.some(ROWS), torch.zeros(len(TEMPERATURES), dtype=torch.float64)
    count = state.count
    try:
        features = NetworkFeatures(network, state.params, some)
        size = max(1, min(features.block_rows, NUMBERS // (at_once * features.outputs)))
        group = max(1, NUMBERS // _kept_of_a_row(features, state.hyper, closed))
        with run.bar(count * len(some), "prediction") as bar:
            for chosen in torch.arange(len(some)).split(group):
                pushed = _pushed(features, chosen.split(size), state, at_once, bar.update)
                nll += (_of_variances if closed else _of_samples)(network, state.hyper, pushed, count).cpu()
    except ValueError as error:
        raise ValueError(f"of {len(some):,} validation rows, spread evenly: {error}") from error
    best = int(torch.where(nll.isfinite(), nll, torch.inf).argmin())
    if best in (0, len(TEMPERATURES) - 1):
        why = "they want no posterior, or a stronger prior" if best == 0 else "the network is far too sure of them"
        run.warnings.append(
            f"the validation rows want a temperature of {TEMPERATURES[best]:.2g}, the end of the range looked at: {why}"
        )
    return TEMPERATURES[best], float(nll[best]) / len(some)


def _pushed(
    features: NetworkFeatures,
    order: tuple[Tensor, ...],
    state: SampleState,
    at_once: int,
    told: Callable[[int], object],
) -> Iterator[Pushed]:
    """Every block of rows for some samples, then for the next; each sample is read once."""
    for z in (z for group in state.groups for z in group.split(at_once)):
        z = z.to(features.device, copy=True)  # or a file in memory would be read again for each block
        for number, block in enumerate(features.blocks(order)):
            shifts = block.forward(z)
            check_shifts(shifts, int(block.index[0]))
            f = _shaped(features, block)
            yield number, block.targets, f, shifts.reshape(len(z), *f.shape)
            told(len(z) * len(f))


def _of_samples(network: Network, hyper: Hyper, pushed: Iterator[Pushed], count: int) -> Tensor:
    """NLL at each temperature [T] under the mixture of all samples."""
    sums: dict[int, Tensor] = {}  # log sum_k p(y | f + sqrt(T) u_k) of the samples so far, [T, targets of a block]
    for number, y, f, shifts in pushed:
        each = (network.likelihood.predictive(f + math.sqrt(t) * shifts, hyper).log_prob(y) for t in TEMPERATURES)
        here = torch.stack([log_mean.double().flatten() for log_mean in each]) + math.log(len(shifts) / count)
        sums[number] = torch.logaddexp(sums[number], here) if number in sums else here
    return -torch.stack([log_mean.sum(1) for log_mean in sums.values()]).sum(0)


def _of_variances(network: Network, hyper: Hyper, pushed: Iterator[Pushed], count: int) -> Tensor:
    """NLL at each temperature [T] of predictions from the variance of all samples."""
    blocks: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # targets, f and the variance of a block
    for number, y, f, shifts in pushed:
        more = shifts.square().sum(0) / count
        blocks[number] = (y, f, blocks[number][2] + more if number in blocks else more)
    nll = torch.zeros(len(TEMPERATURES), dtype=torch.float64)
    for y, f, variance in blocks.values():
        for number, temperature in enumerate(TEMPERATURES):
            predictive = network.likelihood.closed_predictive(f, temperature * variance, hyper)
            nll[number] -= float(predictive.log_prob(y).double().sum())
    return nll


def _kept_of_a_row(features: NetworkFeatures, hyper: Hyper, closed: bool) -> int:
    """How many numbers while samples are read."""
    if closed:
        return 2 * features.outputs
    block = next(features.blocks([torch.arange(1)]))
    f = _shaped(features, block)
    targets = features.network.likelihood.predictive(f.unsqueeze(0), hyper).log_prob(block.targets)
    return len(TEMPERATURES) * targets.numel()


def _shaped(features: NetworkFeatures, block: NetworkBlock) -> Tensor:
    """The outputs of a block as the network gives them."""
    return block.outputs.reshape(len(block.outputs), *features.output_shape)
