"""A network: a module, a likelihood and a prior as pure functions of its parameters.

`Params` is a flat dict of tensors as `torch.func.functional_call` takes it. It holds the parameters that inference is
about; buffers ride along where a draw owns them (BatchNorm statistics), and so does what a likelihood learned for that
draw, under `hyper/` (the noise of an ensemble's member). Everything else (frozen parameters, other buffers) stays as it
was in the copy of the module that the network keeps. The user's own module is never touched; parameters that are
frozen there share their storage with the copy, which never writes them (`copies/`).
"""

import copy
import hashlib
import inspect
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from caveat.batches import Inputs, tensors
from caveat.copies import (
    FrozenBase,
    called_with,
    copied,
    frozen_parameter,
    moved,
    same_storage,
    sharing_copy,
    unwrapped,
)
from caveat.likelihoods import Categorical, Likelihood, answer_logits
from caveat.priors import GaussianPrior, Params, Prior

__all__ = [
    "Initialise",
    "Layer",
    "Network",
    "ParameterFilter",
    "Params",
    "copied",
    "fingerprint_of",
    "layer_of",
    "unwrapped",
    "without_autocast",
]

ParameterFilter = str | Iterable[str] | Callable[[str, Tensor], bool]
Initialise = str | Iterable[str] | Callable[[nn.Module], None]


@dataclass(frozen=True)
class Layer:
    """A module that owns parameters, and what inference may do with them."""

    name: str
    kind: str
    parameters: int
    selected: int  # how many of them inference is about
    why: str  # why the others are not


