"""The way to products with the Jacobian: a traced program where it is proven to be the network, else autograd.

A program is quick once it is there, most of all for convolutions. It is taken where tracing meets nothing that depends
on numbers, ends in time, and gives what autograd gives on the very rows that it was traced with: outputs, J z and
J^T v. Each shape of inputs needs a program of its own, so there are only a few; further shapes go by autograd, as do
batches too small to be worth tracing.
"""

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from caveat.batches import Inputs, slices
from caveat.engine.tangents.autograd_products import AutogradProducts, PassFacts, rounding
from caveat.engine.tangents.program import Program
from caveat.engine.tangents.tracing import NotTraceableError
from caveat.engine.torch_settings import full_precision
from caveat.network import Params

__all__ = ["Products", "Programs", "structure"]

PROGRAMS = 8  # shapes of inputs that a network is traced for
TRACING_SECONDS = 60.0  # for one of them
COMPARED = 8  # rows
Versions = list[tuple[Tensor, int]]


class Products(Protocol):
    """Products with the Jacobian of some rows, after a forward pass over them."""

    def run(self, x: Inputs) -> tuple[Any, Tensor]:
        """What the products need of a forward pass, and the outputs [B, m]."""

    def push(self, saved: Any, z: Tensor) -> Tensor:
        """J z, [K, d] -> [K, B, m]."""

    def pull(self, saved: Any, v: Tensor) -> Tensor:
        """J^T v, [K, B, m] -> [K, d]."""


class Programs:
    """The programs of a network at certain weights, by the shape of the inputs, and what passes over it have shown."""

    def __init__(self) -> None:
        self._programs: dict[Any, Program] = {}
        self._facts: dict[Any, PassFacts] = {}
        self._at: Versions = []
        self._lock = threading.RLock()  # threads that ask for the same program wait for it: tracing takes longer
        self.why_not = ""  # why there are products without a program, in words
        self.seconds = 0.0  # that tracing took
        self.full = False  # whether inputs of further shapes have come

    def facts(self, params: Params, key: Any, look: Callable[[], PassFacts]) -> PassFacts:
        """What is known of a network's passes over rows of a structure; looked for once."""
        with self._lock:
            self._forget_other_weights(params)
            if key not in self._facts:
                self._facts[key] = look()
            return self._facts[key]

    def products(self, general: AutogradProducts, params: Params, x: Inputs) -> Products:
        """The program for inputs of this structure and these shapes, or the general products."""
        key = (general.names, general.float16, structure(x))
        with self._lock:
            self._forget_other_weights(params)
            if key not in self._programs and not self.why_not:
                if len(self._programs) == PROGRAMS:
                    self.full = True
                    return general
                begin = time.monotonic()
                try:
                    self._programs[key] = self._traced(general, params, x)
                except NotTraceableError as error:
                    self.why_not = str(error)
                self.seconds += time.monotonic() - begin
            return self._programs.get(key, general)

    def _forget_other_weights(self, params: Params) -> None:
        """Programs hold what becomes of the weights before they meet an input, so that they serve these alone."""
        same = len(params) == len(self._at) and all(
            value is other and value._version == version
            for value, (other, version) in zip(params.values(), self._at, strict=True)
        )
        if not same:
            self._programs, self._facts, self._at = {}, {}, [(value, value._version) for value in params.values()]

    def _traced(self, general: AutogradProducts, params: Params, x: Inputs) -> Program:
        until = time.monotonic() + TRACING_SECONDS
        network, names = general.network, general.names
        program = Program(network, params, names, x, False, until)
        with full_precision(network.device):
            _compare(program, AutogradProducts(network, params, names, general.facts), x)
        return Program(network, params, names, x, True, until) if general.float16 else program


def structure(x: Inputs) -> Any:
    """What a program depends on: names and order of the inputs, shapes and types of tensors, values of all others."""
    if isinstance(x, Tensor):
        return (tuple(x.shape), x.dtype)
    if isinstance(x, dict):
        return tuple((key, structure(value)) for key, value in x.items())
    if isinstance(x, list | tuple):
        return tuple(map(structure, x))
    return (type(x).__name__, repr(x))


def _compare(program: Program, general: AutogradProducts, x: Inputs) -> None:
    """Stop unless a program's outputs, and its products with a vector each way, are autograd's for the first rows."""
    few = next(slices(x, COMPARED))
    rng = torch.Generator().manual_seed(0)
    (saved, outputs), (graph, expected) = program.run(x), general.run(few)
    n = len(expected)
    z = torch.randn(1, sum(program.sizes), generator=rng, dtype=torch.float64).to(expected)
    v = torch.randn(1, *expected.shape, generator=rng, dtype=torch.float64).to(expected)
    beside = v.new_zeros(1, len(outputs) - n, v.shape[2])  # rows that the others should know nothing of
    tolerance = rounding(general.network)
    pairs = {
        "outputs": (outputs[:n], expected),
        "products J z": (program.push(saved, z)[:, :n], general.push(graph, z)),
        "products J^T v": (program.pull(saved, torch.cat([v, beside], 1)), general.pull(graph, v)),
    }
    for what, (ours, theirs) in pairs.items():
        if not float((ours - theirs).norm()) <= tolerance * float(theirs.norm()):
            raise NotTraceableError(f"the {what} of its traced operations are not those of autograd")
