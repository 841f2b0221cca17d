"""A linearised network with fixed directions of its weights, as a module of ordinary operations.

    draws        f(x) + J(x) d_k                             one draw of the function for each of K directions
    closed       N(f(x), sum_k (J(x) d_k)^2)                 the mean and variance of Gaussian outputs

`torch.export` cannot take what `torch.func` makes of a network whose number of rows is not known. So the network is
exported first, into a graph of some fifty kinds of operations, and tangents [K, B, ...] are pushed along that graph by
a rule for each kind (`tangent_rules`); what comes out is a graph itself.
"""

import operator
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from caveat.batches import Inputs
from caveat.engine.flat_weights import flat_places
from caveat.engine.predictors import LinearDraws, LinearMixture
from caveat.engine.served.averaged_draws import Values, described, inputs_of, single
from caveat.engine.served.exported import CALLED, NotServed, exported
from caveat.engine.served.tangent_rules import WITHOUT_SLOPE, rule_for
from caveat.likelihoods import Hyper, Likelihood
from caveat.network import Params

__all__ = ["linear_mixture", "linear_module"]

DENSE_UP_TO = 2**22  # numbers of directions that are kept for whole parameters; more are spread out in each pass


def linear_module(form: LinearDraws, likelihood: Likelihood, example: Inputs) -> nn.Module:
    """The module of a linearised network; `example` is a few rows."""
    return _Predicted([_pushed(form, example)], form.hyper, likelihood, form.closed)


def linear_mixture(form: LinearMixture, likelihood: Likelihood, example: Inputs) -> nn.Module:
    """The module of several linearised networks, whose draws are averaged; `example` is a few rows."""
    return _Predicted([_pushed(member, example) for member in form.members], form.hyper, likelihood, closed=False)


def _pushed(form: LinearDraws, example: Inputs) -> nn.Module:
    """The traced graph from inputs to outputs [B, ...] and their tangents [K, B, ...]."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)  # of torch about itself
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        with sdpa_kernel(SDPBackend.MATH):
            point = exported(_AtThePoint(form).eval(), form.network, example).run_decompositions()
            return exported(_Linearised(form, point).eval(), form.network, example).module()


class _Predicted(nn.Module):
    """What linearised networks say together, called as the network's own module is."""

    def __init__(self, steps: list[nn.Module], hyper: Hyper, likelihood: Likelihood, closed: bool) -> None:
        super().__init__()
        self.steps, self.hyper = nn.ModuleList(steps), Values(hyper)
        self.likelihood, self.closed = likelihood, closed
        self.training = False

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """What the posterior says about inputs, [B, ...] each."""
        each, hyper = [steps(*args, **kwargs) for steps in self.steps], self.hyper.tensors()
        if self.closed:
            ((outputs, shifts),) = each
            return described(self.likelihood.closed_predictive(outputs, shifts.square().sum(0), hyper))
        draws = torch.cat([outputs + shifts for outputs, shifts in each])
        return described(self.likelihood.predictive(draws, hyper))


class _AtThePoint(nn.Module):
    """The network where it is linearised; all its tensors are buffers."""

    def __init__(self, form: LinearDraws) -> None:
        super().__init__()
        self.network = form.network.replica()
        self.values = Values(form.network.fixed() | form.network.params() | _without_hyper(form.params))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        outputs: Tensor = self.network(self.values.tensors(), inputs_of(args, kwargs))
        return outputs


class _Linearised(nn.Module):
    """The network's graph with tangents beside its values."""

    def __init__(self, form: LinearDraws, point: ExportedProgram) -> None:
        super().__init__()
        self.directions = _Directions(form)
        signature = point.graph_signature
        tensors = {**point.state_dict, **point.constants}
        named = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        named |= dict(signature.inputs_to_lifted_tensor_constants)
        self.given = Values({place: tensors[name] for place, name in named.items()})
        self.leaves = {place: _parameter(name) for place, name in signature.inputs_to_buffers.items()}
        self.steps = [point.graph]  # in a list: it is no part of the module's own state

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        inputs = iter(pytree.tree_leaves((args, kwargs)))
        given, directions = self.given.tensors(), self.directions()
        values: dict[fx.Node, Any] = {}
        tangents: dict[fx.Node, Any] = {}
        for node in self.steps[0].nodes:
            if node.op == "placeholder":
                values[node] = given[node.name] if node.name in given else next(inputs)
                if (name := self.leaves.get(node.name)) in directions:
                    tangents[node] = directions[name]
            elif node.op == "call_function":
                _step(node, values, tangents)
            elif node.op == "output":
                (last,) = node.args[0]
                return _in_single(values[last], tangents.get(last))
        raise AssertionError("a graph ends with its outputs")


