"""Members that are points: weights, with the buffers and the noise that belong to them, as draws; many in a stack."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from caveat.engine.fresh_weights import FreshWeights
from caveat.engine.predictors import pick
from caveat.engine.run import Run
from caveat.engine.state_checks import check_hyper, check_names, check_point
from caveat.engine.training import Training, train_points
from caveat.network import Network, Params, layer_of, unwrapped
from caveat.storage import State
from caveat.task import Task

__all__ = ["check_points", "draws_of_points", "fresh_points", "points_of_modules", "start_of"]

_LEARNED = "hyper/"


def fresh_points(task: Task, runs: dict[int, Run], training: Training) -> tuple[dict[int, Params], list[str]]:
    """A point for each run, trained in it from weights that it draws, and notes on where those come from.

    A point that is finished is kept in its run's folder, and is not trained again.
    """
    if not runs:
        return {}, []
    device = next(iter(runs.values())).device
    network = task.network.to(device)
    points, fresh_weights = dict[int, Params](), FreshWeights(network)
    for m, run in runs.items():
        if (finished := run.appended("member")) is not None:
            points[m] = finished[0]["member"]
    missing = [m for m in runs if m not in points]
    starts: list[State] = [{"params": fresh_weights(runs[m].rng), "hyper": task.hyper} for m in missing]
    trained = train_points(task, network, starts, training, [runs[m] for m in missing])
    for m, point in zip(missing, trained, strict=True):
        points[m] = point.draw()
        runs[m].append("member", {"member": points[m]})
    placed = {m: {name: value.to(device) for name, value in points[m].items()} for m in runs}
    return placed, fresh_weights.notes()


def points_of_modules(modules: Sequence[nn.Module], task: Task, device: torch.device) -> list[Params]:
    """The weights and buffers of modules as points, with the noise that fits each; another network is refused."""
    network, points = task.network.to(device), list[Params]()
    fixed = {name: value for name, value in network.fixed().items() if name not in network.buffers()}
    for number, module in enumerate(map(unwrapped, modules), 1):
        everything = dict(module.named_parameters()) | dict(module.named_buffers())
        wanted = network.params() | network.fixed()
        other = [n for n, t in wanted.items() if n not in everything or everything[n].shape != t.shape]
        if other or len(everything) != len(wanted):
            named = other[0] if other else next(name for name in everything if name not in wanted)
            raise ValueError(f"network {number} of the ensemble is not one of the task's: they differ in {named!r}")
        differing = [n for n, t in fixed.items() if not torch.equal(t, everything[n].detach().to(t))]
        if differing:
            raise ValueError(
                f"network {number} of the ensemble has other values of {differing[0]!r} than the task's network, where "
                "inference is not about it: select it with parameters=, or unfreeze it"
            )
        points.append({n: everything[n].detach().to(device, t.dtype, copy=True) for n, t in network.params().items()})
    for name in _differing_buffers(modules, network):
        for point, module in zip(points, map(unwrapped, modules), strict=True):
            point[name] = dict(module.named_buffers())[name].detach().to(device, copy=True)
    return [point | _learned(task, network, point) for point in points]


def _differing_buffers(modules: Sequence[nn.Module], network: Network) -> list[str]:
    """The buffers of all layers of which some module has another buffer than the task's network."""
    own, layers = network.buffers(), set[str]()
    for module in map(unwrapped, modules):
        buffers = dict(module.named_buffers())
        layers |= {layer_of(name) for name, value in own.items() if not torch.equal(value, buffers[name].to(value))}
    return [name for name in own if layer_of(name) in layers]


def _learned(task: Task, network: Network, point: Params) -> Params:
    """The noise that fits a point, where the likelihood learns one, by the name that a draw has it under."""
    hyper = task.fitted_hyper(network, point, task.validation)
    return {f"{_LEARNED}{name}": value for name, value in hyper.items() if name == "log_noise"}


def start_of(point: Params, task: Task) -> State:
    """What a method starts from at a point: the groups "params" and "hyper"."""
    params = {name: value for name, value in point.items() if not name.startswith(_LEARNED)}
    learned: dict[str, Tensor] = {n.removeprefix(_LEARNED): v for n, v in point.items() if n.startswith(_LEARNED)}
    return {"params": params, "hyper": task.hyper | learned}


def check_points(state: State, network: Network, members: int) -> None:
    """Refuse a state that is not as many stacked points of the network as there are members."""
    check_names("state", state, ["params", "hyper"])
    check_hyper(state["hyper"], network)
    noise = {name: value for name, value in state["hyper"].items() if name == "log_noise"}
    check_point("params", state["params"], network, (members,), noise)


def draws_of_points(state: State, members: int, n: int, rng: torch.Generator) -> Iterator[Params]:
    """N of the stacked points: each equally often, the remainder at random."""
    for m in pick(members, n, rng):
        yield {name: stack[m] for name, stack in state["params"].items()}
