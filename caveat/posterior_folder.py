"""A posterior's folder: `posterior.json` says what it is, `state.safetensors` holds its tensors.

What is read is checked against its checksums, against the types of its fields, and against the model that is given:
whatever does not fit is a `CorruptFile` that says what. The frozen base may be left out; its digest stands in for it.
`posterior.py` calls this.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from caveat import likelihoods, priors
from caveat.copies import FrozenBase, unwrapped, with_stored_values
from caveat.engine.forward_probe import differs_from
from caveat.engine.method import Method
from caveat.engine.run import Info
from caveat.engine.state_checks import check_finite, check_like, check_names
from caveat.knobs import knob_classes
from caveat.methods import built_in, discover
from caveat.network import Network, Params, fingerprint_of
from caveat.predictive import Calibration, Conformity
from caveat.storage import FORMAT, CorruptFile, State, decode, encode, read_state, tensor_names, write_json, write_state
from caveat.typed_json import read_as

__all__ = ["Parts", "read_parts", "write_parts"]

_STATE = "state."  # in a file, before the name of a group of the state
LEFT_OUT_ABOVE = 64 * 2**20  # bytes of frozen parameters


@dataclass(frozen=True)
class Parts:
    """What a posterior is made of."""

    method: Method
    state: State
    network: Network
    info: Info
    calibration: Calibration | None


def write_parts(place: Path, parts: Parts, note: dict[str, Any], base: str) -> str:
    """Write a posterior into a folder that is empty; returns the digest of its tensors."""
    frozen = parts.network.base
    left_out = list(frozen.tensors) if _is_left_out(base, frozen) else []
    tensors: Params = {}
    described = {
        "method": encode(parts.method, tensors, "method"),
        "likelihood": encode(parts.network.likelihood, tensors, "likelihood"),
        "prior": encode(parts.network.prior, tensors, "prior"),
        "calibration": encode(parts.calibration, tensors, "calibration"),
    }
    # Frozen parameters and buffers are part of the function, and a model built anew would not have them.
    groups = {f"state.{g}": t for g, t in parts.state.items()} | {
        "fixed": {name: t for name, t in parts.network.fixed().items() if name not in set(left_out)},
        "described": tensors,
    }
    digest = write_state(place / "state.safetensors", groups)
    content = described | {
        "format": FORMAT,
        "names": list(parts.network.names),
        "fingerprint": parts.network.fingerprint(),
        "digest": digest,
        "base": {"names": left_out, "bytes": frozen.nbytes, "digest": frozen.digest} if left_out else None,
        "info": dataclasses.asdict(parts.info),
        "note": note,
    }
    write_json(place / "posterior.json", content)
    return digest


def read_parts(folder: Path, model: nn.Module, classes: list[type]) -> Parts:
    """Read a posterior for a model, which has its frozen base where that was left out."""
    content = read_as(folder / "posterior.json", _PosteriorFile)
    groups = read_state(folder / "state.safetensors", content.digest)
    of_state = [group for group in groups if group.startswith(_STATE)]
    check_names(str(folder / "state.safetensors"), groups, ["fixed", "described"], of_state)
    for name, tensor in groups["described"].items():
        check_finite(f"{folder}: described/{name}", tensor)
    described = _described(content, groups["described"], classes)
    network = _network(folder, content, described, groups["fixed"], unwrapped(model))
    state = {group.removeprefix(_STATE): tensors for group, tensors in groups.items() if group.startswith(_STATE)}
    _check(folder, lambda: described["method"].check_state(state, network))
    if differs_from(content.info.forward, network):
        raise CorruptFile(
            f"{folder} is a posterior of another model: its parameters have the same names and shapes, but this model "
            "computes something else with them (another activation, or another order of layers?)"
        )
    return Parts(described["method"], state, network, content.info, described["calibration"])


def _is_left_out(base: str, frozen: FrozenBase) -> bool:
    """Whether a file does without the frozen base."""
    if base not in ("auto", "with", "without"):
        raise ValueError(f"save(base={base!r}): must be 'auto', 'with' or 'without'")
    if base == "without" and not frozen.tensors:
        raise ValueError(
            "save(base='without'): no parameter was frozen when the task was made, so there is nothing to leave out: "
            "call requires_grad_(False) on the base before, or use base='with'"
        )
    return base == "without" or (base == "auto" and frozen.nbytes > LEFT_OUT_ABOVE)


def _network(
    folder: Path, content: "_PosteriorFile", described: dict[str, Any], fixed: Params, model: nn.Module
) -> Network:
    """The network of a posterior: a copy of the model with what was saved, or shared with it where nothing was."""
    parameters = {name: p for name, p in model.named_parameters() if p.is_floating_point()}
    missing = [name for name in content.names if name not in parameters]
    if missing:
        raise CorruptFile(f"{folder} is a posterior of another model: this one has no parameter {sorted(missing)[0]!r}")
    names = tuple(name for name in parameters if name in set(content.names))
    if fingerprint_of(model, names) != content.fingerprint:
        raise CorruptFile(
            f"{folder} is a posterior of another model: the parameters' names, shapes or types differ from this one's"
        )
    everything = dict(model.named_parameters()) | dict(model.named_buffers())
    left_out = set() if content.base is None else set(content.base.names)
    rest = {name: tensor for name, tensor in everything.items() if name not in left_out.union(names)}
    _check(folder, lambda: check_like("fixed", fixed, rest))
    module = with_stored_values(model, set(names), fixed)
    try:
        network = Network(module, described["likelihood"], described["prior"], lambda name, _: name in set(names))
    except (TypeError, ValueError, RuntimeError) as error:
        raise CorruptFile(f"{folder}: its likelihood or prior does not go with the model ({error})") from error
    network = network.with_base(content.base.names if content.base is not None else ())
    if content.base is not None and network.base.digest != content.base.digest:
        raise CorruptFile(
            f"{folder} was saved without its frozen base ({len(left_out)} tensors, {content.base.bytes / 1e6:,.0f} "
            "MB), and this model has another one: load the weights that the posterior was fitted to into the model "
            "first, such as the pretrained ones; or save the posterior with base='with'"
        )
    return network


@dataclass(frozen=True)
class _Base:
    """A frozen base that was not saved: which parameters, how many bytes, and a digest of them."""

    names: list[str]
    bytes: int
    digest: str


@dataclass(frozen=True)
class _PosteriorFile:
    """What `posterior.json` holds, beside its format and checksum."""

    method: dict[str, Any]
    likelihood: dict[str, Any]
    prior: dict[str, Any]
    names: list[str]
    fingerprint: str
    digest: str
    info: Info
    note: dict[str, Any]
    base: _Base | None = None
    calibration: dict[str, Any] | None = None


def _described(content: _PosteriorFile, tensors: Params, classes: list[type]) -> dict[str, Any]:
    """The method, likelihood, prior and calibration; a file that this version wrote has all of their knobs."""
    from caveat import __version__  # the package imports this module first

    complete = content.info.versions.get("caveat") == __version__
    known = {"method": _method_classes(content.method, classes), "likelihood": classes, "prior": classes}
    known["calibration"] = [Calibration, Conformity]
    described = {
        key: decode(getattr(content, key), tensors, [*_likelihoods_and_priors(), *named], complete=complete)
        for key, named in known.items()
    }
    named = {name for key in known for name in tensor_names(getattr(content, key))}
    for name in tensors.keys() - named:
        raise CorruptFile(f"described/{name} in state.safetensors belongs to nothing that posterior.json describes")
    if Method not in type(described["method"]).__mro__:
        raise CorruptFile(f"{type(described['method']).__name__} is not a method")
    calibration = described["calibration"]
    if calibration is not None:
        if not isinstance(calibration, Calibration):
            raise CorruptFile(f"{type(calibration).__name__} is not a calibration")
        if not calibration.conformity.is_for(described["likelihood"].kind):
            raise CorruptFile(f"{calibration!r} does not go with {type(described['likelihood']).__name__}")
    return described


def _check(folder: Path, check: Callable[[], None]) -> None:
    """Make a check of what was read; whatever it stumbles over is a file that is not what it should be."""
    try:
        check()
    except (CorruptFile, KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        told = str(error) if isinstance(error, CorruptFile) else f"{type(error).__name__}: {error}"
        raise CorruptFile(f"{folder / 'state.safetensors'} is not the state of this network: {told}") from error


def _likelihoods_and_priors() -> list[type]:
    """What a saved description of a likelihood or a prior may name."""
    named: list[type] = [getattr(module, name) for module in (likelihoods, priors) for name in module.__all__]
    return [cls for cls in named if dataclasses.is_dataclass(cls)]


def _method_classes(described: Any, classes: list[type]) -> list[type]:
    """What a saved description of a method may name: `classes`, methods, and the dataclasses among their knobs.

    Other packages are imported only where it names something that is neither of this one nor among `classes`. A name
    stands for the last class that has it, so the method's own knobs follow those of others: two packages may use one
    name.
    """
    name = described.get("type") if isinstance(described, dict) else None
    own = [*built_in().values()]
    known = [*own, *(knob for method in own for knob in knob_classes(method)), *classes]
    found = _types_in(described) <= {cls.__name__ for cls in known}
    methods = sorted(own if found else discover().values(), key=lambda method: method.__name__ == name)
    return [*(cls for method in methods for cls in (method, *knob_classes(method))), *classes]


def _types_in(described: Any) -> set[str]:
    """The names of all classes that a saved description has."""
    if isinstance(described, dict):
        own = {described["type"]} if isinstance(described.get("type"), str) else set()
        return own.union(*(_types_in(part) for part in described.values()))
    return set[str]().union(*map(_types_in, described)) if isinstance(described, list) else set()
