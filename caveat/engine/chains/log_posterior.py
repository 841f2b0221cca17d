"""The log posterior density of a network's weights over all training rows, and its gradient: what chains move by.

    log p(theta | D) / T = (sum_i log p(y_i | f(x_i, theta)) + log p(theta)) / T + constant

Rows go through in pieces that fit into a processor's cache, so memory does not grow with their number. A `LogPosterior`
serves one or several chains. For one chain on a CPU, the parameters of a copy of the module are views of one flat
vector, so a step costs a forward and a backward pass and a few vector operations. On a GPU, or if it is compiled, the
pass is a function of such views, so that one compilation serves all chains. Several chains go through torch.vmap at
once (on a GPU) or through `perceptron` (plain stacks on a CPU). Sums are float64 whatever the network's type, because
the differences that an accept step needs are small against them.
"""

import math
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal, cast

import torch
from torch import Tensor, nn

from caveat.batches import Inputs, map_tensors, tensors
from caveat.engine.chains.coordinates import Coordinates
from caveat.engine.chains.perceptron import Perceptron, is_plain, softmax_at_labels
from caveat.engine.cost import forward_flops, free_bytes
from caveat.engine.distributed import Ranks
from caveat.engine.torch_settings import compiled
from caveat.likelihoods import Categorical, Hyper
from caveat.network import Network, Params
from caveat.priors import gaussian_precisions
from caveat.rows import Batch, Rows

__all__ = ["LogPosterior", "PassSettings", "RowPieces", "vmap_takes"]

_ACTIVATION_BYTES = {"cpu": 2**24, "cuda": 2**30}  # that the forward pass of one piece may leave for the backward pass
# The same for `perceptron`: less, so that the activations are still in the cache on the way back.
_STACK_BYTES = 2**23


@dataclass(frozen=True)
class PassSettings:
    """How the forward and the backward pass of a chain are made; positions and sums are not touched by it."""

    precision: Literal["float32", "bfloat16"] = "float32"  # of the forward pass
    channels_last: bool = False  # memory format of images and filters
    compile: bool = False  # by torch.compile

    @property
    def plain(self) -> bool:
        """Whether nothing is asked for."""
        return self == PassSettings()


LogLikelihood = Callable[[Params, Hyper, Inputs, Tensor], Tensor]  # of the weights, [] in float64


def log_likelihood_of(network: Network, settings: PassSettings, rows: int) -> LogLikelihood:
    """The log likelihood of a piece of the rows as a function of the weights (with the noise, where it is inferred).

    What is compiled is the pass of so many rows that a gradient goes back through; others are too rare to wait for.
    """
    bfloat16 = settings.precision == "bfloat16"
    device = network.device.type

    def log_likelihood(params: Params, hyper: Hyper, x: Inputs, y: Tensor) -> Tensor:
        if settings.channels_last:
            x, params = map_tensors(_channels_last, x), {name: _channels_last(t) for name, t in params.items()}
        with torch.autocast(device, torch.bfloat16, enabled=bfloat16, cache_enabled=False):
            outputs = network(params, x)
        outputs = outputs.float() if bfloat16 else outputs
        noise = {"log_noise": params["hyper/log_noise"]} if "hyper/log_noise" in params else {}
        return network.likelihood.log_prob(outputs, y, hyper | noise).sum(dtype=torch.float64)

    if not settings.compile:
        return log_likelihood
    # torch compiles a piece of code eight times and then no more: every fit's is a copy of its own.
    code, where, closure = log_likelihood.__code__.replace(), log_likelihood.__globals__, log_likelihood.__closure__
    often_made = compiled(types.FunctionType(code, where, closure=closure), dynamic=False)

    def fast(params: Params, hyper: Hyper, x: Inputs, y: Tensor) -> Tensor:
        often = torch.is_grad_enabled() and len(y) == rows
        return often_made(params, hyper, x, y) if often else log_likelihood(params, hyper, x, y)

    return fast


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor


