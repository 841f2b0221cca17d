"""The log posterior density of a network's weights over all training rows, and its gradient: what chains move by.

    log p(theta | D) / T = (sum_i log p(y_i | f(x_i, theta)) + log p(theta)) / T + constant

Rows go through in pieces that a processor's cache holds, so memory does not grow with their number. A lane does some
chains at once: on a CPU one, with a copy of the module whose parameters are views of one flat vector, so that a step
costs a forward and a backward pass and a few vector operations; on a GPU all of them, through torch.vmap. Sums are
float64 whatever the network's type: the differences that an accept step needs are small against them.
"""

import math
from collections.abc import Iterable, Iterator
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from caveat.batches import Inputs, tensors
from caveat.engine.chains.coordinates import Coordinates
from caveat.engine.chains.perceptron import Perceptron, is_plain, softmax_at_labels
from caveat.engine.cost import forward_flops, free_bytes
from caveat.engine.distributed import Ranks
from caveat.likelihoods import Categorical, Hyper
from caveat.network import Network, Params
from caveat.rows import Batch, Rows

__all__ = ["Lane", "Pieces"]

_ACTIVATION_BYTES = {"cpu": 2**24, "cuda": 2**30}  # that one piece of the rows may leave on its way
# Where backpropagation is written out: the inputs are still near when the weights' gradient needs them.
_STACK_BYTES = 2**23


