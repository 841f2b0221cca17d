"""From a task and a method to a posterior: the start, the checks before the work, the cost after it."""

import contextlib
import copy
import dataclasses
import importlib
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy
import torch

from caveat import likelihoods
from caveat.batches import Inputs, move
from caveat.engine.cost import peak_bytes, refuse_if_too_large, reset_peak
from caveat.engine.distributed import Ranks, current_ranks
from caveat.engine.forward_probe import differs_from, forward_probe
from caveat.engine.method import Method
from caveat.engine.run import Beside, Info, Run, RunFile, digest_of_finished
from caveat.engine.training import Training, check_against_marginals, warn_if_no_optimum, warn_of_noise
from caveat.files import FolderInUse, remove_folder, remove_unfinished, sole_use, staged_folder
from caveat.likelihoods import Hyper
from caveat.network import Network, Params, without_autocast
from caveat.posterior import Posterior, load
from caveat.predictive import Predictive
from caveat.storage import CorruptFile, State, digest_of, read_json, settings_digest, stored_bytes
from caveat.task import Task
from caveat.typed_json import read_as

__all__ = ["fit", "fit_beside", "remove_leftovers"]


def fit(
    task: Task,
    method: Method,
    *,
    start: Method | Posterior | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    folder: str | Path | None = None,
    note: dict[str, Any] | None = None,
    progress: bool = True,
) -> Posterior:
    """Fit a method to a task.

    Args:
        task: the network and its data.
        method: which posterior, with its knobs.
        start: None takes the module's own weights, as they were trained; a method (such as `MAP()`) is fitted first; a
            posterior that has a point (a MAP) gives that point.
        seed: of everything random in the fit.
        device: where to compute; the module's own device unless given.
        folder: where to keep the place (in `<folder>.partial`, so that the same call goes on after a kill) and, at the
            end, the posterior. An existing folder is never overwritten.
        note: json of your own, kept in the folder's `posterior.json`.
        progress: show progress of anything over a second on standard error.
    """
    return fit_beside(None, task, method, start, seed, device, folder, note, progress)


def fit_beside(
    beside: Beside | None,
    task: Task,
    method: Method,
    start: Method | Posterior | None,
    seed: int,
    device: torch.device | str | None,
    folder: str | Path | None,
    note: dict[str, Any] | None,
    progress: bool,
) -> Posterior:
    """The same as `fit`, where there are other fits whose training may go with this one's."""
    if not isinstance(task, Task):
        raise TypeError(
            f"fit takes a task first, not a {type(task).__name__}: caveat.fit(caveat.Task(model, data, "
            "caveat.Categorical()), caveat.MAP())"
        )
    _check_kinds(method, start)
    place = task.network.device if device is None else torch.device(device)
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={device!r}: torch sees no GPU here; use device='cpu'")
    target = None if folder is None else Path(folder)
    if target is not None and target.exists():
        remove_leftovers(target)
        _refuse(target)
    _check_likelihood(method, task)
    task.network.base.check()
    method.check(task, place)
    needed = method.memory(task.network)
    what = f"{type(method).__name__} on {task.network.n_parameters:,} weights"
    refuse_if_too_large(what, needed, place, "make it smaller, or select fewer weights with parameters=")
    if _trains(method) or _trains(start):
        # Torch would import this when the first optimiser is made, and its seconds would count as the first fit's.
        importlib.import_module("torch._dynamo")
    reset_peak(place)
    ranks = current_ranks(place)
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", torch.cuda.current_device())  # each rank's own, under torchrun
    with _held(target, ranks) as warnings:
        run = _run(task, method, start, seed, place, ranks, target, progress)
        run.warnings.extend(warnings)
        if beside is None:
            posterior = _fitted(task, method, start, run)
        else:
            run.beside = beside
            beside.enter(run)
            try:
                posterior = _fitted(task, method, start, run)
            finally:
                beside.leave()
        if target is not None and ranks.first:
            with staged_folder(target) as staged:
                run.finish(posterior.write(staged, note))
            run.discard()
        ranks.wait()
    return posterior


