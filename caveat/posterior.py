"""From a task and a method to a posterior: fit, predict, save, load."""

import copy
import dataclasses
import platform
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import numpy
import torch
from torch import nn

from caveat import likelihoods, priors
from caveat.batches import Inputs, count_rows, first_not_finite
from caveat.engine.cost import peak_bytes, refuse_if_too_large, reset_peak
from caveat.engine.distributed import current_ranks
from caveat.engine.run import Info, Run
from caveat.methods import Method, discover
from caveat.network import Network, Params
from caveat.predictive import Predictive
from caveat.storage import (
    FORMAT,
    CorruptFile,
    State,
    decode,
    encode,
    new_folder,
    read_json,
    read_state,
    stored_bytes,
    write_json,
    write_state,
)
from caveat.task import Task

__all__ = ["Posterior", "fit", "load"]


@dataclass(frozen=True)
class Posterior:
    """A fitted posterior: what it is (`state`), how to use it (`method`, `network`), and what it cost (`info`)."""

    method: Method
    state: State
    network: Network
    info: Info

    def sample(self, n: int = 1, *, seed: int = 0) -> Iterator[Params]:
        """N draws of the weights."""
        if n < 1:
            raise ValueError(f"sample(n={n}): must be at least 1")
        return self.method.draws(self.state, self.network, n, torch.Generator().manual_seed(seed))

    def predict(self, x: Inputs, *, draws: int | None = None, seed: int = 0) -> Predictive:
        """What the posterior says about inputs: a tensor, or a dict or tuple of tensors as the module takes them.

        Inputs of any number of rows go through in pieces. The same seed gives the same draws, so the same answer.
        """
        n = self.method.default_draws if draws is None else draws
        if n < 1:
            raise ValueError(f"predict(draws={n}): must be at least 1")
        x = tuple(x) if isinstance(x, list) else x
        self.network.check_inputs(x)
        bad = first_not_finite(x)
        if bad is not None:
            raise ValueError(
                f"the inputs hold NaN or infinity, first in row {bad} of {count_rows(x)}: clean or impute them first"
            )
        outputs, hyper = self.method.outputs(self.state, self.network, x, n, torch.Generator().manual_seed(seed))
        return self.network.likelihood.predictive(outputs, hyper)

    def save(self, folder: str | Path, *, overwrite: bool = False) -> Path:
        """Write the posterior to a folder, whole or not at all; no data are needed to predict from it."""
        with new_folder(folder, overwrite) as place:
            tensors: Params = {}
            described = {
                "method": encode(self.method, tensors, "method"),
                "likelihood": encode(self.network.likelihood, tensors, "likelihood"),
                "prior": encode(self.network.prior, tensors, "prior"),
            }
            # Frozen parameters and buffers are part of the function, and a model built anew would not have them.
            groups = {f"state.{g}": t for g, t in self.state.items()} | {
                "fixed": self.network.fixed(),
                "described": tensors,
            }
            digest = write_state(place / "state.safetensors", groups)
            content = described | {
                "format": FORMAT,
                "names": list(self.network.names),
                "fingerprint": self.network.fingerprint(),
                "digest": digest,
                "info": dataclasses.asdict(self.info),
            }
            write_json(place / "posterior.json", content)
        return Path(folder)

    def to(self, device: torch.device | str) -> "Posterior":
        """This posterior on a device."""
        state = {group: {name: t.to(device) for name, t in tensors.items()} for group, tensors in self.state.items()}
        return dataclasses.replace(self, state=state, network=self.network.to(device))


def fit(
    task: Task,
    method: Method,
    *,
    start: "Method | Posterior | None" = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    folder: str | Path | None = None,
    progress: bool = True,
) -> Posterior:
    """Fit a method to a task.

    Args:
        task: the network and its data.
        method: which posterior, with its knobs.
        start: None takes the module's own weights, as they were trained; a method (such as `MAP()`) is fitted first; a
        posterior
            that has a point (a MAP) gives that point.
        seed: of everything random in the fit.
        device: where to compute; the module's own device unless given.
        folder: where to keep the place (in `<folder>.partial`, so that the same call goes on after a kill) and, at the
        end, the
            posterior. An existing folder is never overwritten.
        progress: show progress of anything over a second on standard error.
    """
    place = task.network.device if device is None else torch.device(device)
    target = None if folder is None else Path(folder)
    if target is not None and target.exists():
        raise FileExistsError(f"{target} exists: load it with caveat.load, or choose another folder")
    _check_likelihood(method, task)
    refuse_if_too_large(
        f"{type(method).__name__} on {task.network.n_parameters:,} weights",
        method.memory(task.network),
        place,
        "use a smaller configuration, or parameters= to select fewer weights",
    )
    reset_peak(place)
    clock = time.monotonic()
    ranks = current_ranks(place)
    begin = _start(task, method, start, seed, place, target, progress)
    identity = {"method": encode(method, {}, "method"), "seed": seed} | task.fingerprint() | {"start": _sketch(begin)}
    partial = None if target is None else target.with_name(target.name + ".partial")
    run = Run(seed, place, ranks, partial, identity, progress, type(method).__name__, warnings=list(task.warnings))
    state, info = method.fit(task, begin, run)
    info = dataclasses.replace(
        info,
        warnings=list(run.warnings),
        seconds=time.monotonic() - clock,
        peak_bytes=peak_bytes(place),
        gradient_evaluations=round(run.gradient_evaluations),
        flops=run.flops,
        stored_bytes=stored_bytes(state),
        seed=seed,
        versions=_versions(),
    )
    posterior = Posterior(
        method, {g: {n: t.detach() for n, t in ts.items()} for g, ts in state.items()}, task.network.to(place), info
    )
    if target is not None and ranks.first:
        posterior.save(target)
        run.discard()
    ranks.wait()
    return posterior


