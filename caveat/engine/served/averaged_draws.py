"""The average over fixed settings of the weights, as a module.

    {"mean", "aleatoric", "epistemic"}  of  f(x, theta_1), ..., f(x, theta_S)

What all draws share is held once, what they do not is stacked, [S, ...]. Where only weights of linear layers differ,
all draws go through the network together: products with stacked weights are one batched product, and layers before
the first that differs run once. Filters of S convolutions would be one grouped convolution, which on a CPU takes longer
than one convolution after the other, so these draws are a loop.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from caveat.batches import Inputs
from caveat.engine.predictors import WeightDraws
from caveat.likelihoods import Hyper, Likelihood
from caveat.network import Network, Params
from caveat.predictive import Predictive

__all__ = ["OUTPUTS", "AveragedDraws", "Values", "described", "inputs_of", "single"]

OUTPUTS = ("mean", "aleatoric", "epistemic")
LEARNED = "hyper/"  # before what the likelihood learned in a draw, among its params


class AveragedDraws(nn.Module):
    """The prediction of fixed draws of the weights; call it as the network's own module is called."""

    def __init__(self, groups: Iterable["_Draws"], hyper: "Values", likelihood: Likelihood) -> None:
        super().__init__()
        self.likelihood, self.groups, self.hyper = likelihood, nn.ModuleList(groups), hyper
        self.eval().requires_grad_(False)

    @classmethod
    def of(cls, draws: WeightDraws, likelihood: Likelihood, example: Inputs) -> "AveragedDraws":
        """The module of draws; `example` is a few rows, with which it is tried whether they may go through together."""
        learned: dict[str, list[Tensor]] = {}
        for _, params in draws.members:
            for name, value in params.items():
                if name.startswith(LEARNED):
                    learned.setdefault(name.removeprefix(LEARNED), []).append(value)
        hyper = draws.hyper | {name: torch.stack(values) for name, values in learned.items()}
        groups = (_Draws.of(network, [params for _, params in m], example) for network, m in _by_network(draws.members))
        return cls(groups, Values(hyper), likelihood)

    def one_by_one(self) -> "AveragedDraws":
        """The same, with the same tensors, where each draw goes through the network alone; itself where they do."""
        if not any(group.fused for group in self._draws()):
            return self
        return AveragedDraws((group.one_by_one() for group in self._draws()), self.hyper, self.likelihood)

    def _draws(self) -> Iterator["_Draws"]:
        for group in self.groups:
            assert isinstance(group, _Draws)
            yield group

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """What the posterior says about inputs, [B, ...] each."""
        x = inputs_of(args, kwargs)
        outputs = torch.cat([group(x) for group in self.groups])
        return described(self.likelihood.predictive(single(outputs), self.hyper.tensors()))


class _Draws(nn.Module):
    """Outputs [S, B, ...] of draws of one network."""

    def __init__(self, network: Network, shared: "Values", stacked: "Values", count: int, fused: bool) -> None:
        super().__init__()
        self.network = network  # its own tensors are not used: all are handed to it
        self.shared, self.stacked, self.count, self.fused = shared, stacked, count, fused

    @classmethod
    def of(cls, network: Network, draws: Sequence[Params], example: Inputs) -> "_Draws":
        """Draws that go through together where that may be."""
        own = network.fixed() | network.params()
        whole = [own | draw for draw in draws]
        weights = {name: [draw[name] for draw in whole] for name in whole[0] if not name.startswith(LEARNED)}
        shared = {name: values[0] for name, values in weights.items() if _are_alike(values)}
        stacked = {name: torch.stack(values) for name, values in weights.items() if name not in shared}
        apart = cls(network.replica(), Values(shared), Values(stacked), len(draws), fused=False)
        return cls(apart.network, apart.shared, apart.stacked, apart.count, apart._can_be_fused(example))

    def one_by_one(self) -> "_Draws":
        """The same draws, each through the network alone."""
        return _Draws(self.network, self.shared, self.stacked, self.count, fused=False)

    def _can_be_fused(self, example: Inputs) -> bool:
        """Whether all draws may go through together, seen from a trial."""
        stacked = self.stacked.tensors()
        if not stacked or self.count == 1 or any(tensor.ndim > 3 for tensor in stacked.values()):
            return False
        with torch.no_grad():
            one_by_one = self._one_by_one(example)
            try:
                together = self._together(example)
            except (RuntimeError, ValueError):  # the network does what cannot be done for several draws at once
                return False
        return together.shape == one_by_one.shape and torch.allclose(together, one_by_one, rtol=1e-4, atol=1e-5)

    def forward(self, x: Inputs) -> Tensor:
        return self._together(x) if self.fused else self._one_by_one(x)

    def _together(self, x: Inputs) -> Tensor:
        shared, stacked = self.shared.tensors(), self.stacked.tensors()

        def one(values: Params) -> Tensor:
            return self.network(shared | values, x)

        outputs: Tensor = vmap(one)(stacked)
        return outputs

    def _one_by_one(self, x: Inputs) -> Tensor:
        shared, stacked = self.shared.tensors(), self.stacked.tensors()
        if not stacked:  # all draws are the same
            outputs = self.network(shared, x).unsqueeze(0)
            return outputs.expand(self.count, *outputs.shape[1:])
        each = ({name: stack[number] for name, stack in stacked.items()} for number in range(self.count))
        return torch.stack([self.network(shared | values, x) for values in each])


class Values(nn.Module):
    """Named tensors as buffers, so that they move and are saved with a module; a dot in a name is a bar there."""

    def __init__(self, tensors: Params | Hyper) -> None:
        super().__init__()
        self.names = tuple(tensors)
        for name, tensor in tensors.items():
            self.register_buffer(name.replace(".", "|"), tensor.detach())

    def tensors(self) -> Params:
        """The tensors by their names."""
        return {name: getattr(self, name.replace(".", "|")) for name in self.names}


def _by_network(members: Sequence[tuple[Network, Params]]) -> Iterator[tuple[Network, list[tuple[Network, Params]]]]:
    """Draws that follow each other and are of one network, together."""
    for _, same in groupby(members, lambda member: id(member[0])):
        draws = list(same)
        yield draws[0][0], draws


def _are_alike(values: Sequence[Tensor]) -> bool:
    return all(value is values[0] or torch.equal(value, values[0]) for value in values[1:])


def described(prediction: Predictive) -> dict[str, Tensor]:
    """What a module for service returns: the mean, which of classes are the probabilities, and both uncertainties."""
    return dict(zip(OUTPUTS, prediction.decomposed(), strict=True))


def single(outputs: Tensor) -> Tensor:
    """Outputs in at least single precision: half is too coarse for probabilities that sum to one."""
    return outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs


def inputs_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
    """The inputs as a network takes them, from the arguments of a call."""
    if kwargs and not args:
        return kwargs
    if not args or kwargs:
        raise TypeError("call the module as the network's own: with one tensor, or several, or by names alone")
    return args[0] if len(args) == 1 else args