def _trains(part: object) -> bool:
    """Whether a method, a start or a part of them has knobs of training, and so makes an optimiser."""
    if isinstance(part, Training):
        return True
    parts = (
        dataclasses.fields(part) if dataclasses.is_dataclass(part) and not isinstance(part, type | Posterior) else ()
    )
    return any(_trains(getattr(part, field.name)) for field in parts)


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed fit left beside the posterior that it had finished, unless a process is at work there."""
    partial = _partial(folder)
    with contextlib.suppress(FolderInUse, OSError, CorruptFile), sole_use(folder):
        for path in (folder, partial):
            remove_unfinished(path)
        if partial.exists() and digest_of_finished(partial) == read_json(folder / "posterior.json").get("digest", ""):
            remove_folder(partial)


def _partial(target: Path) -> Path:
    """Where a fit keeps its place."""
    return target.with_name(f"{target.name}.partial")


def _refuse(existing: Path) -> NoReturn:
    raise FileExistsError(f"{existing} exists: load it with caveat.load, or choose another folder")


@contextlib.contextmanager
def _held(target: Path | None, ranks: Ranks) -> Iterator[list[str]]:
    """Hold a fit's folder for this call alone (the first rank does); gives what a person should be warned of."""
    with contextlib.ExitStack() as stack:
        warnings: list[str] = []
        refusal: Exception | None = None
        if target is not None and ranks.first:
            try:
                warnings = stack.enter_context(sole_use(target))
                for path in (target, _partial(target)):
                    remove_unfinished(path)
                if target.exists():  # made while this call made ready
                    _refuse(target)
            except (FolderInUse, OSError) as error:
                refusal = error
        refusal = ranks.from_first(refusal)
        if refusal is not None:
            raise refusal
        yield warnings


def _run(
    task: Task,
    method: Method,
    start: Method | Posterior | None,
    seed: int,
    place: torch.device,
    ranks: Ranks,
    target: Path | None,
    progress: bool,
) -> Run:
    """The surroundings of a fit, begun or gone on with; what does not belong to them is refused."""
    partial, identity = None, {}
    if target is not None or ranks.size > 1:
        identity = {"method": type(method).__name__, "knobs": settings_digest(method), "seed": seed}
        identity |= {"start": _start_identity(task, method, start)} | task.fingerprint()
        _check_ranks(ranks, identity)
    if target is not None:
        partial = _partial(target)
        if ranks.first and partial.exists() and not (partial / "run.json").exists() and any(partial.glob("[!.]*")):
            raise FileExistsError(f"{partial} exists and is not an unfinished fit: choose another folder")
    label = type(method).__name__
    forward: dict[str, Any] = {}  # for those who go on with an unfinished fit: without a folder, nobody can
    if partial is not None:
        forward = forward_probe(task.network, task.example(task.network.device))
        _check_forward(partial, task.network)
    return Run(seed, place, ranks, partial, identity, forward, progress, label, warnings=list(task.warnings))


def _fitted(task: Task, method: Method, start: Method | Posterior | None, run: Run) -> Posterior:
    """The posterior; of a fit that fails nothing is kept unless another call could go on from it."""
    place = run.device
    try:
        with without_autocast(place):  # a method's arithmetic is its own, whatever surrounds the call
            task, begin = _start(_moved(task, place), method, start, run)
            begin = {group: {name: t.to(place) for name, t in tensors.items()} for group, tensors in begin.items()}
            if method.starts_from == "trained":
                what = f"the point that {type(method).__name__} starts from"
                warn_if_no_optimum(task, task.network.to(place), begin["params"], run, what)
                warn_of_noise(task, run)
            state, info = method.fit(task, begin, run)
    except BaseException:  # a Ctrl-C too
        if run.folder is not None and run.ranks.first and not any(run.folder.rglob("*.safetensors")):
            with contextlib.suppress(OSError):  # the error that is raised is the fit's
                run.discard()
        raise
    point = _prediction_at(task.network.to(place), begin) if method.starts_from == "trained" else None
    posterior = _finished(method, state, info, task, run, point)
    return dataclasses.replace(posterior, info=dataclasses.replace(posterior.info, start=_cost_of(start)))


