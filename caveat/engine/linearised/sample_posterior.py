"""A posterior of samples: what it keeps, and its predictions f(x) + J(x) z_k, each a draw of the function."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from caveat.batches import Inputs, count_rows, move, outside_inference_mode
from caveat.engine.flat_weights import moved
from caveat.engine.linearised.jacobian_features import NetworkFeatures
from caveat.engine.linearised.sampler import InputRows, check_shifts
from caveat.engine.predictors import FixedForm, LinearDraws, Replicas, WeightDraws, outputs_of_draws, pick
from caveat.engine.state_checks import check_hyper, check_names, check_point, check_tensor
from caveat.engine.tangents import Programs
from caveat.likelihoods import Hyper
from caveat.network import Network, Params
from caveat.storage import CorruptFile, State

__all__ = ["SamplePredictor", "SampleState"]


@dataclass(frozen=True)
class SampleState:
    """Deviations from a point, [K, d], in the groups in which they were made."""

    params: Params  # the point, with buffers
    hyper: Hyper
    groups: tuple[Tensor, ...]  # [k, d] each, of unit temperature; they may lie in files
    temperature: float = 1.0  # multiplies the covariance

    def tensors(self) -> State:
        """As a posterior keeps it; a group of samples is named by the number of its first one."""
        starts = [sum(map(len, self.groups[:number])) for number in range(len(self.groups))]
        return {
            "params": self.params,
            "hyper": self.hyper,
            "samples": {str(start): group for start, group in zip(starts, self.groups, strict=True)},
            "posterior": {"temperature": torch.tensor(self.temperature, dtype=torch.float64)},
        }

    @classmethod
    def of(cls, state: State) -> "SampleState":
        """The state that `tensors` made groups of; in older files the temperature is 1 and not there."""
        missing = {"params", "hyper", "samples"} - state.keys()
        if missing or not state["samples"]:
            raise CorruptFile(f"this is not the state of samples: it has no {sorted(missing or {'samples'})[0]!r}")
        begin = 0
        for name, group in state["samples"].items():
            if name != str(begin) or not group.ndim:
                raise CorruptFile(f"samples/{name} is not the group that begins with sample {begin}")
            begin += len(group)
        temperature = 1.0
        if "posterior" in state:
            check_names("posterior", state["posterior"], ["temperature"])
            check_tensor("posterior/temperature", state["posterior"]["temperature"], (), (torch.float64,))
            temperature = float(state["posterior"]["temperature"])
        return cls(state["params"], state["hyper"], tuple(state["samples"].values()), temperature)

    def check(self, network: Network, whole: Network, count: int) -> None:
        """Refuse what is not so many samples of a network's weights, around a point of the whole network."""
        check_point("params", self.params, whole)
        check_hyper(self.hyper, whole)
        for number, group in enumerate(self.groups):
            rows = len(group) if group.ndim else 0
            check_tensor(f"samples, group {number}", group, (rows, network.n_parameters), (network.dtype,))
        if self.count != count:
            raise CorruptFile(f"there are {self.count} samples, and the method has {count}")
        if not self.temperature > 0 or math.isinf(self.temperature):
            raise CorruptFile(f"posterior/temperature is {self.temperature}")

    @property
    def count(self) -> int:
        """How many samples there are."""
        return sum(map(len, self.groups))

    @property
    def spread(self) -> float:
        """The factor that samples are multiplied by, the root of the temperature."""
        return self.temperature**0.5

    def sample(self, number: int) -> Tensor:
        """One sample, [d], of unit temperature."""
        return next(self.some([number], 1))[1][0]

    def some(self, numbers: Sequence[int], at_once: int) -> Iterator[tuple[list[int], Tensor]]:
        """Chosen samples, each once and in order, at most so many at once: their numbers, and they [k, d]."""
        begin = 0
        for group in self.groups:
            here = [number for number in sorted(set(numbers)) if begin <= number < begin + len(group)]
            for part in (here[i : i + at_once] for i in range(0, len(here), at_once)):
                yield part, group[[number - begin for number in part]]
            begin += len(group)


