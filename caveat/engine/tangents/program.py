"""A network as a list of steps, each with its own linear part, so that tangents and cotangents go through K at once.

    program = Program(network, params, names, x)         the steps, found by tracing one batch of this shape
    saved, outputs = program.run(x)                      one forward pass; what the linear parts need stays in `saved`
    program.push(saved, z)     J z     [K, d] -> [K, B, m]      steps in order, tangents [K, ...]
    program.pull(saved, v)     J^T v   [K, B, m] -> [K, d]      steps in reverse order, cotangents [K, ...]

Autograd would carry K copies through operations made for one, and run the network again for each direction.
"""

import contextlib
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from caveat.batches import Inputs, tensors
from caveat.engine.tangents import lazy_sums
from caveat.engine.tangents.call_site import Rule, Site, at_least_single, floating, is_floating
from caveat.engine.tangents.image_layouts import by_channels
from caveat.engine.tangents.lazy_sums import Terms
from caveat.engine.tangents.operation_rules import rule_for
from caveat.engine.tangents.tracing import NotTraceableError, check_time, traced
from caveat.network import Network, Params

__all__ = ["Program", "Saved"]

Wire = tuple[fx.Node, int]  # one of the floating-point outputs of a node
Saved = list[tuple[Tensor, ...]]  # what each step's linear part needs
aten = torch.ops.aten
_LYING = (aten.as_strided.default, aten.as_strided_copy.default)
_VIEWS = (aten.view.default, aten._unsafe_view.default)  # of numbers as they lay when the network was traced


@dataclass(frozen=True)
class _Call:
    """A node of the graph."""

    node: fx.Node
    site: Site
    sources: tuple[fx.Node, ...]  # where its values come from
    done: tuple[fx.Node, ...] = ()  # values that no later call takes


@dataclass(frozen=True)
class _Step:
    """The linear part of a call that depends on the chosen parameters."""

    call: _Call
    rule: Rule
    inputs: tuple[Wire, ...]
    outputs: tuple[Wire, ...]
    dtypes: tuple[torch.dtype, ...]  # of the inputs
    done: tuple[Wire, ...] = ()  # tangents that no later step takes