def load(
    folder: str | Path, model: nn.Module, *, device: torch.device | str | None = None, classes: Iterable[type] = ()
) -> Posterior:
    """Read a posterior for a model of the same architecture (its weights do not matter).

    Args:
        folder: what `save` wrote.
        model: a module with the parameters that the posterior was fitted to.
        device: where to predict; the model's own device unless given.
        classes: likelihoods, priors or methods of your own that the posterior uses.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder: give the folder that posterior.save(...) wrote")
    content = read_json(folder / "posterior.json")
    groups = read_state(folder / "state.safetensors", content["digest"])
    known = [*_known_classes(), *classes]
    described = {key: decode(content[key], groups["described"], known) for key in ("method", "likelihood", "prior")}
    names = set(content["names"])
    module = copy.deepcopy(model).requires_grad_(True)
    missing = names - {name for name, _ in module.named_parameters()}
    if missing:
        raise CorruptFile(f"{folder} is a posterior of another model: this one has no parameter {sorted(missing)[0]!r}")
    network = Network(module, described["likelihood"], described["prior"], lambda name, _: name in names)
    if network.fingerprint() != content["fingerprint"]:
        raise CorruptFile(
            f"{folder} is a posterior of another model: the parameters' names, shapes or types differ from this one's"
        )
    network = network.with_fixed(groups["fixed"])
    state = {group.removeprefix("state."): tensors for group, tensors in groups.items() if group.startswith("state.")}
    posterior = Posterior(described["method"], state, network, Info(**content["info"]))
    return posterior.to(network.device if device is None else device)


def _check_likelihood(method: Method, task: Task) -> None:
    name = type(task.network.likelihood).__name__
    builtin = name in likelihoods.__all__
    if builtin and name not in method.likelihoods:
        raise ValueError(
            f"{type(method).__name__} does not support {name}: it supports {', '.join(method.likelihoods)}"
        )


def _start(
    task: Task, method: Method, start: Any, seed: int, device: torch.device, folder: Path | None, progress: bool
) -> State:
    """The point to start from: groups "params" and "hyper"."""
    if start is not None and not isinstance(start, Posterior):
        place = None if folder is None else folder.with_name(f"{folder.name}.start")
        if place is not None and place.exists():
            start = load(place, task.network.module, device=device)
        else:
            start = fit(task, start, seed=seed, device=device, folder=place, progress=progress)
    if isinstance(start, Posterior):
        if "params" not in start.state or start.network.fingerprint() != task.network.fingerprint():
            raise ValueError(
                f"a fit can start from a point of the same network, such as a MAP; "
                f"this {type(start.method).__name__} is not one"
            )
        return {"params": start.state["params"], "hyper": start.state["hyper"]}
    network = task.network.to(device)
    params = network.params()
    if method.starts_from == "scratch":
        return {"params": params, "hyper": task.hyper}
    hyper = task.fitted_hyper(network, params)
    reached = float(task.log_likelihood(network, params, hyper))
    if reached <= task.baseline:
        raise ValueError(
            f"{type(method).__name__} starts from a trained network, but this one is no better than the "
            f"label marginals "
            f"(log likelihood {reached:.3f} a row against {task.baseline:.3f}): train it first, "
            "or pass start=caveat.MAP()"
        )
    return {"params": params, "hyper": hyper}


def _sketch(state: State) -> str:
    """A short digest of the starting point's values, so that a fit is not resumed from another one."""
    total = sum(float(t.double().sum()) for group in state.values() for t in group.values())
    return f"{total:.12g}"


def _versions() -> dict[str, str]:
    from caveat import __version__  # the package imports this module first

    python = platform.python_version()
    return {"caveat": __version__, "torch": torch.__version__, "numpy": numpy.__version__, "python": python}


def _known_classes() -> list[type]:
    """What a saved description may name: likelihoods, priors, methods, and the dataclasses among their knobs."""
    named: list[type] = [getattr(module, name) for module in (likelihoods, priors) for name in module.__all__]
    knobs: list[type] = [hint for method in discover().values() for hint in get_type_hints(method).values()]
    return [cls for cls in (*named, *discover().values(), *knobs) if dataclasses.is_dataclass(cls)]
