"""The channel spaces of any module that torch.fx can trace: which channels can only be removed together.

A linear or convolutional layer makes a space of its outputs and reads one with its inputs. Any other step f passes
channels on if it acts on each of them alone,

    f(x[kept channels]) = f(x)[kept channels],

which is tried out on random numbers, in float64, instead of being looked up in a list: it holds for activations,
normalisation over rows and pixels, pooling, flattening, transposing, sums and products of two maps (whose spaces become
one) and for modules that nobody has heard of. Where it fails (a softmax or layer norm over channels, a fixed size in a
view), the spaces that go in stay whole, and so do the network's inputs and outputs.
"""

import copy
import operator
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from caveat.batches import Inputs, map_tensors
from caveat.copies import called_with
from caveat.engine.channels.narrowing import SIZES, Axis, Channels, Extent, Segment, narrow, widen_params
from caveat.engine.channels.trial import axis_length, close, cut, module_tensors, trial

__all__ = ["OUTPUTS", "find_channels"]

OUTPUTS = "they reach the network's outputs"  # why a last layer's channels stay
_OTHERWISE = 'use structure="unstructured"'
_CONCATENATIONS = (torch.cat, torch.concat, torch.concatenate)


def find_channels(module: nn.Module, x: Inputs) -> Channels:
    """The channels of a module that can be removed; `x` is a batch of its inputs, two rows of which are looked at."""
    private: nn.Module = copy.deepcopy(module).cpu().double().eval()
    few = map_tensors(lambda t: (t[:2] if t.ndim else t).cpu().to(torch.float64 if t.is_floating_point() else None), x)
    try:
        graph = _Tracer().trace(private)
    except Exception as error:
        raise ValueError(
            f"torch.fx cannot trace {type(module).__name__} ({_first_line(error)}): {_OTHERWISE}"
        ) from error
    search, given = _Search(private, graph), _placed(graph, few)
    with torch.no_grad():
        try:
            search.run(*given)
        except Exception as error:
            raise ValueError(
                f"{type(module).__name__}, as traced by torch.fx, fails on these inputs ({_first_line(error)}): "
                f"{_OTHERWISE}"
            ) from error
        channels = search.result()
        if not channels.widths:
            reasons = "; ".join(f"{name}: {why}" for name, why in channels.whole.items()) or "no hidden layer"
            raise ValueError(f"{type(module).__name__} has no channels to remove ({reasons}): {_OTHERWISE}")
        _try(private, channels, given)
    return channels


@dataclass(frozen=True)
class _Value:
    """Where the channels of a tensor are."""

    dimension: int
    axis: Axis

    @property
    def pattern(self) -> list[tuple[int, int]]:
        return [(segment.width, segment.block) for segment in self.axis]