class Program:
    """The steps of a network for inputs of one shape.

    Args:
        network: the network, in evaluation mode.
        params: where it is linearised.
        names: the parameters of the linear part.
        x: inputs of that shape.
        float16: convolutions and matrix products, and what lies between them, in float16.
        until: when, by `time.monotonic`, to give up.
    """

    def __init__(
        self,
        network: Network,
        params: Params,
        names: Sequence[str],
        x: Inputs,
        float16: bool = False,
        until: float = math.inf,
    ) -> None:
        given = {name: value for name, value in params.items() if not name.startswith("hyper/")}
        self.shapes = [params[name].shape for name in names]
        self.sizes = [shape.numel() for shape in self.shapes]
        graph = traced(network, given, x, float16, until)
        nodes = list(graph.graph.nodes)
        places = [node for node in nodes if node.op == "placeholder"]
        self.inputs = places[len(given) :]
        # Convolutions of a GPU want channels last, unless the network looks at how its numbers lie.
        self.by_channels = network.device.type in lazy_sums.FUSING and not any(n.target in _LYING for n in nodes)
        placeholders = dict(zip(given, places, strict=False))
        self.leaves: list[Wire] = [(placeholders[name], 0) for name in names]
        # Values that no input is part of are made once: the weights, and what becomes of them before they meet one.
        self.fixed: dict[fx.Node, Any] = {placeholders[name]: value for name, value in given.items()}
        self.fixed |= {node: getattr(graph, node.target) for node in nodes if node.op == "get_attr"}
        (self.result,) = pytree.tree_leaves(nodes[-1].args[0])
        self.calls = _calls(nodes, self.result)
        self.wires: dict[fx.Node, tuple[Wire | None, ...]] = {wire[0]: (wire,) for wire in self.leaves}
        self.largest = self.activations = 1  # numbers in the largest tangent of a vector, and in all; weights' apart
        self.steps = self._steps(x, until)

    def run(self, x: Inputs) -> tuple[Saved, Tensor]:
        """The forward pass; outputs are flattened, [B, m]."""
        values = dict(zip(self.inputs, map(self._laid_out, tensors(x)), strict=True))
        rules, saved = {step.call.node: step.rule for step in self.steps}, dict(self.kept)
        for call in self.calls:
            given = [self.fixed[source] if source in self.fixed else values[source] for source in call.sources]
            values[call.node] = result = call.site(given)
            if call.node in rules:
                with _explained(call):
                    saved[call.node] = rules[call.node].save(given, result)
            for node in call.done:
                values.pop(node, None)
        return [saved[step.call.node] for step in self.steps], at_least_single(values[self.result].flatten(1))

    def _laid_out(self, value: Any) -> Any:
        return by_channels(value) if self.by_channels and is_floating(value) and value.ndim == 4 else value

    def push(self, saved: Saved, z: Tensor) -> Tensor:
        """J z, [K, d] -> [K, B, m]."""
        parts = zip(self.leaves, z.split(self.sizes, 1), self.shapes, strict=True)
        tangents = {wire: Terms(part.view(-1, *shape)) for wire, part, shape in parts}
        for step, saved_by_step in zip(self.steps, saved, strict=True):
            given = [
                # What others take too is added once, not by each.
                tangents[wire] if wire in step.done else Terms(tangents[wire].whole)
                for wire in step.inputs
            ]
            with _explained(step.call):
                pushed = step.rule.push(saved_by_step, given)
            tangents.update(zip(step.outputs, pushed, strict=True))
            for wire in step.done:
                del tangents[wire]
        (last,) = self.wires[self.result]
        assert last is not None
        return at_least_single(tangents[last].whole.flatten(2))

    def pull(self, saved: Saved, v: Tensor) -> Tensor:
        """J^T v, [K, B, m] -> [K, d]."""
        (last,) = self.wires[self.result]
        assert last is not None
        waiting = {last: Terms(v.unflatten(2, self.output_shape).to(self.output_dtype))}
        for step, saved_by_step in zip(reversed(self.steps), reversed(saved), strict=True):
            cotangents = [waiting.pop(wire, None) for wire in step.outputs]
            if all(g is None for g in cotangents):
                continue
            with _explained(step.call):
                pulled = step.rule.pull(saved_by_step, cotangents)
            for wire, g, dtype in zip(step.inputs, pulled, step.dtypes, strict=True):
                cotangent = g.to(dtype)  # a float16 value beside float32 ones
                waiting[wire] = Terms(waiting[wire].whole, cotangent) if wire in waiting else Terms(cotangent)
        total = v.new_empty(len(v), sum(self.sizes))
        for wire, part, shape in zip(self.leaves, total.split(self.sizes, 1), self.shapes, strict=True):
            if wire in waiting:
                part.view(-1, *shape).copy_(waiting.pop(wire).whole)
            else:  # the network does not use it
                part.zero_()
        return total

    def _steps(self, x: Inputs, until: float) -> list[_Step]:
        """Which calls depend on the parameters, and their rules, from a pass over the inputs."""
        values, steps = self.fixed | dict(zip(self.inputs, map(self._laid_out, tensors(x)), strict=True)), []
        for call in self.calls:
            check_time(until)
            given = [values[source] for source in call.sources]
            values[call.node] = result = call.site(given)
            if all(source in self.fixed for source in call.sources):
                self.fixed[call.node] = result
            if call.site.target is operator.getitem:
                parts = self.wires.get(call.sources[0])
                self.wires[call.node] = (parts[call.site.leaves[1]] if parts else None,)
                continue
            inputs = [self.wires.get(source, (None,))[0] for source in call.sources]
            active = tuple(i for i, wire in enumerate(inputs) if wire is not None)
            new_wires = iter([(call.node, i) for i in range(len(floating(result)))])
            if not active or call.site.target is aten.detach.default:
                continue
            outputs = [next(new_wires) if is_floating(leaf) else None for leaf in pytree.tree_leaves(result)]
            self.wires[call.node] = tuple(outputs)
            if not any(outputs):  # a comparison, or the place of a maximum: steps without slopes
                _refuse_complex(call, result)
                continue
            rule = rule_for(replace(call.site, active=active), given, result)
            if call.node not in self.fixed:
                numbers = [t.numel() for t in floating(result)]
                self.largest, self.activations = max(self.largest, *numbers), self.activations + sum(numbers)
            steps.append(_Step(call, rule, _present(inputs), _present(outputs), tuple(given[i].dtype for i in active)))
        outputs = values[self.result]
        self.output_shape, self.output_dtype = outputs.shape[1:], outputs.dtype
        (wire,) = self.wires.get(self.result, (None,))
        if wire is None:
            raise ValueError("the outputs do not depend on the parameters of the linear model: choose others")
        steps = _with_last_uses(steps, wire)
        self.kept = {
            step.call.node: step.rule.save([values[source] for source in step.call.sources], values[step.call.node])
            for step in steps
            if step.call.node in self.fixed
        }
        self.calls = [call for call in self.calls if call.node not in self.fixed]
        needed = {source for call in self.calls for source in call.sources} | {self.result}
        self.fixed = {node: self._laid_out(value) for node, value in self.fixed.items() if node in needed}
        return steps