class Pieces:
    """Rows in pieces, as `parts` groups of like size; kept on the device where they take a quarter of its free memory.

    One part has the rows in order; several have them shuffled, so that each is like the whole. Of every part this is
    the share of one of the ranks.
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
        self._order = [own.split(size) if len(own := ranks.part(part)) else () for part in order.tensor_split(parts)]
        needed = len(rows) // ranks.size * sum(t.nbytes for t in tensors(x)) // few
        self._kept: list[list[Batch]] | None = None
        if needed <= (free_bytes(self.device) or 2**32) // 4:
            self._kept = [list(rows.batches(part, self.device)) for part in self._order]
        self.flops_of_piece = self.flops * size
        self.flops *= len(rows)  # of a forward pass over all of them

    def part(self, index: int = 0) -> Iterable[Batch]:
        """The batches of one part."""
        return self._rows.batches(self._order[index], self.device) if self._kept is None else self._kept[index]

    def everything(self) -> Iterator[Batch]:
        """The batches of all parts."""
        for index in range(len(self._order)):
            yield from self.part(index)


class Lane:
    """The density of `chains` chains on one device; positions are [chains, P] in the coordinates given.

    `temperature` divides the log density, likelihood and prior alike. `hyper` is what the likelihood takes beside the
    outputs, with the noise where it is not inferred.
    """

    def __init__(
        self, network: Network, coordinates: Coordinates, chains: int, hyper: Hyper, temperature: float = 1.0
    ) -> None:
        self.network, self.coordinates, self.chains, self.temperature = network, coordinates, chains, temperature
        self.hyper = {name: value.to(network.device) for name, value in hyper.items()}
        self._weights = torch.zeros(chains, coordinates.size, dtype=network.dtype, device=network.device)
        self._gradient = torch.zeros_like(self._weights)
        self._own = network.with_fixed({}) if chains == 1 else network
        self._perceptron: Perceptron | None = None
        self._labels_only = False  # whether the likelihood is a plain softmax at labels that all count
        self._leaves = self._tied() if chains == 1 else self._stacked()

    @staticmethod
    def can_write_out(network: Network, rows: Rows) -> bool:
        """Whether the network is a plain stack of layers on a CPU, all of them selected, of rows that it can take."""
        x, names = next(rows.batches([torch.arange(1)]))[0], {name for name, _ in network.module.named_parameters()}
        flat = isinstance(x, Tensor) and (x.ndim == 2 or any(type(m) is nn.Flatten for m in network.module.children()))
        return network.device.type == "cpu" and flat and is_plain(network.module) and names == set(network.names)

    def write_out(self, rows: Rows) -> None:
        """Use backpropagation that is written out."""
        likelihood = self.network.likelihood
        if isinstance(likelihood, Categorical) and likelihood.class_weights is None and rows.in_memory:
            self._labels_only = not bool((rows.targets() == likelihood.ignore_index).any())
        views = (self.coordinates.split(flat) for flat in (self._weights, self._gradient))
        self._perceptron = Perceptron(self._own.module, *views)

    def _tied(self) -> Params:
        """The parameters of a copy of the module, they and their gradients views of the flat vectors."""
        own: dict[str, Tensor] = dict(self._own.module.named_parameters())
        values, gradients = (self.coordinates.split(flat[0]) for flat in (self._weights, self._gradient))
        leaves: Params = {}
        for name, value in values.items():
            if name in own:
                own[name].data = value
            leaves[name] = own.get(name, value.detach()).requires_grad_()
            leaves[name].grad = gradients[name]
        return leaves

    def _stacked(self) -> Params:
        values, gradients = (self.coordinates.split(flat) for flat in (self._weights, self._gradient))
        leaves = {name: value.detach().requires_grad_() for name, value in values.items()}
        for name, leaf in leaves.items():
            leaf.grad = gradients[name]
        return leaves

    @torch.no_grad()
    def gradient(
        self, position: Tensor, rows: Iterable[Batch], *, times: float = 1.0, prior: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Log likelihood of these rows, [chains] in float64, and the gradient [chains, P] of the tempered log density.

        In the gradient the likelihood counts so many `times` and the `prior` so often.
        """
        self._weights.copy_(self.coordinates.weights(position))
        self._gradient.zero_()
        total = torch.zeros(self.chains, dtype=torch.float64, device=position.device)
        if self._perceptron is not None:
            for x, y in rows:
                total += self._perceptron.add_gradient(cast(Tensor, x), partial(self._ends, y=y, times=times))
        else:
            with torch.enable_grad():
                for x, y in rows:
                    values = self._log_likelihood(x, y)
                    self._add_gradient(values.sum() if times == 1 else times * values.sum())
                    total += values.detach()
        normal = self.coordinates.normal
        if prior and normal.start:
            with torch.enable_grad():
                self._add_gradient(prior * self._log_prior(self._leaves).sum())
        gradient = self.coordinates.pulled_back(self._gradient)
        if prior:
            gradient[:, normal].sub_(self.coordinates.prior_gradient(position), alpha=prior)
        return total, gradient if self.temperature == 1 else gradient.div_(self.temperature)

    def _ends(self, outputs: Tensor, y: Tensor, times: float) -> tuple[Tensor, Tensor]:
        """Log likelihood of outputs [chains, C, B] and its gradient, so many times; that of noise is added here."""
        if self._labels_only:
            value, gradient = softmax_at_labels(outputs, y.long())
            return value, gradient if times == 1 else gradient.mul_(times)
        noise = [self._leaves["hyper/log_noise"]] if "hyper/log_noise" in self._leaves else []
        leaf = outputs.transpose(1, 2).requires_grad_()
        with torch.enable_grad():
            value = self._values(leaf, y)
            gradient, *rest = torch.autograd.grad(times * value.sum(), [leaf, *noise])
        for own, found in zip(noise, rest, strict=True):
            cast(Tensor, own.grad).add_(found)
        return value.detach(), gradient.transpose(1, 2)

    def _values(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Log likelihoods [chains] of outputs [chains, B, C]."""
        found, noise = [], self._leaves.get("hyper/log_noise")
        for i, own in enumerate(outputs):
            extra = {} if noise is None else {"log_noise": noise if self.chains == 1 else noise[i]}
            found.append(self.network.likelihood.log_prob(own, y, self.hyper | extra).sum(dtype=torch.float64))
        return torch.stack(found)

    def _add_gradient(self, value: Tensor) -> None:
        """To the flat gradient; backward() would warn of several chains' leaves, which do not lie densely."""
        if self.chains == 1:
            value.backward()
            return
        found = torch.autograd.grad(value, [*self._leaves.values()], allow_unused=True)
        for leaf, gradient in zip(self._leaves.values(), found, strict=True):
            if leaf.grad is not None and gradient is not None:
                leaf.grad += gradient

    def log_likelihood(self, position: Tensor, rows: Iterable[Batch]) -> Tensor:
        """Log likelihood of these rows, [chains] in float64, without a gradient."""
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
        """Of a piece of the rows, [chains]."""

        def of(outputs: Tensor, params: Params) -> Tensor:
            noise = {"log_noise": params["hyper/log_noise"]} if "hyper/log_noise" in params else {}
            return self.network.likelihood.log_prob(outputs, y, self.hyper | noise).sum(dtype=torch.float64)

        if self.chains == 1:
            return of(self._own.evaluation_pass(x), self._leaves).unsqueeze(0)
        found: Tensor = torch.vmap(lambda params: of(self.network(params, x), params))(self._leaves)
        return found

    def _log_prior(self, params: Params) -> Tensor:
        """Of the weights, without the noise."""
        weights = {name: params[name] for name in self.network.names}
        if self.chains == 1:
            return self.network.prior.log_prob(weights)
        found: Tensor = torch.vmap(self.network.prior.log_prob)(weights)
        return found

    def log_prior(self, position: Tensor) -> Tensor:
        """Log prior density of weights and noise, [chains], normalised, in float64."""
        densities = []
        for own, flat in zip(
            self.coordinates.whitened(position), self.coordinates.weights(position).double(), strict=True
        ):
            weights = self.coordinates.split(flat)
            density = self.network.prior.log_prob({name: weights[name] for name in self.network.names})
            if "hyper/log_noise" in weights:
                noise = own[self.coordinates.places["hyper/log_noise"][0]].double()
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
    """What a forward pass keeps for the way back, beside the weights, in bytes."""
    params = {name: weight.requires_grad_() for name, weight in network.params().items()}
    weights = {weight.untyped_storage().data_ptr() for weight in (*params.values(), *network.module.parameters())}
    kept: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        outputs = network(params, x)
    return sum(kept.values()) + outputs.nbytes + sum(tensor.nbytes for tensor in tensors(x))