class _Tracer(fx.Tracer):
    """Modules with parameters of their own and no parts are steps, as torch's modules are."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        tensors = [*m.parameters(recurse=False), *m.buffers(recurse=False)]
        return super().is_leaf_module(m, module_qualified_name) or bool(tensors and next(m.children(), None) is None)


class _Search(fx.Interpreter):
    """Runs the traced module and follows channels through it."""

    def __init__(self, module: nn.Module, graph: fx.Graph) -> None:
        super().__init__(fx.GraphModule(module, graph))
        times = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
        self.shared = {key for key, n in times.items() if n > 1}
        self.values: dict[fx.Node, _Value] = {}  # of the tensors that have channels
        self.shapes: dict[fx.Node, torch.Size] = {}
        self.makers: list[str] = []  # of each space, the layer whose outputs it is
        self.parent: list[int] = []  # a space's, among those that it is one with; its own at the root
        self.why: dict[int, str] = {}  # spaces that stay whole
        self.fixed: dict[str, str] = {}  # layers whose outputs never were a space
        self.axes: dict[str, tuple[Axis, ...]] = {}  # of parameters and buffers, up to the last that has channels
        self.weights: list[str] = []
        self.norms: dict[str, Axis] = {}
        self.rng = torch.Generator().manual_seed(0)

    def run_node(self, n: fx.Node) -> Any:
        """Run a step, and find where the channels of its result are."""
        result = super().run_node(n)
        if isinstance(result, Tensor):
            self.shapes[n] = result.shape
        inputs = [node for node in n.all_input_nodes if node in self.values]
        value = None
        if n.op == "call_module" and self._is_layer(self.fetch_attr(str(n.target))):
            value = self._layer(n, self.fetch_attr(str(n.target)), result)
        elif inputs and n.op == "output":
            self._stay_whole(inputs, OUTPUTS)
        elif inputs:
            value = self._concatenation(n, inputs) or self._step(n, inputs, result)
        if value is not None:
            self.values[n] = value
        return result

    def _is_layer(self, module: nn.Module) -> bool:
        """Whether it is a linear or convolutional layer with weights of its own that nothing else makes or changes."""
        if type(module) not in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d) or "weight" not in module._parameters:
            return False
        hooked = module._forward_hooks or module._forward_pre_hooks
        return not hooked and not any(id(p) in self.shared for p in module.parameters())

    def _layer(self, node: fx.Node, layer: Any, result: Tensor) -> _Value | None:
        """A layer reads one space and makes another, unless it is depthwise."""
        name, source = str(node.target), node.all_input_nodes[0]
        linear, given = isinstance(layer, nn.Linear), self.values.get(source)
        dimension = result.ndim - 1 if linear else result.ndim - layer.weight.ndim + 1
        if given is not None and given.dimension != dimension:
            given = self._stay_whole([source], f"{name} reads them along another axis")
        groups, reads = 1 if linear else layer.groups, () if given is None else given.axis
        if groups > 1 and (groups < layer.in_channels or given is None):
            self.fixed[name] = f"it reads inputs that stay whole in {groups} groups"
            return self._stay_whole([source], f"{name} reads them in {groups} groups")
        if groups > 1:
            times = layer.out_channels // groups
            outputs, reads = tuple(replace(segment, block=segment.block * times) for segment in reads), ()
        else:
            known = self.axes.get(f"{name}.weight")  # where this is not its first call
            outputs = known[0] if known else (self._space(layer.weight.shape[0], name),)
        self._record(f"{name}.weight", (outputs, reads))
        if layer.bias is not None:
            self._record(f"{name}.bias", (outputs,))
        if f"{name}.weight" not in self.weights:
            self.weights.append(f"{name}.weight")
        return _Value(dimension, outputs)

    def _concatenation(self, node: fx.Node, inputs: list[fx.Node]) -> _Value | None:
        """Of channels; None for any other step."""
        if node.target not in _CONCATENATIONS:
            return None
        dimension: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        dimension %= len(self.shapes[node])
        if any(self.values[part].dimension != dimension for part in inputs):
            return None
        parts: Any = node.args[0] if node.args else node.kwargs["tensors"]
        known = [self.values[part].axis if part in self.values else () for part in parts]
        sizes = [self.shapes[part][dimension] for part in parts]
        return _Value(dimension, sum((a or (Segment(None, n),) for a, n in zip(known, sizes, strict=True)), ()))

    def _step(self, node: fx.Node, inputs: list[fx.Node], result: Any) -> _Value | None:
        """Any other step."""
        module = self.fetch_attr(str(node.target)) if node.op == "call_module" else None
        what = node.target if isinstance(node.target, str) else node.name
        if module is not None:
            what = f"{what} ({type(module).__name__})"
        first, values = self.values[inputs[0]], [self.values[n] for n in inputs]
        if isinstance(result, torch.Size):
            sizes = {u.args[1] if u.target is operator.getitem else None for u in node.users if u.users}
            fixed = all(isinstance(i, int) and i % len(result) != first.dimension for i in sizes)
            return None if fixed else self._stay_whole(inputs, f"{what} reads their number")
        tensors, size = {} if module is None else module_tensors(module), axis_length(first.axis)
        if any(v.pattern != first.pattern for v in values):
            return self._stay_whole(inputs, f"{what} joins channels of several kinds")
        if any(id(p) in self.shared for p in tensors.values()):
            return self._stay_whole(inputs, f"{what} has parameters that it shares")
        if any(p.numel() != 1 and not p.numel() == max(p.shape) == size for p in tensors.values()):
            return self._stay_whole(inputs, f"{what} has parameters that are not one number a channel")

        def compute(given: list[Tensor], kept: Tensor | None) -> Any:
            known = dict(zip(inputs, given, strict=True))
            values = {n: known.get(n, self.env[n]) for n in node.all_input_nodes}
            copies = {n: v.clone() if isinstance(v, Tensor) else v for n, v in values.items()}  # it may write into them
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
            if module is None:
                return getattr(self, node.op)(node.target, args, kwargs)
            return (module if kept is None else cut(module, size, kept))(*args, **kwargs)

        for tensor in tensors.values():  # so that no zero among them hides what it multiplies
            if isinstance(tensor, nn.Parameter):
                tensor.uniform_(0.5, 1.5, generator=self.rng)
        outcome = trial(compute, [(self.shapes[n], self.values[n].dimension) for n in inputs], first.axis, self.rng)
        if isinstance(outcome, str):
            return self._stay_whole(inputs, f"{what} {outcome}")
        for value in values[1:]:
            self._unite(first.axis, value.axis, f"{what} joins them with channels that stay whole")
        if module is not None and (tensors or any(getattr(module, name, None) == size for name in SIZES)):
            self._norm(str(node.target), tensors, first.axis)
        if outcome is None:
            return None
        dimension, times = outcome
        return _Value(dimension, tuple(replace(segment, block=segment.block * times) for segment in first.axis))

    def _norm(self, name: str, tensors: dict[str, Tensor], axis: Axis) -> None:
        """Remember a module with one number a channel in each of its tensors."""
        self._unite(self.norms.setdefault(name, axis), axis, f"{name} serves several kinds of inputs")
        for part, tensor in tensors.items():
            if tensor.numel() > 1:
                self._record(f"{name}.{part}", ((),) * tensor.shape.index(axis_length(axis)) + (axis,))

    def _space(self, width: int, name: str) -> Segment:
        self.parent.append(len(self.parent))
        self.makers.append(name)
        if width == 1:
            self.why[len(self.parent) - 1] = "there is only one"
        return Segment(len(self.parent) - 1, width)

    def _root(self, space: int) -> int:
        while self.parent[space] != space:
            space = self.parent[space]
        return space

    def _unite(self, one: Axis, other: Axis, why: str) -> None:
        """Make the spaces of two axes one; where that cannot be, both stay whole."""
        if [(s.width, s.block) for s in one] != [(s.width, s.block) for s in other]:
            self._fix(one + other, why)
        else:
            for a, b in zip(one, other, strict=True):
                if a.space is None or b.space is None:
                    self._fix((a, b), why)
                else:
                    self.parent[self._root(a.space)] = self._root(b.space)

    def _record(self, name: str, axes: tuple[Axis, ...]) -> None:
        known = self.axes.setdefault(name, axes)
        for one, other in zip(known, axes, strict=True):
            self._unite(one, other, f"{name} serves several kinds of inputs")

    def _fix(self, axis: Axis, why: str) -> None:
        for segment in axis:
            if segment.space is not None:
                self.why.setdefault(segment.space, why)

    def _stay_whole(self, inputs: list[fx.Node], why: str) -> _Value | None:
        for node in inputs:
            if node in self.values:
                self._fix(self.values[node].axis, why)
        return None

    def result(self) -> Channels:
        """The channels of the module, with spaces numbered in the order of the layers that make them."""
        whole = {self._root(space): why for space, why in self.why.items()}
        roots = [self._root(space) for space in range(len(self.parent))]
        numbers = {root: i for i, root in enumerate(dict.fromkeys(r for r in roots if r not in whole))}

        def resolved(axis: Axis) -> Axis:
            segments = [s if s.space is None else replace(s, space=numbers.get(self._root(s.space))) for s in axis]
            return () if all(s.space is None for s in segments) else tuple(segments)

        extents: dict[str, Extent] = {}
        widths: dict[int, int] = {}
        for name, given in self.axes.items():
            shape = self.fetch_attr(name).shape
            axes = tuple(resolved(axis) for axis in given) + ((),) * (len(shape) - len(given))
            widths |= {s.space: s.width for axis in axes for s in axis if s.space is not None}
            if any(axes):
                extents[name] = Extent(tuple(shape), axes, absent=float(name.endswith("running_var")))
        return Channels(
            widths=tuple(widths[space] for space in range(len(numbers))),
            extents=extents,
            weights=tuple(name for name in self.weights if name in extents),
            norms={name: resolved(axis) for name, axis in self.norms.items() if resolved(axis)},
            whole={name: whole[r] for name, r in zip(self.makers, roots, strict=True) if r in whole} | self.fixed,
        )


def _try(module: nn.Module, channels: Channels, given: list[Any]) -> None:
    """With half of its channels, the narrow network must compute what the wide one does without the others."""
    kept = {space: torch.arange(width)[::2] for space, width in enumerate(channels.widths)}
    thin = narrow(module, channels, kept)
    values = widen_params(dict(thin.named_parameters()) | dict(thin.named_buffers()), channels, kept)
    try:
        same = close(called_with(module, values, tuple(given)), thin(*given))
        problem = "" if same else "does not compute what the whole one does without the other channels"
    except Exception as error:
        problem = f"does not run ({_first_line(error)})"
    if problem:
        raise ValueError(f"{type(module).__name__} with half of its channels {problem}: {_OTHERWISE}")


def _placed(graph: fx.Graph, x: Inputs) -> list[Any]:
    """The inputs in the order of the module's arguments."""
    given = list(x) if isinstance(x, tuple) else [] if isinstance(x, dict) else [x]
    named = x if isinstance(x, dict) else {}
    places = [node for node in graph.nodes if node.op == "placeholder"][len(given) :]
    return given + [named.get(str(node.target), *node.args) for node in places]


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