class Network:
    """A private copy of a module, with the likelihood of its outputs and the prior of its weights.

    Args:
        module: any `nn.Module`; a compiled or data-parallel wrapper is taken off first.
        likelihood: what the outputs say about the targets.
        prior: over the selected parameters; `GaussianPrior(1.0)` unless given.
        parameters: which parameters inference is about: a name pattern, several, or a predicate of (name, tensor).
            Frozen ones (`requires_grad=False`) never are.
        initialise: how methods that start from several points draw fresh weights: None calls the module's own
            initialisers, name patterns do so for the parameters that they match and leave the others at the module's
            values, and a function draws in place on the module that it is given.
    """

    def __init__(
        self,
        module: nn.Module,
        likelihood: Likelihood,
        prior: Prior | None = None,
        parameters: ParameterFilter = "*",
        initialise: Initialise | None = None,
    ) -> None:
        _check_kinds(module, likelihood, prior)
        self.module, shared = sharing_copy(module)
        self.likelihood = likelihood
        self.prior: Prior = GaussianPrior() if prior is None else prior
        self.frozen = {name for name, p in self.module.named_parameters() if not p.requires_grad}
        self.names = _select(self.module, parameters)
        _check_selected(self.module, self.names)
        self.initialise = (
            initialise if initialise is None or callable(initialise) else _patterns(initialise, self.names)
        )
        self.module.requires_grad_(False).eval()
        self.base = FrozenBase.of(self.module, shared)  # what the module that was given shares with this one's
        self.prior.log_prob(self.params())  # a prior that does not fit these weights says so now

    def params(self) -> Params:
        """The selected parameters at the module's own values."""
        parameters = dict(self.module.named_parameters())
        return {name: parameters[name].detach().clone() for name in self.names}

    def buffers(self) -> Params:
        """The module's buffers at their own values."""
        return {name: buffer.detach().clone() for name, buffer in self.module.named_buffers()}

    def __call__(self, params: Params, x: Inputs, train: bool = False) -> Tensor:
        """Outputs at these parameters; with `train`, buffers among `params` are updated in place, others are not."""
        if self.module.training != train:
            self.module.train(train)
        given = {name: value for name, value in params.items() if not name.startswith("hyper/")}
        # A training pass gets copies of the network's own buffers, so that what it writes into them is forgotten.
        copies = {name: b.clone() for name, b in self.module.named_buffers() if name not in given} if train else {}
        values = copies | given
        outputs = called_with(self.module, values, *self.arguments(x))
        if train:
            with torch.no_grad():  # a module may replace a buffer, by one with a graph, instead of writing into it
                for name, value in given.items():
                    if values[name] is not value:
                        value.copy_(values[name])
        return self._one_tensor(outputs, x)

    def training_pass(self, x: Inputs) -> Tensor:
        """Outputs in training mode at the module's own tensors, buffers written: for a copy that training owns.

        Swapping a hundred tensors in and out of a module takes as long as a small network's step.
        """
        if not self.module.training:
            self.module.train()
        args, kwargs = self.arguments(x)
        buffers = dict(self.module.named_buffers())
        outputs = self.module(*args, **kwargs)
        for name, buffer in self.module.named_buffers() if buffers else ():
            if buffer is not buffers[name]:  # replaced, perhaps by one with a graph, instead of written into
                with torch.no_grad():
                    setattr(
                        self.module.get_submodule(layer_of(name)), name.rpartition(".")[2], buffers[name].copy_(buffer)
                    )
        return self._one_tensor(outputs, x)

    def evaluation_pass(self, x: Inputs) -> Tensor:
        """Outputs in evaluation mode at the module's own tensors, with their gradients."""
        if self.module.training:
            self.module.eval()
        args, kwargs = self.arguments(x)
        return self._one_tensor(self.module(*args, **kwargs), x)

    def arguments(self, x: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """How the module takes inputs: a tuple as positional arguments, a dict as keyword arguments.

        A dict is one argument where `forward` has no arguments of these names, and can be called with one.
        """
        if isinstance(x, tuple):
            return x, {}
        if not isinstance(x, dict):
            return (x,), {}
        signature = inspect.signature(self.module.forward)
        return ((x,), {}) if not _fits(signature, **x) and _fits(signature, x) else ((), x)

    def _one_tensor(self, outputs: Any, x: Inputs) -> Tensor:
        """The tensor of a module's outputs, in the selected parameters' type where a coarser base rounded them."""
        if isinstance(outputs, dict) and "logits" in outputs:
            outputs = outputs["logits"]
        if not isinstance(outputs, Tensor):
            raise TypeError(f"the module returned a {type(outputs).__name__}; it must return one tensor of outputs")
        if isinstance(self.likelihood, Categorical) and self.likelihood.classes is not None:
            outputs = answer_logits(outputs, x, self.likelihood.classes)
        if outputs.dtype in (torch.bfloat16, torch.float16):
            return outputs.to(torch.promote_types(outputs.dtype, self.dtype))
        return outputs

    @property
    def class_names(self) -> tuple[str, ...]:
        """The words that targets may be, in the order of the classes; none where the likelihood names none."""
        return (self.likelihood.names or ()) if isinstance(self.likelihood, Categorical) else ()

    @property
    def device(self) -> torch.device:
        """Where the module's parameters are."""
        return next(self.module.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the selected parameters, which need not be that of a frozen base; of several the coarsest."""
        parameters = dict(self.module.named_parameters())
        types = [parameters[name].dtype for name in self.names if parameters[name].is_floating_point()]
        return min(types, key=lambda kind: kind.itemsize, default=torch.get_default_dtype())

    @property
    def input_dtype(self) -> torch.dtype:
        """The type of the module's first floating-point parameter, which is the one that inputs meet."""
        return next((p.dtype for p in self.module.parameters() if p.is_floating_point()), torch.get_default_dtype())

    def to(self, device: torch.device | str) -> "Network":
        """This network on a device (itself when it is there already)."""
        if torch.device(device) == self.device:
            return self
        return self.with_module(moved(self.module, device))

    def replica(self) -> "Network":
        """This network with a module of its own, for another thread; parameters are shared, buffers are copies."""
        shared: dict[int, Tensor] = {id(p): p for p in self.module.parameters()}
        return self.with_module(copied(self.module, shared))

    def holding(self, values: Params) -> "Network":
        """A replica whose module has these values, without copies of them: `evaluation_pass` is a pass with them."""
        tensors: dict[str, Tensor] = dict(self.module.named_parameters(remove_duplicate=False))
        shared: dict[int, Tensor] = {id(p): p for p in tensors.values()}
        tensors |= dict(self.module.named_buffers(remove_duplicate=False))
        for name, value in values.items():
            if name in tensors:
                was_parameter = isinstance(tensors[name], nn.Parameter)
                shared[id(tensors[name])] = frozen_parameter(value) if was_parameter else value
        return self.with_module(copied(self.module, shared))

    def with_module(self, module: nn.Module) -> "Network":
        """This network with another module in the place of its own, such as a narrower one."""
        other = copy.copy(self)
        other.module, other.base = module, FrozenBase.of(module, self.base.tensors)
        return other

    def with_base(self, names: Iterable[str]) -> "Network":
        """This network with a frozen base of these names: what else it does not infer is its own."""
        other = copy.copy(self)
        other.base = FrozenBase.of(self.module, names)
        return other

    def with_likelihood(self, likelihood: Likelihood) -> "Network":
        """This network with another reading of its outputs; it shares the module."""
        other = copy.copy(self)
        other.likelihood = likelihood
        return other

    def check_inputs(self, x: Inputs) -> None:
        """Raise a ValueError for floating-point inputs of a type that none of the weights has."""
        types = dict.fromkeys(p.dtype for p in self.module.parameters() if p.is_floating_point())
        for tensor in tensors(x):
            if tensor.is_floating_point() and tensor.dtype not in types:
                raise ValueError(
                    f"inputs are {tensor.dtype} but the network's weights are {' and '.join(map(str, types))}: "
                    f"convert the inputs with x.to({self.input_dtype}), or the module with module.to({tensor.dtype})"
                )

    def check_precision(self, what: str, advice: str) -> None:
        """Raise a ValueError for selected weights that are coarser than float32, which `what` cannot do with."""
        parameters = dict(self.module.named_parameters())
        coarse = [name for name in self.names if parameters[name].dtype not in (torch.float32, torch.float64)]
        if not coarse:
            return
        if len(coarse) == len(self.names):
            raise ValueError(f"{what} needs weights in float32 or float64, and these are {self.dtype}: {advice}")
        raise ValueError(
            f"{what} needs weights in float32 or float64, and of those selected {coarse[0]} is {self.dtype} "
            f"({len(coarse)} of {len(self.names)} tensors): leave these out with parameters= (adapters alone are "
            f"parameters='*lora_*'), or {advice}"
        )

    def fixed(self) -> Params:
        """Every parameter and buffer that is not selected, as it is: what a saved posterior needs beside its state."""
        everything = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        selected = set(self.names)
        return {name: value.detach() for name, value in everything.items() if name not in selected}

    def with_fixed(self, values: Params) -> "Network":
        """A network whose parameters and buffers of these names have these values.

        They are copied, and so is what is not named; but of the frozen base what is not named is shared with this
        network, and what is named with the values that are given.
        """
        base = {name: p for name, p in self.module.named_parameters() if name in self.base.tensors}
        given = {n: v for n, v in values.items() if n in base and not same_storage(base[n], v)}
        others = {n: frozen_parameter(v.to(base[n].device, base[n].dtype)) for n, v in given.items()}
        other = self.with_module(copied(self.module, {id(p): others.get(name, p) for name, p in base.items()}))
        targets = dict(other.module.named_parameters()) | dict(other.module.named_buffers())
        with torch.no_grad():
            for name, value in values.items():
                if name not in base:
                    targets[name].copy_(value)
        return other

    def restricted(self, names: Iterable[str]) -> "Network":
        """This network with fewer parameters that inference is about; it shares the module."""
        wanted = set(names)
        other = copy.copy(self)
        other.names = tuple(name for name in self.names if name in wanted)
        return other

    @property
    def n_parameters(self) -> int:
        """How many numbers are selected."""
        parameters = dict(self.module.named_parameters())
        return sum(parameters[name].numel() for name in self.names)

    def fingerprint(self) -> str:
        """A digest of the names, shapes and types of all parameters and buffers and of which are selected."""
        return fingerprint_of(self.module, self.names)

    def layers(self) -> list[Layer]:
        """Every submodule that owns parameters, and how many of them are selected."""
        counts: dict[str, dict[str, int]] = {}
        for name, parameter in self.module.named_parameters():
            counts.setdefault(layer_of(name), {})[name] = parameter.numel()
        layers, selected = [], set(self.names)
        for prefix, parameters in counts.items():
            rest = parameters.keys() - selected
            reasons = {"frozen (requires_grad=False)" if n in self.frozen else "left out by parameters=" for n in rest}
            kind = type(self.module.get_submodule(prefix)).__name__
            counted = sum(parameters[name] for name in parameters.keys() & selected)
            layers.append(Layer(prefix, kind, sum(parameters.values()), counted, " and ".join(sorted(reasons))))
        return layers


def _fits(signature: inspect.Signature, *args: Any, **kwargs: Any) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def fingerprint_of(module: nn.Module, names: tuple[str, ...]) -> str:
    """The fingerprint of a network of this module with these names selected."""
    everything = [*module.named_parameters(), *module.named_buffers()]
    listing = [[name, list(value.shape), str(value.dtype)] for name, value in everything]
    return hashlib.sha256(json.dumps([listing, names]).encode()).hexdigest()


def layer_of(name: str) -> str:
    """The submodule that a parameter or buffer belongs to."""
    return name.rpartition(".")[0]


def _check_kinds(module: Any, likelihood: Any, prior: Any) -> None:
    """Raise a TypeError for a class or a name in the place of an instance, which is the usual slip."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"the model must be a torch module, got {module!r}: build one first")
    if isinstance(likelihood, type) or not hasattr(likelihood, "log_prob"):
        raise TypeError(f"the likelihood must be an instance such as caveat.Categorical(), got {likelihood!r}")
    if prior is not None and (isinstance(prior, type) or not hasattr(prior, "log_prob")):
        raise TypeError(f"the prior must be an instance such as caveat.GaussianPrior(1.0), got {prior!r}")
    if empty := [name for name, tensor in [*module.named_parameters(), *module.named_buffers()] if tensor.is_meta]:
        raise ValueError(f"{empty[0]!r} has no values (it is on the meta device): load weights into the module first")


def _check_selected(module: nn.Module, names: tuple[str, ...]) -> None:
    """Raise a ValueError for weights that no posterior can be about: complex ones, and merged adapters'."""
    parameters = dict(module.named_parameters())
    for name in names:
        if parameters[name].is_complex():
            raise ValueError(
                f"parameter {name!r} is {parameters[name].dtype}, and inference is about real weights: keep "
                "torch.view_as_real(w) as the parameter and take torch.view_as_complex of it in forward, or leave it "
                "out with parameters="
            )
    for layer, one in module.named_modules():
        own = [name for name in names if name.startswith(f"{layer}.")]
        if getattr(one, "merged", False) is True and own:  # as layers of peft and loralib say it
            raise ValueError(
                f"the adapters in {layer!r} are merged into their base, so that no output depends on {own[0]!r}: "
                "unmerge them first (unmerge_adapter()), or leave them out with parameters="
            )


def without_autocast(device: torch.device) -> torch.autocast:
    """A context in which a surrounding autocast has no effect.

    Autocast's cache is off in it: torch empties the cache only when the outermost context is left, so that an autocast
    inside a training loop would go on with the rounded weights of the first step.
    """
    return torch.autocast(device.type, enabled=False, cache_enabled=False)


def _select(module: nn.Module, parameters: ParameterFilter) -> tuple[str, ...]:
    """Names of the trainable parameters that the filter takes, in the module's order."""
    trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not trainable:
        adapters = any("lora_" in name for name, _ in module.named_parameters())
        loaded = ", or load adapters with PeftModel.from_pretrained(base, folder, is_trainable=True)" * adapters
        raise ValueError(
            f"every parameter is frozen: call requires_grad_(True) on those that inference is about{loaded}"
        )
    filters = [parameters] if callable(parameters) or isinstance(parameters, str) else list(parameters)
    names: set[str] = set()
    for wanted in filters:
        if not isinstance(wanted, str) and not callable(wanted):
            raise TypeError(
                f"parameters= takes patterns of names, such as 'head.*', or a predicate of (name, tensor), not a "
                f"{type(wanted).__name__}: {list(trainable)[:3]} are names"
            )
        matched = {n for n, p in trainable.items() if (wanted(n, p) if callable(wanted) else fnmatchcase(n, wanted))}
        if not matched:
            known = list(trainable)[:8]
            raise ValueError(f"parameters={wanted!r} matches none of the module's trainable parameters: {known}")
        names |= matched
    if not names:
        raise ValueError("parameters= is empty: give at least one name pattern, or '*' for all")
    return tuple(name for name in trainable if name in names)


def _patterns(given: str | Iterable[str], names: tuple[str, ...]) -> tuple[str, ...]:
    """Name patterns, each of which matches some of the names."""
    patterns = (given,) if isinstance(given, str) else tuple(given)
    for pattern in patterns or ("",):
        if not any(fnmatchcase(name, pattern) for name in names):
            known = list(names)[:8]
            raise ValueError(f"initialise={pattern!r} matches none of the parameters that inference is about: {known}")
    return patterns
