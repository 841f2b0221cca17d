"""Products with the Jacobian by autograd, for a module of any kind: nothing is traced, every pass calls the module.

    pull: J^T v by a backward pass        push: J z = d/dv <J^T v, z>, by a backward pass through that one

J^T v is linear in v, so the graph of one backward pass serves every z. K vectors go together where torch can batch the
passes, else one after the other. Branches that depend on numbers, masks, routed experts, packed sequences, tied and
parametrised weights are all what they are in training. Where an operation has no second derivatives, the push is a
forward pass with dual numbers for each vector. Weights that are not chosen have no gradients: for
adapters a product is one forward and one backward pass through the frozen trunk.
"""

import contextlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from caveat.batches import Inputs
from caveat.engine.tangents.call_site import at_least_single
from caveat.engine.tangents.plain_operations import plain_operations
from caveat.engine.torch_settings import process_lock, slope_along
from caveat.network import Network, Params

__all__ = ["AutogradProducts", "PassFacts", "rounding"]

_FILTERS = process_lock()  # of Python's warnings, which are the process's and not a thread's
_TORCH_CANNOT = (RuntimeError, NotImplementedError, IndexError, ValueError)


@dataclass(frozen=True)
class PassFacts:
    """What a pass over a few rows shows of a network; it holds for all others."""

    output_shape: torch.Size  # of a row
    largest: int  # numbers of one row in the largest tensor that a pass keeps
    activations: int  # in all of them
    forward_mode: bool  # whether pushes are forward passes

    @property
    def way(self) -> str:
        """How products are made, in words."""
        return "forward-mode derivatives and backward passes" if self.forward_mode else "backward passes, twice"


