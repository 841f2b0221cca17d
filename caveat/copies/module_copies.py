"""Copies of a module, without wrappers around it: whole ones, and ones that share what nobody writes."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from caveat.batches import tensors

__all__ = [
    "copied",
    "frozen_parameter",
    "moved",
    "same_storage",
    "sharing_copy",
    "unwrapped",
    "with_stored_values",
]


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside compiled and data-parallel wrappers."""
    while (kind := type(module).__name__) in ("OptimizedModule", "DataParallel", "DistributedDataParallel"):
        module = module._orig_mod if kind == "OptimizedModule" else module.module  # type: ignore[assignment]
    return module


def copied(module: nn.Module, instead: dict[int, Tensor] | None = None) -> nn.Module:
    """A deep copy; activations that a module keeps from its last pass are copied without their graph.

    `instead` has the tensors that the copy gets in the place of those of the module, by the identity of the latter.
    """
    attributes = (value for child in module.modules() for value in vars(child).values())
    memo: dict[int, Any] = {id(t): t.detach().clone() for value in attributes for t in tensors(value) if not t.is_leaf}
    return copy.deepcopy(module, memo | (instead or {}))


def sharing_copy(module: nn.Module) -> tuple[nn.Module, tuple[str, ...]]:
    """A copy without wrappers whose frozen parameters have the module's storage, and the names of these.

    They are objects of their own, so that a module that is moved or cast afterwards leaves them as they are. Buffers
    are copied: passes write into them.
    """
    module = unwrapped(module)
    named = [*module.named_parameters(), *module.named_buffers()]
    lazy = [name for name, tensor in named if nn.parameter.is_lazy(tensor)]
    if lazy:
        raise ValueError(f"{lazy[0]} has no values yet (a lazy layer): run one batch through the module first")
    # Writes to a tensor that was made in inference mode could not be noticed.
    frozen = ((name, p) for name, p in module.named_parameters() if not p.requires_grad)
    shared = {name: p for name, p in frozen if not p.is_inference()}
    try:
        private = copied(module, {id(tensor): _alias(tensor) for tensor in shared.values()})
    except Exception as error:
        raise ValueError(f"the module cannot be copied, and its copy is what inference works on: {error}") from error
    if not any(p.is_floating_point() for p in private.parameters()):
        raise ValueError("the module has no floating-point parameters, so there is nothing to infer")
    return private, tuple(shared)


def _alias(parameter: Tensor) -> Tensor:
    """Another parameter with the same storage; itself where it is of a class that only its maker can make."""
    return frozen_parameter(parameter) if type(parameter) is nn.Parameter else parameter


def moved(module: nn.Module, device: torch.device | str) -> nn.Module:
    """A copy on another device, without a whole copy on the old one."""
    plain = (p for p in module.parameters() if type(p) is nn.Parameter)
    return copied(module, {id(p): frozen_parameter(p.to(device)) for p in plain}).to(device)


def with_stored_values(module: nn.Module, names: set[str], values: dict[str, Tensor]) -> nn.Module:
    """A copy in which the parameters with these names are trainable and the others are frozen.

    The others have the storage of the stored values, or that of the module where there are none.
    """
    parameters = [(name, p) for name, p in module.named_parameters() if name not in names]
    stored = {id(p): frozen_parameter(values[name].to(p.device)) for name, p in parameters if name in values}
    shared = {id(p): _alias(p) for name, p in parameters if name not in values}
    whole = copied(module, stored | shared)
    for name, parameter in whole.named_parameters():
        parameter.requires_grad_(name in names)
    with torch.no_grad():
        for name, buffer in whole.named_buffers():
            if name in values:
                buffer.copy_(values[name])
    return whole


def frozen_parameter(value: Tensor) -> Tensor:
    """A frozen parameter that has the storage of a value."""
    return nn.Parameter(value.detach(), requires_grad=False)


def same_storage(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same numbers in memory."""
    return tensor.data_ptr() == other.data_ptr() and tensor.shape == other.shape and tensor.stride() == other.stride()