def _present(wires: Sequence[Wire | None]) -> tuple[Wire, ...]:
    return tuple(wire for wire in wires if wire is not None)


def _with_last_uses(steps: list[_Step], result: Wire) -> list[_Step]:
    """Steps that depend on nothing but the rest are dropped, and each knows which tangents it is the last to take."""
    needed, needed_steps = {result}, []
    for step in reversed(steps):
        if not needed.intersection(step.outputs):
            continue
        unused = set(step.outputs) - needed
        done = (set(step.inputs) - needed) | unused
        needed |= set(step.inputs)
        needed_steps.append(replace(step, done=tuple(done)))
    return needed_steps[::-1]


def _calls(nodes: list[fx.Node], result: fx.Node) -> list[_Call]:
    calls, needed = [], {result}
    for node in reversed(nodes):
        if node.op != "call_function":
            continue
        leaves, structure = pytree.tree_flatten((node.args, node.kwargs))
        slots = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, fx.Node))
        sources = tuple(leaves[i] for i in slots)
        fixed = tuple(None if isinstance(leaf, fx.Node) else leaf for leaf in leaves)
        done = set(sources) - needed
        if node not in needed:
            done.add(node)
        needed |= done
        target = aten.reshape.default if node.target in _VIEWS else node.target
        assert not isinstance(target, str)
        calls.append(_Call(node, Site(target, fixed, structure, slots, ()), sources, tuple(done)))
    return calls[::-1]


def _refuse_complex(call: _Call, result: Any) -> None:
    if any(isinstance(leaf, Tensor) and leaf.is_complex() for leaf in pytree.tree_leaves(result)):
        raise NotTraceableError(f"{call.site.target}, which {_layer(call)} uses, gives complex numbers")


def _layer(call: _Call) -> str:
    return next(iter(call.node.meta.get("nn_module_stack", ())), "") or "the network itself"


@contextlib.contextmanager
def _explained(call: _Call) -> Iterator[None]:
    """Errors of torch with the layer and the operation that they are about."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (NotImplementedError, RuntimeError) as error:
        raise NotTraceableError(
            f"torch cannot linearise {call.site.target}, which {_layer(call)} uses, forwards and backwards for several "
            f"vectors at once ({str(error).strip().partition(chr(10))[0]})"
        ) from error