class SamplePredictor:
    """Predicts by products of the Jacobian with samples, through programs that are traced once a shape of inputs.

    Args:
        state: the samples.
        network: restricted to the weights that they are of.
        by_weights: send the samples through the network itself, as weights, instead of its linearisation.
        at_once: samples that the device holds.
    """

    def __init__(self, state: SampleState, network: Network, *, by_weights: bool, at_once: int) -> None:
        self._state, self._by_weights, self._at_once = state, by_weights, at_once
        self._programs = Programs()
        self._networks = Replicas(network.replica)

    def draws(self, n: int, rng: torch.Generator) -> Iterator[Params]:
        """Weight draws: the point plus stored samples, n of them."""
        with self._networks.lent() as network:
            yield from self._weight_draws(network, n, rng)

    def _weight_draws(self, network: Network, n: int, rng: torch.Generator) -> Iterator[Params]:
        for number in pick(self._state.count, n, rng):
            delta = self._state.spread * self._state.sample(number).to(network.device)
            yield moved(network, self._state.params, delta)

    @torch.inference_mode(False)
    def outputs(self, x: Inputs, n: int, rng: torch.Generator) -> tuple[Tensor, Hyper]:
        """Outputs of n functions f + J z, [S, B, ...]: the same samples for all inputs, so that they are joint."""
        x, hyper = outside_inference_mode(x), self._state.hyper
        with self._networks.lent() as network:
            if self._by_weights:
                return outputs_of_draws(self._weight_draws(network, n, rng), hyper, network, x)
            mean, shifts = self._shifts(network, x, pick(self._state.count, n, rng))
            return mean + shifts, hyper

    @torch.inference_mode(False)
    def moments(self, x: Inputs, joint: bool = False) -> tuple[Tensor, Tensor]:
        """f(x) and the samples' covariance J z z^T J^T, averaged; its mean of zero is known."""
        x, count = outside_inference_mode(x), self._state.count
        with self._networks.lent() as network:
            mean, shifts = self._shifts(network, x, list(range(count)))
        if joint:
            every = shifts.flatten(1)
            return mean, every.T @ every / count
        rows = shifts.flatten(2)
        return mean, torch.einsum("kbi,kbj->bij", rows, rows) / count

    def fixed_form(self, n: int | None, rng: torch.Generator, example: Inputs) -> FixedForm:
        """The samples that `outputs` takes, or all of them for `moments`."""
        state = self._state
        with self._networks.lent() as network:
            if self._by_weights and n is not None:
                draws = self._weight_draws(network, n, rng)
                return WeightDraws([(network, params) for params in draws], state.hyper)
            closed, count = n is None, state.count
            chosen = list(range(count)) if n is None else pick(count, n, rng)
            width = state.spread / count**0.5 if closed else state.spread
            directions = torch.stack([width * state.sample(number).to(network.device) for number in chosen])
            return LinearDraws(network, state.params, directions, None, state.hyper, closed)

    @torch.no_grad()
    def _shifts(self, network: Network, x: Inputs, chosen: list[int]) -> tuple[Tensor, Tensor]:
        """f(x) [B, ...] and J(x) z [n, B, ...] of chosen samples, which are brought to the device a few at a time."""
        if not count_rows(x):
            outputs = network(self._state.params, move(x, network.device))
            return outputs, outputs.expand(len(chosen), *outputs.shape)
        features = NetworkFeatures(network, self._state.params, InputRows(x), programs=self._programs, padded=True)
        alone = count_rows(x) == 1 and math.prod(features.output_shape) <= len(set(chosen))
        times = _times_the_gradients(features) if alone else _in_blocks(features)
        mean: Tensor | None = None
        products: dict[int, Tensor] = {}
        for numbers, samples in self._state.some(chosen, self._at_once):
            outputs, shifts = times(samples.to(network.device))
            mean = outputs if mean is None else mean
            products |= dict(zip(numbers, shifts, strict=True))
        assert mean is not None
        shifts = self._state.spread * torch.stack([products[number] for number in chosen])
        check_shifts(shifts)
        shape = (count_rows(x), *features.output_shape)
        return mean.reshape(shape), shifts.reshape(len(chosen), *shape)


Products = Callable[[Tensor], tuple[Tensor, Tensor]]  # samples z [k, d] -> f [B, m] and J z [k, B, m]


def _in_blocks(features: NetworkFeatures) -> Products:
    """Products by forward differentiation, a pass for each sample."""

    def times(z: Tensor) -> tuple[Tensor, Tensor]:
        blocks = [(block.outputs, block.forward(z)) for block in features.blocks()]
        return torch.cat([outputs for outputs, _ in blocks]), torch.cat([shifts for _, shifts in blocks], 1)

    return times


def _times_the_gradients(features: NetworkFeatures) -> Products:
    """Products with the gradients of one row: a pass back for each output, where these are fewer."""
    (block,) = features.blocks()
    unit = torch.eye(block.outputs.shape[1], dtype=block.outputs.dtype, device=block.outputs.device)
    gradients = block.backward(unit.unsqueeze(1))  # [m, d]
    return lambda z: (block.outputs, (z @ gradients.T).unsqueeze(1))