class RowPieces:
    """The training rows in `parts` groups of equal size, each a list of pieces.

    One part has the rows in order; several parts have them shuffled, so that each is like the whole. Only this rank's
    share of every part is here. The pieces stay on the device if they take at most a quarter of its free memory.
    """

    def __init__(self, rows: Rows, network: Network, parts: int = 1, ranks: Ranks | None = None) -> None:
        ranks, order = ranks or Ranks(), torch.arange(len(rows))
        if parts > 1:
            order = order[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
        self._rows, self.device = rows, network.device
        few = min(len(rows), 2)
        x, _ = next(rows.batches([order[:few]], self.device))
        left, self.flops = _activation_bytes(network, x) // few, forward_flops(network, network.params(), x) / few
        room = (
            _STACK_BYTES
            if self.device.type == "cpu" and is_plain(network.module)
            else _ACTIVATION_BYTES[self.device.type]
        )
        size = max(1, min(len(rows), room // max(left, 1)))
        if 16 < size < len(rows):
            size -= size % 16  # whole vectors of a processor: 295 rows took a tenth longer than 288
        self.size = size  # rows of a piece
        shares = [ranks.part(part) for part in order.tensor_split(parts)]
        self._order = [share.split(size) if len(share) else () for share in shares]
        needed = len(rows) // ranks.size * sum(t.nbytes for t in tensors(x)) // few
        self._batches: list[list[Batch]] | None = None  # where they stay on the device
        if needed <= (free_bytes(self.device) or 2**32) // 4:
            self._batches = [list(rows.batches(part, self.device)) for part in self._order]
        self.flops_of_piece = self.flops * size
        self.flops *= len(rows)  # of a forward pass over all rows

    def part(self, index: int = 0) -> Iterable[Batch]:
        """The batches of one part."""
        if self._batches is None:
            return self._rows.batches(self._order[index], self.device)
        return self._batches[index]

    def everything(self) -> Iterator[Batch]:
        """The batches of all parts."""
        for index in range(len(self._order)):
            yield from self.part(index)


class LogPosterior:
    """The log posterior density of `chains` chains on one device; positions are [chains, P] in the given coordinates.

    `temperature` divides the log density, likelihood and prior alike. `hyper` is what the likelihood takes beside the
    outputs; noise that is inferred is part of the position instead. `log_likelihood`, where it is given, is the pass of
    one chain as a function.
    """

    def __init__(
        self,
        network: Network,
        coordinates: Coordinates,
        chains: int,
        hyper: Hyper,
        temperature: float = 1.0,
        log_likelihood: LogLikelihood | None = None,
    ) -> None:
        self.network, self.coordinates, self.chains, self.temperature = network, coordinates, chains, temperature
        self.hyper = {name: value.to(network.device) for name, value in hyper.items()}
        self._weights = torch.zeros(chains, coordinates.size, dtype=network.dtype, device=network.device)
        self._gradient = torch.zeros_like(self._weights)
        self._function = log_likelihood if chains == 1 else None
        self._tied_copy = chains == 1 and log_likelihood is None
        self._copy = network.with_fixed({}) if self._tied_copy else network
        self._perceptron: Perceptron | None = None
        self._labels_only = False  # whether the likelihood is a plain softmax at labels that all count
        self._leaves = self._tied() if self._tied_copy else self._stacked()
        self._precision = self._prior_precision()

    @staticmethod
    def can_use_perceptron(network: Network, rows: Rows) -> bool:
        """Whether the network is a plain stack of layers on a CPU, all of them selected, that takes flat rows."""
        x, names = next(rows.batches([torch.arange(1)]))[0], {name for name, _ in network.module.named_parameters()}
        flat = isinstance(x, Tensor) and (x.ndim == 2 or any(type(m) is nn.Flatten for m in network.module.children()))
        return network.device.type == "cpu" and flat and is_plain(network.module) and names == set(network.names)

    @staticmethod
    def is_softmax_at_labels(network: Network, rows: Rows) -> bool:
        """Whether the likelihood is a plain softmax at labels, all of which count."""
        likelihood = network.likelihood
        plain = isinstance(likelihood, Categorical) and likelihood.class_weights is None and rows.in_memory
        return plain and not bool((rows.targets() == cast(Categorical, likelihood).ignore_index).any())

    def use_perceptron(self, rows: Rows) -> None:
        """Compute gradients by the explicit formulas of `perceptron` from now on, instead of by autograd."""
        self._labels_only = self.is_softmax_at_labels(self.network, rows)
        views = (self.coordinates.split(flat) for flat in (self._weights, self._gradient))
        self._perceptron = Perceptron(self._copy.module, *views)

    def _prior_precision(self) -> Tensor | None:
        """The precisions of independent normal weights, flat and in float64; None under another prior."""
        weights = {name: weight.double() for name, weight in self.network.params().items()}
        precisions = gaussian_precisions(self.network.prior, weights)
        if precisions is None:
            return None
        return torch.cat([precisions[name].expand(weight.shape).flatten() for name, weight in weights.items()])

    def _tied(self) -> Params:
        """The parameters of the module's copy, made views of the flat weights, and their gradients of the flat one."""
        parameters: dict[str, Tensor] = dict(self._copy.module.named_parameters())
        values, gradients = (self.coordinates.split(flat[0]) for flat in (self._weights, self._gradient))
        leaves: Params = {}
        for name, value in values.items():
            if name in parameters:
                parameters[name].data = value
            leaves[name] = parameters.get(name, value.detach()).requires_grad_()
            leaves[name].grad = gradients[name]
        return leaves

    def _stacked(self) -> Params:
        """Views of the flat weights by name, [...] or [chains, ...], with gradients that are views of the flat one."""
        flats = (self._weights, self._gradient) if self.chains > 1 else (self._weights[0], self._gradient[0])
        values, gradients = (self.coordinates.split(flat) for flat in flats)
        leaves = {name: value.detach().requires_grad_() for name, value in values.items()}
        for name, leaf in leaves.items():
            leaf.grad = gradients[name]
        return leaves

    @torch.no_grad()
    def gradient(
        self,
        position: Tensor,
        rows: Iterable[Batch],
        *,
        likelihood_weight: float = 1.0,
        prior_weight: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """The log likelihood of these rows, [chains] in float64, and the gradient [chains, P] of the tempered density.

        The gradient is that of (likelihood_weight log p(rows | theta) + prior_weight log p(theta)) / temperature.
        """
        self._weights.copy_(self.coordinates.weights(position))
        self._gradient.zero_()
        total = torch.zeros(self.chains, dtype=torch.float64, device=position.device)
        if self._perceptron is not None:
            for x, y in rows:
                total += self._perceptron.add_gradient(
                    cast(Tensor, x), partial(self._output_gradient, y=y, weight=likelihood_weight)
                )
        else:
            with torch.enable_grad():
                for x, y in rows:
                    values = self._log_likelihood(x, y)
                    self._add_gradient(values.sum() if likelihood_weight == 1 else likelihood_weight * values.sum())
                    total += values.detach()
        normal = self.coordinates.normal
        if prior_weight and normal.start:
            with torch.enable_grad():
                self._add_gradient(prior_weight * self._log_prior(self._leaves).sum())
        gradient = self.coordinates.pulled_back(self._gradient)
        if prior_weight:
            gradient[:, normal].sub_(self.coordinates.prior_gradient(position), alpha=prior_weight)
        return total, gradient if self.temperature == 1 else gradient.div_(self.temperature)

    def _output_gradient(self, outputs: Tensor, y: Tensor, weight: float) -> tuple[Tensor, Tensor]:
        """Log likelihoods [chains] of outputs [chains, C, B], and `weight` times their gradient [chains, C, B].

        The gradient of the noise is added to the flat gradient.
        """
        if self._labels_only:
            value, gradient = softmax_at_labels(outputs, y.long())
            return value, gradient if weight == 1 else gradient.mul_(weight)
        noise = [self._leaves["hyper/log_noise"]] if "hyper/log_noise" in self._leaves else []
        leaf = outputs.transpose(1, 2).requires_grad_()
        with torch.enable_grad():
            value = self._values(leaf, y)
            gradient, *of_noise = torch.autograd.grad(weight * value.sum(), [leaf, *noise])
        for log_noise, noise_gradient in zip(noise, of_noise, strict=True):
            cast(Tensor, log_noise.grad).add_(noise_gradient)
        return value.detach(), gradient.transpose(1, 2)

    def _values(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Log likelihoods [chains] of outputs [chains, B, C]."""
        values, noise = [], self._leaves.get("hyper/log_noise")
        for i, outputs_of_chain in enumerate(outputs):
            inferred = {} if noise is None else {"log_noise": noise if self.chains == 1 else noise[i]}
            log_prob = self.network.likelihood.log_prob(outputs_of_chain, y, self.hyper | inferred)
            values.append(log_prob.sum(dtype=torch.float64))
        return torch.stack(values)

    def _add_gradient(self, value: Tensor) -> None:
        """Add the gradient of a value [] to the flat gradient."""
        if self._tied_copy:
            value.backward()
            return
        # backward() would warn of several chains' leaves, which are not contiguous, and add on a stream of its choice.
        gradients = torch.autograd.grad(value, [*self._leaves.values()], allow_unused=True)
        pairs = zip((cast(Tensor, leaf.grad) for leaf in self._leaves.values()), gradients, strict=True)
        sums, summands = zip(*((total, gradient) for total, gradient in pairs if gradient is not None), strict=True)
        torch._foreach_add_(sums, summands)

    def log_likelihood(self, position: Tensor, rows: Iterable[Batch]) -> Tensor:
        """The log likelihood of these rows at positions [chains, P], [chains] in float64, without a gradient."""
        with torch.no_grad():
            self._weights.copy_(self.coordinates.weights(position))
            total = torch.zeros(self.chains, dtype=torch.float64, device=position.device)
            for x, y in rows:
                if self._perceptron is None:
                    total += self._log_likelihood(x, y)
                else:
                    total += self._values(self._perceptron.forward(cast(Tensor, x))[-1].transpose(1, 2), y)
        return total

    def _log_likelihood(self, x: Inputs, y: Tensor) -> Tensor:
        """The log likelihood of a piece of the rows, [chains], with a graph for its gradient."""
        if self._function is not None:
            return self._function(self._leaves, self.hyper, x, y).unsqueeze(0)

        def log_likelihood(outputs: Tensor, params: Params) -> Tensor:
            noise = {"log_noise": params["hyper/log_noise"]} if "hyper/log_noise" in params else {}
            return self.network.likelihood.log_prob(outputs, y, self.hyper | noise).sum(dtype=torch.float64)

        if self.chains == 1:
            return log_likelihood(self._copy.evaluation_pass(x), self._leaves).unsqueeze(0)
        values: Tensor = torch.vmap(lambda params: log_likelihood(self.network(params, x), params))(self._leaves)
        return values

    def _log_prior(self, params: Params) -> Tensor:
        """The log prior density of the weights, [chains] or [], without that of the noise."""
        weights = {name: params[name] for name in self.network.names}
        if self.chains == 1:
            return self.network.prior.log_prob(weights)
        densities: Tensor = torch.vmap(self.network.prior.log_prob)(weights)
        return densities

    def log_prior(self, position: Tensor) -> Tensor:
        """The normalised log prior density of weights and noise at positions [chains, P], [chains] in float64."""
        if self._precision is not None and "hyper/log_noise" not in self.coordinates.places:
            squares = self.coordinates.weights(position).double().square_()
            return -0.5 * (squares @ self._precision - (self._precision / (2 * math.pi)).log().sum())
        densities = []
        for z, flat in zip(
            self.coordinates.whitened(position), self.coordinates.weights(position).double(), strict=True
        ):
            weights = self.coordinates.split(flat)
            density = self.network.prior.log_prob({name: weights[name] for name in self.network.names})
            if "hyper/log_noise" in weights:
                noise = z[self.coordinates.places["hyper/log_noise"][0]].double()
                density = density - 0.5 * (noise.square() + math.log(2 * math.pi)).sum()
            densities.append(density)
        return torch.stack(densities)


def vmap_takes(network: Network, x: Inputs) -> bool:
    """Whether several sets of weights can go through the network at once, and gradients back."""
    stacked = {name: torch.stack([w, w]).requires_grad_() for name, w in network.params().items()}
    try:
        with torch.enable_grad():
            outputs = torch.vmap(lambda params: network(params, x))(stacked)
            torch.autograd.grad(outputs.sum(), [*stacked.values()], allow_unused=True)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # an operation without a batched form, or a module that looks at values
        return False
    return True


def _activation_bytes(network: Network, x: Inputs) -> int:
    """Bytes that a forward pass keeps for the backward pass, beside the weights."""
    params = {name: weight.requires_grad_() for name, weight in network.params().items()}
    weights = {weight.untyped_storage().data_ptr() for weight in (*params.values(), *network.module.parameters())}
    saved: dict[int, int] = {}  # bytes of each storage

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        outputs = network(params, x)
    return sum(saved.values()) + outputs.nbytes + sum(tensor.nbytes for tensor in tensors(x))
