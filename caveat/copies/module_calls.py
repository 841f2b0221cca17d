"""A call of a module at other weights than its own, which leaves it as it was."""

from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

__all__ = ["called_with"]


def called_with(
    module: nn.Module, values: dict[str, Tensor], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """Outputs of the module with these tensors in the place of its own, shared ones wherever they are.

    A tensor that the module replaces is replaced among `values`. torch's own tying goes by name: under a layer that has
    two names it would put a value in twice, and leave it in the module when the call is over.
    """
    names_of: dict[int, list[str]] = {}
    for prefix, layer in module.named_modules():  # each layer once, so each place once
        for own in (layer._parameters, layer._buffers):
            for name, tensor in own.items():
                if tensor is not None:
                    names_of.setdefault(id(tensor), []).append(f"{prefix}.{name}" if prefix else name)
    given = dict(values)
    for names in names_of.values():
        if len(names) > 1 and (named := [name for name in names if name in values]):
            given |= {name: values[named[0]] for name in names if name not in values}
    outputs = functional_call(module, given, args, kwargs, tie_weights=False)
    values.update({name: given[name] for name in values})
    return outputs