class AutogradProducts:
    """Products for rows of any shape.

    Args:
        network: the network, in evaluation mode.
        params: where it is linearised.
        names: the parameters of the linear part.
        facts: what `look` found.
        float16: run the module's passes under autocast in float16.
    """

    def __init__(
        self, network: Network, params: Params, names: Sequence[str], facts: PassFacts, float16: bool = False
    ) -> None:
        self.network, self.names, self.facts, self.float16 = network, tuple(names), facts, float16
        self.params = {name: value for name, value in params.items() if not name.startswith("hyper/")}
        self.shapes = [params[name].shape for name in names]
        self.sizes = [shape.numel() for shape in self.shapes]

    @classmethod
    def looking(
        cls, network: Network, params: Params, names: Sequence[str], x: Inputs, rows: int
    ) -> "AutogradProducts":
        """Find the facts in passes over a few rows."""
        unknown = PassFacts(torch.Size(), 1, 1, forward_mode=False)
        kept = _Kept({params[name].data_ptr() for name in params})
        products = cls(network, params, names, unknown)
        with torch.autograd.graph.saved_tensors_hooks(kept, lambda t: t):
            graph, _ = products.run(x)
        shape, why = graph.outputs.shape[1:], ""
        for forward_mode in (False, True):
            facts = PassFacts(shape, max(kept.largest // rows, 1), max(kept.total // rows, 1), forward_mode)
            products = cls(network, params, names, facts)
            why = why or products._disproof(x)
            if not why:
                return products
            why = "" if not forward_mode else why
        raise ValueError(
            "an operation of the network has neither second derivatives nor forward-mode ones, and products with its "
            "Jacobian need either: leave the parameters in front of it out of the linear model with parameters=, or "
            f"replace it ({why})"
        )

    def _disproof(self, x: Inputs) -> str:
        """Why pushes are not the transpose of pulls, or nothing; torch's silence about an operation is no proof."""
        graph, outputs = self.run(x)
        rng = torch.Generator().manual_seed(0)
        z = torch.randn(2, sum(self.sizes), generator=rng, dtype=torch.float64).to(outputs)
        v = torch.randn(2, *outputs.shape, generator=rng, dtype=torch.float64).to(outputs)
        try:
            pushed, pulled = self.push(graph, z), self.pull(graph, v)
        except torch.OutOfMemoryError:
            raise
        except _TORCH_CANNOT as error:
            return str(error).strip().partition("\n")[0]
        there, back = pushed.flatten(1) @ v.flatten(1).T, z @ pulled.T
        size = pushed.flatten(1).norm() * v.flatten(1).norm()
        close = float((there - back).norm()) <= rounding(self.network) * float(size)
        return "" if close else "its second derivatives are silently left out"

    def run(self, x: Inputs) -> tuple["Graph", Tensor]:
        """The forward pass with its graph; outputs are flattened, [B, m]."""
        weights = {name: self.params[name].detach().requires_grad_() for name in self.names}
        with torch.enable_grad():
            outputs = self._outputs(weights, x)
        if not outputs.requires_grad:
            raise ValueError("the outputs do not depend on the parameters of the linear model: choose others")
        return Graph(self, x, outputs, list(weights.values())), at_least_single(outputs.detach().flatten(1))

    def _outputs(self, weights: Params, x: Inputs) -> Tensor:
        device = self.network.device.type
        precision = torch.autocast(device, torch.float16) if self.float16 else contextlib.nullcontext()
        with plain_operations(self.network.module, self.network.device, convolutions=False), precision:
            return self.network(self.params | weights, x)

    def push(self, graph: "Graph", z: Tensor) -> Tensor:
        """J z, [K, d] -> [K, B, m]."""
        parts = [
            part.reshape(-1, *shape).to(weight.dtype)
            for part, shape, weight in zip(z.split(self.sizes, 1), self.shapes, graph.weights, strict=True)
        ]
        if self.facts.forward_mode:
            pushed = torch.stack([self._pushed_forward(graph, [part[k] for part in parts]) for k in range(len(z))])
        else:
            v, slopes, used = graph.backward
            (found,) = graph.gradients(slopes, [v], [parts[i] for i in used])
            pushed = torch.zeros(len(z), *v.shape, dtype=v.dtype, device=v.device) if found is None else found
        return at_least_single(pushed.detach().flatten(2))

    def _pushed_forward(self, graph: "Graph", z: list[Tensor]) -> Tensor:
        at = {name: weight.detach() for name, weight in zip(self.names, graph.weights, strict=True)}
        return slope_along(lambda weights: self._outputs(weights, graph.x), at, dict(zip(self.names, z, strict=True)))

    def pull(self, graph: "Graph", v: Tensor) -> Tensor:
        """J^T v, [K, B, m] -> [K, d]."""
        cotangents = v.unflatten(2, graph.outputs.shape[1:]).to(graph.outputs.dtype)
        pulled = graph.gradients([graph.outputs], graph.weights, [cotangents])
        total = v.new_zeros(len(v), sum(self.sizes))
        for g, part in zip(pulled, total.split(self.sizes, 1), strict=True):
            if g is not None:
                part.copy_(g.detach().flatten(1))
        return total


class Graph:
    """A forward pass, and the backward pass as a function of its cotangent, made when the first push asks for it."""

    def __init__(self, products: AutogradProducts, x: Inputs, outputs: Tensor, weights: list[Tensor]) -> None:
        self.products, self.x, self.outputs, self.weights = products, x, outputs, weights
        self._together = True  # whether torch can batch the passes

    @cached_property
    def backward(self) -> tuple[Tensor, list[Tensor], list[int]]:
        """A cotangent v, J^T v as a function of it for the weights that act, and which these are."""
        with torch.enable_grad():
            v = torch.zeros_like(self.outputs).requires_grad_()
            every = torch.autograd.grad(self.outputs, self.weights, v, create_graph=True, allow_unused=True)
        used = [i for i, slope in enumerate(every) if slope is not None and slope.requires_grad]
        return v, [every[i] for i in used], used

    def gradients(self, of: list[Tensor], by: list[Tensor], cotangents: list[Tensor]) -> Sequence[Tensor | None]:
        """Gradients for K cotangents of each tensor, [K, ...]; None for what nothing depends on."""
        if not of:
            return [None] * len(by)
        k = len(cotangents[0])
        if self._together and k > 1:
            try:
                with _FILTERS, warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # an operation that torch batches by a loop is slow, not wrong
                    return torch.autograd.grad(
                        of, by, cotangents, retain_graph=True, allow_unused=True, is_grads_batched=True
                    )
            except torch.OutOfMemoryError:
                raise
            except _TORCH_CANNOT:
                self._together = False
        each = [
            torch.autograd.grad(of, by, [g[i] for g in cotangents], retain_graph=True, allow_unused=True)
            for i in range(k)
        ]
        return [None if gs[0] is None else torch.stack(gs) for gs in zip(*each, strict=True)]


def rounding(network: Network) -> float:
    """How far two ways to the same derivatives may be apart, by the coarsest type that they go through."""
    types = {p.dtype for p in network.module.parameters() if p.is_floating_point()}
    if types & {torch.bfloat16, torch.float16}:
        return 0.1
    return 1e-5 if types == {torch.float64} else 0.01  # not finer: modules may compute in single precision inside


class _Kept:
    """Counts the numbers that a graph keeps, but for those of parameters."""

    def __init__(self, parameters: set[int]) -> None:
        self.total, self.largest, self._seen = 0, 0, set(parameters)

    def __call__(self, t: Tensor) -> Tensor:
        place = t.data_ptr() if t.layout == torch.strided else id(t)
        if place not in self._seen:
            self._seen.add(place)
            self.total, self.largest = self.total + t.numel(), max(self.largest, t.numel())
        return t