def _cost_of(start: Method | Posterior | None) -> dict[str, float]:
    """What a posterior that was fitted before cost; a method that is fitted first is counted with the fit."""
    if not isinstance(start, Posterior):
        return {}
    info = start.info
    return {
        name: getattr(info, name) + info.start.get(name, 0) for name in ("seconds", "gradient_evaluations", "flops")
    }


def _prediction_at(network: Network, point: State) -> Callable[[Inputs], Predictive]:
    """What a point predicts, as a posterior does."""

    def predict(x: Inputs) -> Predictive:
        with without_autocast(network.device):
            outputs = network(point["params"], move(x, network.device))
            return network.likelihood.predictive(outputs[None], point["hyper"])

    return predict


def _finished(
    method: Method, state: State, info: Info, task: Task, run: Run, point: Callable[[Inputs], Predictive] | None
) -> Posterior:
    """The posterior, with what it gains over the marginals and the point that it started from, and what it cost."""
    network = task.network.to(run.device)
    detached = {group: {name: t.detach() for name, t in tensors.items()} for group, tensors in state.items()}
    posterior = Posterior(method, detached, network, info)
    gained = check_against_marginals(_moved(task, run.device), posterior.predict, method.default_draws, run, point)
    info = dataclasses.replace(
        info,
        diagnostics=info.diagnostics | ({} if gained is None else {"against_marginals": gained}),
        warnings=list(dict.fromkeys(run.warnings)),
        seconds=run.seconds(),
        peak_bytes=peak_bytes(run.device),
        gradient_evaluations=round(run.gradient_evaluations),
        flops=run.flops,
        stored_bytes=stored_bytes(state),
        seed=run.seed,
        versions=_versions(),
        forward=forward_probe(network, task.example(run.device)),
    )
    return dataclasses.replace(posterior, info=info)


def _check_kinds(method: Any, start: Any) -> None:
    """Raise a TypeError for a class or a name in the place of an instance, which is the usual slip."""
    for name, given in (("method", method), ("start", start)):
        if isinstance(given, type | str | Path):
            advice = "an instance, such as caveat.MAP()"
            advice += ", or caveat.load(folder, model) for a folder" * (name == "start")
            raise TypeError(f"{name}={given!r} is not a method: pass {advice}")
    if start is not None and method.starts_from == "fresh":
        raise ValueError(f"{type(method).__name__} draws its own starting weights: leave start= out")


def _check_likelihood(method: Method, task: Task) -> None:
    name = type(task.network.likelihood).__name__
    if name in likelihoods.__all__ and name not in method.likelihoods:
        supported = ", ".join(method.likelihoods)
        raise ValueError(f"{type(method).__name__} does not support {name}: it supports {supported}")


def _check_ranks(ranks: Ranks, identity: dict[str, Any]) -> None:
    """Refuse ranks that were given different things, before any work: each would fit a posterior of its own."""
    differing = ranks.differing(identity)
    if not differing:
        return
    what, others = next(iter(differing.items()))
    advice = {
        "start": "they start from other weights: call torch.manual_seed before the module is built, or load one file",
        "data": "they have other training rows: give every rank the whole data set, which is shared out here",
        "validation": "they have other validation rows: give every rank the same",
        "seed": "they were given another seed",
        "method": "they were given another method",
        "knobs": "the method has other knobs there",
        "network": "their network has other parameters",
    }
    for key in advice:  # the first in this order says most
        if key in differing:
            what, others = key, differing[key]
            break
    named = ", ".join(map(str, others[:8]))
    raise ValueError(
        f"rank{'s' * (len(others) > 1)} {named} and rank 0 were not given the same ({what}): "
        f"{advice.get(what, f'their {what} differs')}"
    )


def _check_forward(partial: Path, network: Network) -> None:
    """Refuse to go on with an unfinished fit of a network that computes something else with the same parameters."""
    if (partial / "run.json").exists() and differs_from(read_as(partial / "run.json", RunFile).forward, network):
        raise ValueError(
            f"{partial} holds an unfinished fit of a network that computes something else (another activation?): "
            "delete it, or choose another folder"
        )


