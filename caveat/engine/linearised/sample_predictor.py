"""Predictions from posterior samples of a linearised network: f(x) + J(x) z_k, each a draw of the function."""

from collections.abc import Iterator

import torch
from torch import Tensor

from caveat.batches import Inputs, count_rows, move, outside_inference_mode
from caveat.engine.flat_weights import moved
from caveat.engine.linearised.jacobian_features import NetworkFeatures, Programs
from caveat.engine.linearised.sample_state import SampleState
from caveat.engine.linearised.sampler import InputRows, check_shifts
from caveat.engine.predictors import Replicas, outputs_of_draws, pick
from caveat.likelihoods import Hyper
from caveat.network import Network, Params

__all__ = ["SamplePredictor"]


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

    @torch.no_grad()
    def _shifts(self, network: Network, x: Inputs, chosen: list[int]) -> tuple[Tensor, Tensor]:
        """f(x) [B, ...] and J(x) z [n, B, ...] of chosen samples, which are brought to the device a few at a time."""
        if not count_rows(x):
            outputs = network(self._state.params, move(x, network.device))
            return outputs, outputs.expand(len(chosen), *outputs.shape)
        features = NetworkFeatures(network, self._state.params, InputRows(x), programs=self._programs)
        mean: Tensor | None = None
        products: dict[int, Tensor] = {}
        for numbers, samples in self._state.some(chosen, self._at_once):
            z = samples.to(network.device)
            blocks = [(block.outputs, block.forward(z)) for block in features.blocks()]
            mean = torch.cat([f for f, _ in blocks]) if mean is None else mean
            products |= dict(zip(numbers, torch.cat([u for _, u in blocks], 1), strict=True))
        assert mean is not None
        shifts = self._state.spread * torch.stack([products[number] for number in chosen])
        check_shifts(shifts)
        shape = (count_rows(x), *features.output_shape)
        return mean.reshape(shape), shifts.reshape(len(chosen), *shape)