class _Directions(nn.Module):
    """The directions, [K, ...] for each parameter; those of a few chosen weights are spread out in each pass."""

    def __init__(self, form: LinearDraws) -> None:
        super().__init__()
        parameters = dict(form.network.module.named_parameters())
        places = flat_places(form.network)
        self.shapes = {name: parameters[name].shape for name in places}
        index = form.index
        parts: Params = {}
        entries: Params = {}
        for name, place in places.items():
            if index is None:
                parts[name] = form.directions[:, place].reshape(-1, *self.shapes[name])
                continue
            chosen = (index >= place.start) & (index < place.stop)
            if bool(chosen.any()):
                parts[name], entries[name] = (
                    form.directions[:, chosen.to(form.directions.device)],
                    index[chosen] - place.start,
                )
        numbers = sum(len(form.directions) * self.shapes[name].numel() for name in entries)
        if entries and numbers <= DENSE_UP_TO:
            parts = {name: self._spread(part, entries[name], name) for name, part in parts.items()}
            entries = {}
        self.parts, self.entries = Values(parts), Values(entries)

    def _spread(self, part: Tensor, entries: Tensor, name: str) -> Tensor:
        whole = part.new_zeros(len(part), self.shapes[name].numel()).index_copy(1, entries.to(part.device), part)
        return whole.reshape(-1, *self.shapes[name])

    def forward(self) -> Params:
        entries = self.entries.tensors()
        return {
            name: self._spread(part, entries[name], name) if name in entries else part
            for name, part in self.parts.tensors().items()
        }


def _in_single(outputs: Tensor, shifts: Tensor | None) -> tuple[Tensor, Tensor]:
    if shifts is None:
        raise ValueError("the outputs do not depend on the weights that the posterior is over")
    return single(outputs), single(shifts)


def _step(node: fx.Node, values: dict[fx.Node, Any], tangents: dict[fx.Node, Any]) -> None:
    """A node's value, and its tangents where its arguments have some."""

    def value(n: fx.Node) -> Any:
        return values[n]

    args, kwargs = fx.node.map_arg(node.args, value), fx.node.map_arg(node.kwargs, value)
    values[node] = result = node.target(*args, **kwargs)  # type: ignore[operator]
    if not any(source in tangents for source in node.all_input_nodes):
        return
    if node.target is operator.getitem:
        tangent = tangents[node.args[0]][node.args[1]]  # type: ignore[index]
        if tangent is not None:
            tangents[node] = tangent
        return
    if node.target in WITHOUT_SLOPE or (isinstance(result, Tensor) and not result.is_floating_point()):
        return  # a comparison, or the place of a maximum
    given = fx.node.map_aggregate(node.args, lambda arg: tangents.get(arg) if isinstance(arg, fx.Node) else None)
    if any(source in tangents for source in node.kwargs.values()):
        raise _unknown(node)
    try:
        tangents[node] = rule_for(node.target)(node.target, args, kwargs, given, result)
    except KeyError:
        raise _unknown(node) from None


def _unknown(node: fx.Node) -> NotServed:
    stack = node.meta.get("nn_module_stack") or {}
    layer = next(reversed(stack.values()))[0].removeprefix(CALLED.strip(".")).strip(".") if stack else ""
    return NotServed(
        f"the linearised network has no module: there is no rule for {node.target}, which {layer or 'the network'} "
        "uses; serve the posterior with predict, or fit it over the layers after that one"
    )


def _parameter(name: str) -> str:
    """The parameter's own name, from that of its buffer."""
    return name.removeprefix(f"{CALLED}values.").replace("|", ".")


def _without_hyper(params: Mapping[str, Tensor]) -> Params:
    return {name: value for name, value in params.items() if not name.startswith("hyper/")}