def _start_identity(task: Task, method: Method, start: Method | Posterior | None) -> str:
    """What a fit starts from, so that it is not resumed from something else."""
    if method.starts_from == "fresh":  # the module's own weights are of no account, but for those that are not drawn
        drawn = task.network.initialise is None or callable(task.network.initialise)
        return digest_of({"fixed": task.network.fixed()} | ({} if drawn else {"params": task.network.params()}))
    if start is None:
        return digest_of({"params": task.network.params(), "buffers": task.network.buffers()})
    return digest_of(start.state) if isinstance(start, Posterior) else settings_digest(start)


def _start(task: Task, method: Method, start: Method | Posterior | None, run: Run) -> tuple[Task, State]:
    """The point to start from, groups "params" and "hyper", and the task with everything else as the point has it."""
    if start is not None and not isinstance(start, Posterior):
        start = _fitted_start(task, start, run)
    if isinstance(start, Posterior):
        return _from_point(task, start)
    network = task.network.to(run.device)
    params = network.params()
    if method.starts_from != "trained":
        return task, {"params": params, "hyper": task.hyper}
    hyper = task.fitted_hyper(network, params, task.validation)
    # A network that has learned nothing can be a little better by luck.
    units = ""
    if getattr(network.likelihood, "standardise", None) is True:
        units = (
            "; with standardise=True outputs are in standard deviations of the targets around their mean, and a "
            "network that was trained on the targets as they are takes standardise=False"
        )
    margin = 0.01 * (abs(task.baseline) if network.likelihood.kind == "classification" else 1.0)
    limit = task.baseline + margin
    if not _clearly_above(limit, task, network, params, hyper) and (
        (reached := float(task.log_likelihood(network, params, hyper))) <= limit
    ):
        raise ValueError(
            f"{type(method).__name__} starts from a trained network, but this one is no better than the label "
            f"marginals (log likelihood {reached:.3f} a row against {task.baseline:.3f}): train it first, or pass "
            f"start=caveat.MAP(){units}"
        )
    return task, {"params": params, "hyper": hyper}


def _clearly_above(limit: float, task: Task, network: Network, params: Params, hyper: Hyper, rows: int = 64) -> bool:
    """Whether a few rows' log likelihood leaves no doubt: a pass over all of them is part of a fit's cost."""
    outputs, targets = task.outputs(network, params, task.train.some(rows))
    each = network.likelihood.log_prob(outputs, targets, hyper).double().flatten()
    return bool(each.mean() - 6 * each.std() / len(each) ** 0.5 > limit)


def _moved(task: Task, device: torch.device) -> Task:
    """The task with its network on a device, where everything that follows shares one copy."""
    moved = copy.copy(task)
    moved.network = task.network.to(device)
    return moved


def _fitted_start(task: Task, start: Method, run: Run) -> Posterior:
    """The method to start from, fitted; kept in the run's folder, whose identity includes it."""
    place = None if run.folder is None else run.folder / "start"
    exists = place is not None and place.exists()
    if place is not None and exists:
        posterior = load(place, task.network.module, device=run.device, classes=[type(start)])
    else:
        posterior = fit(task, start, seed=run.seed, device=run.device, folder=place, progress=run.progress)
    run.absorb_start(posterior.info, earlier=exists)
    return posterior


def _from_point(task: Task, start: Posterior) -> tuple[Task, State]:
    """A posterior's point; what the task does not infer (a frozen layer, another filter) is taken from it as well."""
    everything = start.network.fixed() | start.state.get("params", {})
    wanted = task.network.params() | task.network.fixed()
    if any(name not in everything or everything[name].shape != value.shape for name, value in wanted.items()):
        kind = type(start.method).__name__
        raise ValueError(f"a fit starts from one point of the same network, such as a MAP; this {kind} is not one")
    buffers = task.network.buffers()
    rest = {name: everything[name] for name in task.network.fixed()}
    start.network.base.check()
    moved = copy.copy(task)
    moved.network = task.network.with_fixed(rest)
    point = {n: v for n, v in start.state["params"].items() if n in task.network.names or n in buffers}
    point |= {name: everything[name] for name in task.network.names}
    return moved, {"params": point, "hyper": start.state["hyper"]}


def _versions() -> dict[str, str]:
    from caveat import __version__  # the package imports this module first

    python = platform.python_version()
    return {"caveat": __version__, "torch": torch.__version__, "numpy": numpy.__version__, "python": python}
